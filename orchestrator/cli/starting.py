"""What ``dflashctl launch`` does with its options, once the connection is on its way."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import launch as launching
from orchestrator import release as releases
from orchestrator import snapshot
from orchestrator.audit import audited
from orchestrator.cli import output
from orchestrator.cli.session import Session
from orchestrator.errors import UsageError
from orchestrator.fleet import Opening
from orchestrator.laptop_path import laptop_path, working_folder
from orchestrator.launch import Order, Started
from orchestrator.release import Release
from orchestrator.run import RunRef, new_run_id
from orchestrator.target import Target


@dataclass(frozen=True)
class Wishes:
    """The options of ``launch``, as they were given."""

    words: tuple[str, ...]
    config: str | None
    code: Path | None
    no_push: bool
    name: str | None
    env: tuple[str, ...]
    env_file: Path | None
    log: str | None
    force: bool
    restarts: int
    ranks: int | None
    follow: bool
    wait: bool
    dry_run: bool
    as_json: bool


def start(session: Session, targets: list[Target], opening: Opening | None, wishes: Wishes) -> int:
    """Start one run, or one over several containers; the exit code.

    :param opening: the channel of the only target, on its way.
    """
    launching.check_log_link(wishes.log)
    release = None if wishes.no_push else _release(session, wishes.code, wishes.config)
    orders = _orders(session, targets, release, wishes)
    if wishes.dry_run:
        _show_plans(targets, orders, release, wishes.ranks, wishes.as_json)
        return 0
    try:
        if opening is None:
            refs = _launch_nodes(session, targets, orders, release, wishes.ranks, wishes.as_json)
        else:
            refs = [_launch_one(session, targets[0], orders[0], release, opening, wishes.as_json)]
    except KeyboardInterrupt:
        _tell_interrupted(session, orders)
        raise
    if not (wishes.follow or wishes.wait):
        return 0
    from orchestrator.cli.ending import follow_runs
    from orchestrator.follow import Start

    return follow_runs(session, refs, start=Start(), show=wishes.follow, as_json=wishes.as_json)


def _orders(
    session: Session, targets: list[Target], release: Release | None, wishes: Wishes
) -> list[Order]:
    """One for each container, all under one run id."""
    secrets = launching.read_environment_file(wishes.env_file) if wishes.env_file else {}
    variables = launching.parse_environment(wishes.env)
    run_id = new_run_id(wishes.name)
    inside = _config_inside(wishes.config, release)
    return [
        Order(
            run_id=run_id,
            name=wishes.name or "run",
            command=launching.command_for(
                target,
                wishes.words,
                inside,
                release.has(launching.START_SCRIPT) if release else False,
                str(release.root.path) if release else None,
            ),
            config=inside,
            environment=variables,
            secrets=secrets,
            log_link=wishes.log,
            force=wishes.force,
            restarts=wishes.restarts,
            predecessor=_predecessor(session, target),
        )
        for target in targets
    ]


def _launch_one(
    session: Session,
    target: Target,
    order: Order,
    release: Release | None,
    opening: Opening,
    as_json: bool,
) -> RunRef:
    meter = output.Meter("pushing", release.bytes if release else None)
    with audited(session.fleet, target, "launch", output.notice, run_id=order.run_id):
        try:
            started = launching.launch(
                session.fleet,
                target,
                order,
                release,
                opening=opening,
                notice=output.notice,
                progress=meter,
            )
        finally:
            meter.close()
        # Before the line is written, which takes a round trip more.
        _tell(started, release, as_json)
    return RunRef(target, order.run_id)


def _tell_interrupted(session: Session, orders: list[Order]) -> None:
    """A start that was asked for goes on without us: nobody should have to guess."""
    from orchestrator.nodes import node_id

    ids = {order.run_id for order in orders}
    ids |= {node_id(order.run_id, rank) for rank, order in enumerate(orders)}
    for run in session.state.runs():
        if run.run_id in ids:
            output.notice(
                f"interrupted: {run.run_id} may have started on {run.target.name}; "
                f"see dflashctl status {run.run_id}"
            )


def _launch_nodes(
    session: Session,
    targets: list[Target],
    orders: list[Order],
    release: Release | None,
    ranks: int | None,
    as_json: bool,
) -> list[RunRef]:
    from orchestrator import nodes

    # One line a host and container, each with the outcome of the whole.
    with ExitStack() as lines:
        for rank, (target, order) in enumerate(zip(targets, orders, strict=True)):
            run_id = nodes.node_id(order.run_id, rank)
            lines.enter_context(
                audited(session.fleet, target, "launch", output.notice, run_id=run_id)
            )
        all_started = nodes.launch(
            session.fleet, targets, orders, release, notice=output.notice, ranks=ranks
        )
        for started in all_started:
            _tell(started, release, as_json)
    return [RunRef(started.target, started.run_id) for started in all_started]


def _release(session: Session, code: Path | None, config: str | None) -> Release:
    root = snapshot.find_root(code, working_folder())
    path = laptop_path(config) if config else None
    if path is not None and not path.is_file():
        raise UsageError(
            f"--config {config}: no such file",
            next_step="give a file of this machine; with --no-push a path inside the container",
        )
    return releases.build(root, session.laptop, path)


def _config_inside(config: str | None, release: Release | None) -> str | None:
    if config is None or release is None:
        return config
    return releases.config_path(laptop_path(config), release.root)


def _predecessor(session: Session, target: Target) -> str | None:
    newest = session.state.newest()
    return newest.run_id if newest and newest.target.name == target.name else None


def _tell(started: Started, release: Release | None, as_json: bool) -> None:
    place = started.target.arguments
    warned = [check.name for check in started.checks if not check.ok]
    if warned:
        output.notice(f"preflight warns of {', '.join(warned)}: dflashctl doctor {place}")
    moved, unlinked = (started.answer.get(f"log_link_{what}") for what in ("moved", "failed"))
    if moved:
        output.notice(f"the file that stood at the path of --log is now {moved}")
    if unlinked:
        output.notice(f"no link to the log was made at the path of --log: {unlinked}")
    if as_json:
        output.emit(started.as_json())
        return
    pushed = f", {release.files} files, {output.size(release.bytes)}" if release else ""
    state = "already runs" if started.answer.get("already") else "started"
    output.say(
        f"{started.run_id}\n"
        f"  {state} on {started.target.name} "
        f"(release {started.answer.get('release') or 'none'}{pushed})\n"
        f"  follow it:     dflashctl tail {started.run_id}\n"
        f"  what is wrong: dflashctl diag {started.run_id}"
    )


def _show_plans(
    targets: list[Target],
    orders: list[Order],
    release: Release | None,
    ranks: int | None,
    as_json: bool,
) -> None:
    if len(targets) > 1:
        from orchestrator.nodes import UNMET, node_orders

        orders = node_orders(orders, UNMET, [ranks or 1] * len(targets))
    for target, order in zip(targets, orders, strict=True):
        _show_plan(target, order, release, as_json)


def _show_plan(target: Target, order: Order, release: Release | None, as_json: bool) -> None:
    steps = launching.plan(target, order, release)
    if as_json:
        shown: list[dict[str, Any]] = [{"to": step.label, "text": step.text} for step in steps]
        output.emit({"run_id": order.run_id, "steps": shown})
        return
    for step in steps:
        output.say(step.line())
