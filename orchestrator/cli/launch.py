"""``dflashctl launch``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator import launch as launching
from orchestrator import release as releases
from orchestrator import snapshot
from orchestrator.audit import audited
from orchestrator.cli import output
from orchestrator.cli.app import COMMAND_KEY
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Targets
from orchestrator.cli.session import Session, open_session
from orchestrator.errors import UsageError
from orchestrator.fleet import Opening
from orchestrator.launch import Order, Started
from orchestrator.release import Release
from orchestrator.run import RunRef, new_run_id
from orchestrator.target import Target


def launch(
    ctx: typer.Context,
    targets: Targets = None,
    host: HostOption = None,
    ct: CtOption = None,
    config: Annotated[
        str | None, typer.Option("--config", help="Run the trainer on this YAML file.")
    ] = None,
    code: Annotated[
        Path | None,
        typer.Option("--code", help="The folder to push; default: this git work tree or folder."),
    ] = None,
    no_push: Annotated[
        bool, typer.Option("--no-push", help="Push nothing: start what is already there.")
    ] = False,
    name: Annotated[str | None, typer.Option("--name", help="The run's name.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="K=V", help="Set a variable for the run.")
    ] = None,
    env_file: Annotated[
        Path | None,
        typer.Option("--env-file", help="K=V lines, kept out of every record and command line."),
    ] = None,
    log: Annotated[
        str | None,
        typer.Option("--log", metavar="PATH", help="Also link the log at this container path."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start although another run lives there.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            help="Several containers: processes of each; default: its GPUs.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end; exit with the run's verdict.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be sent; reach nothing.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Preflight, push the code, start the run under tmux.

    Starts -- COMMAND if given; else the trainer on --config FILE; else start_training.sh at the top
    of the pushed folder. Prints the run id. Several containers make one run through torchrun, one
    node each, after all of them have reached the first.
    """
    words: tuple[str, ...] = ctx.meta.get(COMMAND_KEY, ())
    with open_session(inventory) as session:
        found = session.targets(targets, host, ct) or [session.one_target(targets, host, ct)]
        launching.check_log_link(log)
        secrets = launching.read_environment_file(env_file) if env_file else {}
        variables = launching.parse_environment(env or [])
        run_id = new_run_id(name)
        alone = len(found) == 1
        opening = session.fleet.opening(found[0]) if alone and not dry_run else None
        release = None if no_push else _release(session, code, config)
        inside = _config_inside(config, release)
        orders = [
            Order(
                run_id=run_id,
                name=name or "run",
                command=launching.command_for(
                    target,
                    words,
                    inside,
                    release.has(launching.START_SCRIPT) if release else False,
                    str(release.root.path) if release else None,
                ),
                config=inside,
                environment=variables,
                secrets=secrets,
                log_link=log,
                force=force,
                predecessor=_predecessor(session, target),
            )
            for target in found
        ]
        if dry_run:
            _show_plans(found, orders, release, ranks, as_json)
            return
        if opening is None:
            refs = _launch_nodes(session, found, orders, release, ranks, as_json)
        else:
            refs = [_launch_one(session, found[0], orders[0], release, opening, as_json)]
        if follow or wait:
            from orchestrator.cli.ending import follow_runs
            from orchestrator.follow import Start

            raise typer.Exit(
                follow_runs(session, refs, start=Start(), show=follow, as_json=as_json)
            )


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
    root = snapshot.find_root(code, Path.cwd())
    path = Path(config).expanduser() if config else None
    if path is not None and not path.is_file():
        raise UsageError(
            f"--config {config}: no such file",
            next_step="give a file of this machine; with --no-push a path inside the container",
        )
    return releases.build(root, session.laptop, path)


def _config_inside(config: str | None, release: Release | None) -> str | None:
    if config is None or release is None:
        return config
    return releases.config_path(Path(config).expanduser(), release.root)


def _predecessor(session: Session, target: Target) -> str | None:
    newest = session.state.newest()
    return newest.run_id if newest and newest.target.name == target.name else None


def _tell(started: Started, release: Release | None, as_json: bool) -> None:
    place = started.target.arguments
    warned = [check.name for check in started.checks if not check.ok]
    if warned:
        output.notice(f"preflight warns of {', '.join(warned)}: dflashctl doctor {place}")
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
