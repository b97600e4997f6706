"""``dflashctl lab up|down|status``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.app import VerbCommand
from orchestrator.lab import Lab, LabSpec
from orchestrator.lab.requirements import choose_backend
from orchestrator.lab.spec import DEFAULT_PORT, DEFAULT_ROOT, parse_containers
from orchestrator.paths import LaptopPaths

app = typer.Typer(
    help="A loopback Proxmox host on this machine: sshd, containers 200 to 202, and pct.",
    no_args_is_help=True,
)

Root = Annotated[
    Path | None,
    typer.Option(
        "--root", envvar="DFLASHCTL_LAB_ROOT", help="The lab's folder.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def user_inventory() -> Path:
    """Where the controller also looks: the default lab is found without any option."""
    return LaptopPaths().inventory_folder / "lab.yaml"


def make_lab(root: Path | None, **options: Any) -> Lab:
    """Only the default lab writes into the user's configuration."""
    root = root or DEFAULT_ROOT
    inventory = user_inventory() if root == DEFAULT_ROOT else None
    return Lab(LabSpec(root=root, inventory=inventory, **options))


def say(line: str) -> None:
    typer.echo(line, err=True)


@app.command(cls=VerbCommand)
def up(
    root: Root = None,
    port: Annotated[int, typer.Option(help="Loopback port of its sshd.")] = DEFAULT_PORT,
    containers: Annotated[
        str, typer.Option(help="Numbers; :stopped leaves one off.", metavar="N,N:stopped,…")
    ] = "200,201,202:stopped",
    backend: Annotated[
        str | None, typer.Option(envvar="DFLASHCTL_LAB_BACKEND", help="lxc or unshare.")
    ] = None,
    pct_delay: Annotated[
        float,
        typer.Option(
            envvar="DFLASHCTL_LAB_PCT_DELAY",
            min=0,
            help="Seconds of computing per pct call; the real one takes 0.5 to 1.",
        ),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Start the lab; one that is up already stays as it is."""
    lab = make_lab(
        root,
        port=port,
        containers=parse_containers(containers),
        backend=choose_backend(backend) if backend else None,
        pct_delay=pct_delay,
    )
    show(lab.up(say), as_json)


@app.command(cls=VerbCommand)
def down(root: Root = None, as_json: Json = False) -> None:
    """End the lab and remove all of it; also what a crash has left."""
    found = make_lab(root).down(say)
    if as_json:
        typer.echo(json.dumps({"up": False, "found": found}))


@app.command(cls=VerbCommand)
def status(root: Root = None, as_json: Json = False) -> None:
    """Say whether the lab is up and what its containers do."""
    show(make_lab(root).status(), as_json)


def show(state: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(state))
        return
    if not state["up"]:
        typer.echo("the lab is down; start it with: dflashctl lab up")
        return
    typer.echo(f"lab host: root@127.0.0.1 port {state['port']} ({state['backend']} containers)")
    for ct in state["containers"]:
        typer.echo(f"  {ct['ct']}  {ct['state']:8} {ct['name']:12} {ct['address'] or ''}".rstrip())
    typer.echo(f"inventory: {state['inventory']}")
    if state["inventory"] not in (str(user_inventory()), os.environ.get("DFLASHCTL_INVENTORY")):
        typer.echo(f"not among your own, so first: export DFLASHCTL_INVENTORY={state['inventory']}")
    typer.echo("try: dflashctl launch --host lab --ct 200 --no-push --follow -- uname -a")
