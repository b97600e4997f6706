"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Targets = Annotated[
    list[str] | None,
    typer.Argument(metavar="TARGET", help="Inventory names or groups.", show_default=False),
]
Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN|TARGET",
        help="Run ids, your own runs' --name, inventory names, groups; default: the newest.",
        show_default=False,
    ),
]
OwnRuns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN|TARGET",
        help="Run ids, your own runs' --name, inventory names, groups; default: your newest.",
        show_default=False,
    ),
]
HostOption = Annotated[
    str | None,
    typer.Option("--host", help="A host of the inventory, or anything ssh takes."),
]
CtOption = Annotated[int | None, typer.Option("--ct", help="The container's number on it.")]
InventoryOption = Annotated[
    Path | None,
    typer.Option(
        "--inventory",
        envvar="DFLASHCTL_INVENTORY",
        help="An inventory file or folder.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]
