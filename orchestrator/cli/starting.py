"""What ``dflashctl launch`` does with its options, once the connection is on its way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator import launch as launching
from orchestrator import orders
from orchestrator.cli import interrupt, output
from orchestrator.cli.session import Session
from orchestrator.fleet import Opening
from orchestrator.launch import Order, Started
from orchestrator.release import Release
from orchestrator.run import RunRef
from orchestrator.target import Target
from orchestrator.terminal_text import counted


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
    secret: tuple[str, ...]
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
    with interrupt.told("nothing was started"):
        release = None
        if not wishes.no_push:
            release = orders.take_code(session.laptop, wishes.code, wishes.config)
        wanted = orders.make(
            targets,
            release,
            words=wishes.words,
            config=wishes.config,
            name=wishes.name,
            variables=launching.parse_environment(wishes.env),
            env_file=wishes.env_file,
            secret=wishes.secret,
            log=wishes.log,
            force=wishes.force,
            restarts=wishes.restarts,
        )
    if wishes.dry_run:
        _show_plans(targets, wanted, release, wishes.ranks, wishes.as_json)
        return 0
    refs = _start(session, targets, wanted, release, opening, wishes)
    if not (wishes.follow or wishes.wait):
        return 0
    from orchestrator.cli.ending import follow_runs
    from orchestrator.follow import Start

    run_id = refs[0].run_id
    going_on = f"the run goes on: dflashctl tail {run_id}, or end it: dflashctl stop {run_id}"
    with interrupt.told(going_on):
        return follow_runs(session, refs, start=Start(), show=wishes.follow, as_json=wishes.as_json)


def _start(
    session: Session,
    targets: list[Target],
    wanted: list[Order],
    release: Release | None,
    opening: Opening | None,
    wishes: Wishes,
) -> list[RunRef]:
    meter = output.Meter("pushing")

    def tell(started: Started) -> None:
        meter.close()
        _tell(started, release, wishes.as_json)

    try:
        started = orders.start(
            session.fleet,
            targets,
            wanted,
            release,
            notice=output.notice,
            ranks=wishes.ranks,
            opening=opening,
            progress=meter,
            tell=tell,
        )
    finally:
        meter.close()
    return [RunRef(one.target, one.run_id) for one in started]


def _tell(started: Started, release: Release | None, as_json: bool) -> None:
    place = started.target.arguments
    warned = [check.name for check in started.checks if not check.ok]
    if warned:
        output.notice(f"preflight warns of {', '.join(warned)}; more: dflashctl doctor {place}")
    moved, unlinked = (started.answer.get(f"log_link_{what}") for what in ("moved", "failed"))
    if moved:
        output.notice(f"the file that stood at the path of --log is now {moved}")
    if unlinked:
        output.notice(f"no link to the log was made at the path of --log: {unlinked}")
    if as_json:
        output.emit(started.as_json())
    else:
        output.say(words(started, release))


def words(started: Started, release: Release | None) -> str:
    """What runs, of which code, and how to follow it."""
    pushed = f", {counted(release.files, 'file')}, {output.size(release.bytes)}" if release else ""
    its_release = started.answer.get("release")
    code = f"release {its_release}{pushed}" if its_release else "nothing was pushed"
    state = "already runs" if started.answer.get("already") else "started"
    return (
        f"{started.run_id}\n"
        f"  {state} on {started.target.name} ({code})\n"
        f"  follow it:     dflashctl tail {started.run_id}\n"
        f"  what is wrong: dflashctl diag {started.run_id}"
    )


def _show_plans(
    targets: list[Target],
    wanted: list[Order],
    release: Release | None,
    ranks: int | None,
    as_json: bool,
) -> None:
    if len(targets) > 1:
        from orchestrator.nodes import UNMET, node_orders

        wanted = node_orders(wanted, UNMET, [ranks or 1] * len(targets))
    for target, order in zip(targets, wanted, strict=True):
        steps = launching.plan(target, order, release)
        output.show_steps(steps, {"run_id": order.run_id}, as_json=as_json)
