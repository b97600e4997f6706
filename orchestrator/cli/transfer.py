"""``dflashctl push`` and ``pull``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator import push as pushing
from orchestrator import release as releases
from orchestrator import snapshot, transfer
from orchestrator.audit import audited
from orchestrator.channel import AgentChannel
from orchestrator.cli import interrupt, output
from orchestrator.cli.options import (
    CtOption,
    HostOption,
    InventoryOption,
    JsonOption,
    Runs,
    Targets,
)
from orchestrator.cli.session import open_session
from orchestrator.errors import DflashctlError
from orchestrator.fanout import each
from orchestrator.fleet import Fleet, Opening
from orchestrator.laptop_path import laptop_path, working_folder
from orchestrator.reconnect import reconnecting
from orchestrator.release import Release
from orchestrator.target import Target
from orchestrator.terminal_text import counted


def push(
    targets: Targets = None,
    host: HostOption = None,
    ct: CtOption = None,
    code: Annotated[
        Path | None,
        typer.Option("--code", help="The folder to push; default: this git work tree or folder."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be pushed; reach nothing.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Push the code as an immutable release; start nothing. Goes on after a cut."""
    going_on = "push again to go on from what has arrived"
    with open_session(inventory, as_json=as_json) as session, interrupt.told(going_on):
        found = session.some_targets(targets, host, ct)
        alone = len(found) == 1 and not dry_run
        # The files are hashed while pct starts.
        opening = session.fleet.opening(found[0]) if alone else None
        release = releases.build(snapshot.find_root(code, working_folder()), session.laptop)
        if dry_run and as_json:
            paths = [entry.path for entry in release.entries]
            output.emit({"release": release.id, "bytes": release.bytes, "paths": paths})
            return
        if dry_run:
            for entry in release.entries:
                output.say(entry.path)
            output.notice(
                f"{counted(release.files, 'file')}, {output.size(release.bytes)}: {release.id}"
            )
            return
        failed = _push(session.fleet, found, release, opening, as_json)
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed))


def _push(
    fleet: Fleet,
    targets: Sequence[Target],
    release: Release,
    opening: Opening | None,
    as_json: bool,
) -> list[DflashctlError]:
    """Into all of them at once, told as they are done; what kept it from some.

    :param opening: the channel of the only target, on its way.
    """
    begun = [opening] if opening else []
    names = targets[0].name if len(targets) == 1 else f"{len(targets)} containers"
    meter = output.Meter(f"pushing to {names}")

    def work(target: Target) -> dict[str, Any]:
        with (
            audited(fleet, target, "push", output.notice, release=release.id),
            contextlib.ExitStack() as opened,
        ):
            return pushing.push(
                fleet,
                target,
                lambda: opened.enter_context(
                    begun.pop().result() if begun else fleet.container(target)
                ),
                release,
                notice=output.notice,
                progress=meter,
            )

    failed = []
    try:
        for target, answer in each(fleet, targets, work):
            if isinstance(answer, DflashctlError):
                output.fail(answer, as_json=as_json)
                failed.append(answer)
            else:
                _tell(target, release, answer, as_json)
    finally:
        meter.close()
    return failed


def _tell(target: Target, release: Release, answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.emit({**target.place, **answer})
        return
    was = "was there already" if answer["existing"] else "pushed"
    output.say(
        f"{answer['release']} {was} on {target.name}: {counted(release.files, 'file')}, "
        f"{output.size(release.bytes)}, at {answer['path']}"
    )
    if answer["removed"]:
        output.notice(f"older releases removed there: {', '.join(answer['removed'])}")


def pull(
    runs: Runs = None,
    host: HostOption = None,
    ct: CtOption = None,
    path: Annotated[
        str | None,
        typer.Option("--path", help="Only this: below the run's folder, or absolute."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Where to; default: ./RUN.", show_default=False)
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Every checkpoint, and the target's kept features.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a run's logs, records, data, newest and best checkpoint, verified; goes on after a cut.

    A second pull fetches only what changed. A folder that it makes ignores itself (.gitignore), so
    that the next launch or commit does not take it along; a .gitignore of what is pulled stays out.
    """
    going_on = "pull again to go on from what has arrived"
    with open_session(inventory, as_json=as_json) as session, interrupt.told(going_on):
        ref = session.one_run(runs, host, ct)

        def look(channel: AgentChannel) -> tuple[str, dict[str, str], transfer.Wanted]:
            run_id = ref.run_id or str(channel.call("run.status", lines=0)["run_id"])
            if path and path.startswith("/"):
                return run_id, {"path": path}, transfer.Wanted(every=True)
            if path or everything:
                below = {"path": path} if path else {}
                return run_id, {"run_id": run_id, **below}, transfer.Wanted(every=True)
            return run_id, {"run_id": run_id}, transfer.newest_and_best(channel, run_id)

        channels = partial(session.fleet.container, ref.target)
        run_id, source, wanted = reconnecting(session.fleet, channels, look, output.notice)
        meter = output.Meter("pulling")
        try:
            pulled = transfer.pull(
                session.fleet,
                ref.target,
                source,
                laptop_path(to or run_id),
                wanted=wanted,
                own_folder=to is None,
                notice=output.notice,
                progress=meter,
            )
        finally:
            meter.close()
        _tell_pulled(ref.target, run_id, pulled, as_json)


def _tell_pulled(target: Target, run_id: str, pulled: transfer.Pulled, as_json: bool) -> None:
    if not as_json:
        output.say(
            f"{counted(pulled.files, 'file')}, {output.size(pulled.bytes)} into "
            f"{pulled.destination} ({pulled.unchanged} unchanged)"
        )
        return
    output.emit(
        {
            "run_id": run_id,
            **target.place,
            "destination": str(pulled.destination),
            "files": pulled.files,
            "bytes": pulled.bytes,
            "unchanged": pulled.unchanged,
            "skipped": pulled.skipped,
        }
    )
