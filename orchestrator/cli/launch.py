"""``dflashctl launch``: the options. What they lead to is in ``starting``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import interrupt
from orchestrator.cli.app import COMMAND_KEY
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Targets
from orchestrator.cli.session import open_session


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
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="NAME",
            help="Hand on this variable of your shell, as secretly as --env-file.",
        ),
    ] = None,
    log: Annotated[
        str | None,
        typer.Option("--log", metavar="PATH", help="Also link the log at this container path."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Start although another run lives in the container or a GPU is in use; passes "
            "over no other check.",
        ),
    ] = False,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts",
            min=0,
            help="Start again so often after a failure, from the newest checkpoint.",
        ),
    ] = 0,
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
    with open_session(inventory, as_json=as_json) as session:
        with interrupt.told("nothing was started"):
            found = session.some_targets(targets, host, ct)
            alone = len(found) == 1 and not dry_run
            opening = session.fleet.opening(found[0]) if alone else None
            # While pct starts, some 0.1 s of imports cost nothing; before, they would hold up the
            # thread that connects (one interpreter runs one of them at a time).
            if opening is not None:
                opening.wait()
            from orchestrator.cli.starting import Wishes, start

        wishes = Wishes(
            words=ctx.meta.get(COMMAND_KEY, ()),
            config=config,
            code=code,
            no_push=no_push,
            name=name,
            env=tuple(env or ()),
            env_file=env_file,
            secret=tuple(secret or ()),
            log=log,
            force=force,
            restarts=restarts,
            ranks=ranks,
            follow=follow,
            wait=wait,
            dry_run=dry_run,
            as_json=as_json,
        )
        exit_code = start(session, found, opening, wishes)
    raise typer.Exit(exit_code)
