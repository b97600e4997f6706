"""``dflashctl inventory discover``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from orchestrator import discover as discovering
from orchestrator.cli import output
from orchestrator.cli.options import InventoryOption, JsonOption
from orchestrator.cli.session import Session, open_session
from orchestrator.discover import Answers, Discovery
from orchestrator.errors import DflashctlError, UsageError
from orchestrator.fanout import each_host
from orchestrator.laptop_path import writing
from orchestrator.private_file import write_private
from orchestrator.target import HostTarget, resolve_host


def discover(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOST", help="Default: every host of the inventory."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Add what is new to inventory.d/HOST.yaml.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read a host's containers and their GPUs into YAML; what is written down stays as it is."""
    failed: list[DflashctlError] = []
    with open_session(inventory, as_json=as_json) as session:
        wanted = hosts or list(session.inventory.hosts)
        if not wanted:
            raise UsageError(
                "the inventory has no host", next_step="dflashctl inventory discover root@HOST"
            )
        folder = _folder(session, inventory) if write else None
        targets = [resolve_host(session.inventory, name) for name in dict.fromkeys(wanted)]
        for target, answers in each_host(session.fleet, targets, partial(_ask, session)):
            try:
                if isinstance(answers, DflashctlError):
                    raise answers
                _one(session, target, answers, folder, as_json)
            except DflashctlError as error:
                # A host that is down hides none of the others.
                failed.append(error)
                output.fail(error, as_json=as_json)
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed))


def _folder(session: Session, inventory: Path | None) -> Path:
    if inventory is None:
        return session.laptop.inventory_folder
    if inventory.is_dir():
        return inventory
    raise UsageError(
        f"--write adds files to a folder, and the inventory is the one file {inventory}",
        next_step="leave out --write, and paste what it prints",
    )


def _ask(session: Session, host: HostTarget) -> Answers:
    return discovering.ask(session.fleet.host(host))


def _one(
    session: Session, host: HostTarget, answers: Answers, folder: Path | None, as_json: bool
) -> None:
    found = discovering.discover(session.inventory, host, answers.containers, answers.cards)
    text = discovering.render(found)
    path = folder / f"{found.host}.yaml" if folder else None
    if path is not None and text:
        _write(path, text, found)
    if as_json:
        body = {"host": found.host, "known": list(found.known), "gone": list(found.gone)}
        new = [vars(item) for item in found.new]
        output.emit({**body, "new": new, "file": str(path) if path and text else None})
        return
    if text and path is None:
        sys.stdout.write(text)
    _tell(found, path if text else None)


def _write(path: Path, text: str, found: Discovery) -> None:
    if path.exists():
        text = discovering.add(path.read_text(encoding="utf-8"), found, path)
    with writing(path):
        write_private(path, text)


def _tell(found: Discovery, path: Path | None) -> None:
    counts = [f"{len(found.new)} new", f"{len(found.known)} known"]
    where = f", written to {path}" if path and found.new else ""
    output.notice(f"{found.host}: {', '.join(counts)}{where}")
    for name in found.gone:
        output.notice(f"{found.host}: the inventory's {name} is not on this host any more")
