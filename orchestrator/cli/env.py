"""``dflashctl env freeze``, ``diff`` and ``sync``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.audit import audited
from orchestrator.cli import output
from orchestrator.cli.app import VerbCommand
from orchestrator.cli.options import (
    CtOption,
    HostOption,
    InventoryOption,
    JsonOption,
    Targets,
)
from orchestrator.cli.session import Session, open_session
from orchestrator.environment import remote
from orchestrator.environment.compare import Difference, compare, faults, worst
from orchestrator.environment.lock import Environment, read_lock
from orchestrator.environment.sync import Plan, plan
from orchestrator.errors import UsageError
from orchestrator.laptop_path import laptop_path, writing
from orchestrator.target import RUN_ID

app = typer.Typer(
    help="The container's Python and CUDA environment as a lock file.", no_args_is_help=True
)
COLOURS = {"breaks": "31;1", "may matter": "33", "harmless": "2"}


@app.command(cls=VerbCommand)
def freeze(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET|RUN", help="A container now, or a run as it began."),
    ] = None,
    host: HostOption = None,
    ct: CtOption = None,
    file: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write it there; default: standard output."),
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the environment of a container (or of a run) as a lock file."""
    with open_session(inventory, as_json=as_json) as session:
        if runs and len(runs) == 1 and host is None:
            found = _read(session, runs[0])
        else:
            target = session.one_target(runs, host, ct)
            found = remote.collect(session.fleet.container(target), target)
    for fault in faults(found):
        output.notice(f"{fault.key}: {fault.why} (next: {fault.remedy})")
    text = found.lock_text()
    if file is None:
        sys.stdout.write(text)
        return
    file = laptop_path(file)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    if as_json:
        output.emit({"file": str(file), "packages": len(found.packages)})
    else:
        output.say(f"wrote {file}: {_short(found)}")


@app.command(cls=VerbCommand)
def diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="The one that is known good.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The one in question.")],
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Show harmless differences, too.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two environments: containers, runs or lock files, in any mix.

    Each is an inventory name (or HOST/CT), a run id, or a file. Exits 1 if something breaks.
    """
    with open_session(inventory, as_json=as_json) as session:
        found = compare(_read(session, before), _read(session, after))
    heaviest = worst(found)
    if as_json:
        output.emit({"worst": heaviest, "differences": [d.as_dict() for d in found]})
    else:
        _show(found, every)
        if any("==" in d.remedy for d in found) and before.endswith(".json"):
            output.say(f"all packages at once: dflashctl env sync {after} --lock {before}")
    raise typer.Exit(1 if heaviest == "breaks" else 0)


@app.command(cls=VerbCommand)
def sync(
    targets: Targets = None,
    host: HostOption = None,
    ct: CtOption = None,
    lock: Annotated[
        Path | None, typer.Option("--lock", help="What `env freeze` wrote.", show_default=False)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands; install nothing.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Install a lock file's packages into a container's interpreter, with uv or pip.

    Packages are added and changed, never removed; Python itself and the driver stay as they are.
    """
    if lock is None:
        raise UsageError("--lock is missing", next_step="write one: dflashctl env freeze GOOD -o F")
    wanted = read_lock(laptop_path(lock))
    with open_session(inventory, as_json=as_json) as session:
        target = session.one_target(targets, host, ct)
        channel = session.fleet.container(target)
        planned = plan(wanted, remote.collect(channel, target))
        if not as_json:
            _show_plan(planned, dry_run)
        if dry_run or not planned.commands:
            if as_json:
                output.emit({"commands": planned.commands, "left": planned.left})
            return
        with audited(
            session.fleet, target, "env sync", output.notice, packages=sorted(planned.wanted)
        ):
            show = (lambda piece: None) if as_json else output.shower(sys.stdout)
            for piece in remote.install(channel, target, planned):
                show(piece)
        left = compare(wanted, remote.collect(channel, target))
    if as_json:
        differences = [d.as_dict() for d in left]
        output.emit({"commands": planned.commands, "left": planned.left, "still": differences})
    else:
        output.say(f"{len(planned.wanted)} packages installed; what still differs:")
        _show(left, every=False)


def _read(session: Session, word: str) -> Environment:
    """A lock file, a run's record, or a container as it is now."""
    path = laptop_path(word)
    if path.suffix == ".json" or path.is_file():
        return read_lock(path)
    if RUN_ID.match(word):
        ref = session.one_run([word], None, None)
        return remote.recorded(session.fleet.container(ref.target), ref.target, word)
    target = session.one_target([word], None, None)
    return remote.collect(session.fleet.container(target), target)


def _short(found: Environment) -> str:
    parts = [f"Python {found.python.version}"]
    parts.append(f"torch {found.torch.version}" if found.torch else "no torch")
    if found.driver:
        parts.append(f"driver {found.driver.version}")
    if found.gpus:
        parts.append(f"{len(found.gpus)} × {found.gpus[0].name}")
    return ", ".join([*parts, f"{len(found.packages)} packages"])


def _show(differences: list[Difference], every: bool) -> None:
    shown = [d for d in differences if every or d.weight != "harmless"]
    for d in shown:
        change = f": {_cut(d.before)} → {_cut(d.after)}" if d.before != d.after else ""
        output.say(f"{output.paint(f'{d.weight:<10}', COLOURS[d.weight])} {d.key}{change}")
        output.say(f"{'':10} {d.why}")
        if d.remedy:
            output.say(f"{'':10} next: {d.remedy}")
    hidden = len(differences) - len(shown)
    if not differences:
        output.say("no difference")
    elif hidden:
        output.say(f"{hidden} harmless differences (--all shows them)")


def _cut(value: str | None) -> str:
    """PATH-like values would fill the screen; the JSON has them whole."""
    if value is None:
        return "none"
    return value if len(value) <= 40 else f"{value[:18]}…{value[-18:]}"


def _show_plan(planned: Plan, dry_run: bool) -> None:
    for text in planned.left:
        output.notice(f"cannot be installed: {text}")
    if not planned.commands:
        output.say("nothing to install")
    for command in planned.commands if dry_run else ():
        output.say(shlex.join(command))
