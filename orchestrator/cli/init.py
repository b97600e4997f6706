"""``dflashctl init``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from orchestrator import inventory as inventories
from orchestrator import starter
from orchestrator.cli import output
from orchestrator.cli.options import InventoryOption, JsonOption
from orchestrator.errors import UsageError
from orchestrator.launch import START_SCRIPT
from orchestrator.paths import DEFAULT_WORKDIR, LaptopPaths
from orchestrator.starter import Choices, Written


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the script and the config go.")
    ] = Path(),
    host: Annotated[
        str | None, typer.Option("--host", help="The Proxmox host, as for ssh: root@10.1.2.6.")
    ] = None,
    ct: Annotated[
        int | None, typer.Option("--ct", min=1, help="The container's number on it.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What to call the container.")] = "train",
    model: Annotated[
        str | None, typer.Option("--model", help="The target model.", show_default=False)
    ] = None,
    python: Annotated[
        str, typer.Option("--python", help="The interpreter in the container.")
    ] = "python3",
    workdir: Annotated[
        str, typer.Option("--workdir", help="A folder in the container with room for runs.")
    ] = DEFAULT_WORKDIR,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a first inventory, start script and trainer config; overwrite nothing.

    On a terminal it asks for what the options leave open.
    """
    choices = Choices(
        host=host or _ask("--host", "Proxmox host, as for ssh", "root@10.1.2.6"),
        ct=ct or _number(_ask("--ct", "Number of the container", "200")),
        name=name,
        python=python,
        workdir=workdir,
        model=model or _ask("--model", "Target model", Choices.model, Choices.model),
    )
    text = starter.inventory_text(choices)
    with tempfile.TemporaryDirectory() as empty:
        starter.check_inventory(text, Path(empty))
    laptop = LaptopPaths()
    files = {
        inventory or laptop.inventory: text,
        folder / START_SCRIPT: starter.script_text(choices),
        folder / starter.CONFIG: starter.config_text(choices),
    }
    written = starter.write(files)
    if as_json:
        output.emit({"files": [{"path": str(w.path), "made": w.made} for w in written]})
        return
    _tell(written, choices, choices.name in inventories.load(inventory, laptop).containers)


def _tell(written: list[Written], choices: Choices, known: bool) -> None:
    """:param known: the inventory has the container's name, now or from before."""
    for file in written:
        output.say(f"{'wrote' if file.made else 'kept '}  {file.path}")
    name = choices.name
    if not known:
        name = f"--host {choices.host} --ct {choices.ct}"
        output.notice(
            f"the inventory was there already: add {choices.name} (host {choices.host}, container "
            f"{choices.ct}) to it, or use {name}"
        )
    output.say(
        f"\nnext:\n"
        f"  dflashctl doctor {name}                      # what the container lacks\n"
        f"  dflashctl launch {name} --config {starter.CONFIG}\n"
        f"  dflashctl tail"
    )


def _ask(option: str, question: str, example: str, default: str | None = None) -> str:
    """The answer of a person at a terminal; without one the default, if there is one.

    :raises UsageError: nobody is there to ask.
    """
    if not sys.stdin.isatty():
        if default is not None:
            return default
        raise UsageError(
            f"{option} is missing, and there is no terminal to ask on",
            next_step=f"give it ({option} {example}); a whole call: dflashctl init "
            "--host root@10.1.2.6 --ct 200 --name train-a --model Qwen/Qwen3-8B",
        )
    return str(typer.prompt(question, default=default or example))


def _number(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"{text!r} is not a container number", next_step="Proxmox counts from 100")
