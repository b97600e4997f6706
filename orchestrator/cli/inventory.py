"""``dflashctl inventory``."""

from __future__ import annotations

import typer

from orchestrator.cli import output
from orchestrator.cli.app import VerbCommand
from orchestrator.cli.discover import discover
from orchestrator.cli.options import InventoryOption, JsonOption, Targets
from orchestrator.cli.session import open_session
from orchestrator.run import ask_all
from orchestrator.target import everything, resolve

app = typer.Typer(help="List, find and check hosts and containers.", no_args_is_help=True)
EMPTY = (
    "no container is known: dflashctl init writes an inventory, dflashctl inventory "
    "discover HOST reads a host's; or give --host H --ct N"
)
app.command("discover", cls=VerbCommand)(discover)


@app.command("list", cls=VerbCommand)
def list_containers(inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """List hosts, containers and groups; reach nothing."""
    with open_session(inventory, as_json=as_json) as session:
        known = session.inventory
        if as_json:
            output.emit(known.model_dump(mode="json"))
            return
        columns = (("CONTAINER", 20), ("HOST", 14), ("CT", 6), ("GPUS", 16), ("GROUPS", 20))
        with output.Table(*columns) as table:
            for name, container in known.containers.items():
                gpus = ",".join(map(str, container.gpus))
                table.row(name, container.host, container.ct, gpus, " ".join(container.groups))
        if not known.containers:
            output.say(EMPTY)


@app.command(cls=VerbCommand)
def check(
    targets: Targets = None, inventory: InventoryOption = None, as_json: JsonOption = False
) -> None:
    """Reach every container; exits 3 if one does not answer, 4 if one is not running."""
    code = 0
    with open_session(inventory, ask=False, patient=False, as_json=as_json) as session:
        known = session.inventory
        chosen = resolve(known, targets) if targets else everything(known)
        if not chosen and not as_json:
            output.say(EMPTY)
        for asked in ask_all(session.fleet, chosen, limit=1):
            error = asked.error
            code = max(code, error.exit_code if error else 0)
            if as_json:
                place = {"container": asked.target.name, "host": asked.target.host.name}
                body = error.as_dict() if error else {"error": None}
                output.emit({**body, **place, "ct": asked.target.ct})
            elif error:
                output.say(f"{asked.target.name:<20} {error.what}\n{'':20} next: {error.next_step}")
            else:
                output.say(f"{asked.target.name:<20} answers")
    raise typer.Exit(code)
