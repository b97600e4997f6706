"""``dflashctl play``."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from typing import Annotated

import typer

from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption
from orchestrator.cli.session import Session, open_session
from orchestrator.errors import DflashctlError, UsageError
from orchestrator.paths import LaptopPaths
from orchestrator.playbook.book import BoundStep, available, find, load
from orchestrator.playbook.perform import functions
from orchestrator.playbook.runner import Result, describe, resume_argv, run, start_index
from orchestrator.playbook.stage import Stage
from orchestrator.run import RunRef
from orchestrator.target import Target


def play(
    playbook: Annotated[
        str | None,
        typer.Argument(metavar="PLAYBOOK|FILE", help="Without one: list them.", show_default=False),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="Inventory names or groups.", show_default=False),
    ] = None,
    host: HostOption = None,
    ct: CtOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Give a variable its value."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Show what each step would do; reach nothing.")
    ] = False,
    start_at: Annotated[
        str | None,
        typer.Option("--start-at", metavar="STEP", help="Begin there: a name or a number."),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="The run that steps after the launch mean."),
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a playbook: named steps, one status line each, stopping at the first that fails."""
    laptop = LaptopPaths()
    if playbook is None:
        _list(laptop, as_json)
        return
    path = find(playbook, laptop.playbooks)
    steps = load(path, f"playbook {playbook}").bind(settings or ())
    first = start_index(steps, start_at)
    if check:
        _check(steps, first, as_json)
        return
    words = [*(targets or ()), *(("--host", host, "--ct", str(ct)) if host else ())]
    with open_session(inventory, as_json=as_json) as session:
        chosen = _targets(session, targets, host, ct, run_id)
        stage = _stage(session, chosen, run_id, as_json)

        def again(step: BoundStep) -> list[str]:
            known = stage.refs[0].run_id if len(stage.refs) == 1 else run_id
            return resume_argv(playbook, step.name, words, settings or (), known)

        at = steps[first]
        try:
            for result in run(steps, functions(stage), first):
                _tell(result, max(len(step.name) for step in steps), as_json)
                if result.error is not None:
                    _stopped(session.fleet.named(result.error), again(result.step), as_json)
                    raise typer.Exit(result.error.exit_code)
                at = steps[min(max(result.number, first), len(steps) - 1)]
        except KeyboardInterrupt:
            line = shlex.join(again(at))
            output.notice(f"interrupted in step {at.name}; to do it again: {line}")
            raise


def _targets(
    session: Session,
    names: list[str] | None,
    host: str | None,
    ct: int | None,
    run_id: str | None,
) -> list[Target]:
    """The containers named; else that of the run named, of the newest run, or the only one."""
    found = session.targets(names, host, ct)
    if found:
        return found
    if run_id:
        return [session.one_run([run_id], None, None).target]
    newest = session.state.newest()
    if newest is not None:
        return [newest.target]
    if len(session.inventory.containers) == 1:
        return session.targets(list(session.inventory.containers), None, None)
    raise UsageError(
        "no container was named",
        next_step="dflashctl play PLAYBOOK TARGET, with a name of `dflashctl inventory list`",
    )


def _stage(session: Session, targets: list[Target], run_id: str | None, as_json: bool) -> Stage:
    def choose(named: str | None) -> list[RunRef]:
        if named:
            return session.runs([named], None, None)
        newest = session.state.newest()
        mine = newest is not None and [newest.target.name] == [t.name for t in targets]
        if newest is not None and mine:
            return [RunRef(newest.target, newest.run_id)]
        return [RunRef(target, None) for target in targets]

    show = (lambda piece: None) if as_json else output.shower(sys.stderr)
    stage = Stage(session.fleet, session.laptop, targets, choose, output.notice, show)
    if run_id:
        stage.refs = choose(run_id)
    return stage


def _tell(result: Result, width: int, as_json: bool) -> None:
    if as_json:
        output.emit(result.as_dict())
        return
    line = result.line(width)
    colour = "31;1" if result.error else "2" if result.skipped else ""
    output.say(output.paint(line, colour) if colour else line)


def _stopped(error: DflashctlError, again: list[str], as_json: bool) -> None:
    line = shlex.join(again)
    if as_json:
        output.emit({"state": "failed", "resume": again, **error.as_dict()})
        return
    output.fail(error, as_json=False)
    output.notice(f"go on from there: {line}")


def _check(steps: list[BoundStep], first: int, as_json: bool) -> None:
    if as_json:
        shown = [
            {"step": s.name, "action": s.kind, **s.action.model_dump(exclude_unset=True)}
            for s in steps[first:]
        ]
        output.emit({"steps": shown})
        return
    for number, step in enumerate(steps, 1):
        mark = "  (left out)" if number <= first else ""
        kind = f" ({step.kind})" if step.kind != step.name else ""
        output.say(f"{number}/{len(steps)} {step.name}{kind}{mark}")
        for line in describe(step) if not mark else ():
            output.say(f"      {line}")


def _list(laptop: LaptopPaths, as_json: bool) -> None:
    found = {}
    for name, path in available(laptop.playbooks).items():
        try:
            found[name] = load(path).description
        except DflashctlError as error:
            found[name] = f"does not read: {error.what}"
    if as_json:
        output.emit({"playbooks": found})
        return
    width = max(len(name) for name in found) + 2
    columns = shutil.get_terminal_size().columns
    for name, text in found.items():
        lines = textwrap.wrap(text, max(20, columns - width)) or [""]
        output.say(f"{name:<{width}}" + f"\n{'':<{width}}".join(lines))
