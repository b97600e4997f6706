"""The table of verbs, and a group that imports a verb's module only when it is called.

Importing every verb costs 0.5 s (fabric, pydantic, yaml); ``--help`` needs none of it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from orchestrator.cli import interrupt
from orchestrator.errors import UsageError

COMMAND_KEY = "dflashctl.command"
"""In ``ctx.meta``: the words after ``--``, or absent."""

JSON_KEY = "dflashctl.json"
"""In ``ctx.meta``: whether ``--json`` was given."""
WRONG_USAGE: Any = typer.BadParameter.__base__
"""What the parser raises: it has no public name of its own."""


@dataclass(frozen=True)
class Verb:
    """Where a verb lives; ``attribute`` is its function, or a Typer app of verbs of its own."""

    module: str
    attribute: str
    summary: str
    takes_command: bool = False


VERBS = {
    "launch": Verb("launch", "launch", "Preflight, push the code, start the run under tmux.", True),
    "ps": Verb("runs", "ps", "List the runs of every container."),
    "status": Verb("runs", "status", "Show one run in full."),
    "tail": Verb("logs", "tail", "Follow a run's log across dropped links."),
    "diag": Verb("diag", "diag", "Name what is wrong, the evidence, and what to do."),
    "watch": Verb("watch", "watch", "Watch runs to their end; tell changes and alarms."),
    "top": Verb("top", "top", "Show every run live."),
    "report": Verb("report", "report", "Write a run as one HTML page with plots."),
    "stop": Verb("runs", "stop", "Stop a run after a checkpoint."),
    "attach": Verb("attach", "attach", "Attach the terminal to a run's tmux session."),
    "exec": Verb("execute", "execute", "Run one command in a container.", True),
    "push": Verb("transfer", "push", "Push the code, start nothing."),
    "pull": Verb("transfer", "pull", "Fetch checkpoints and logs, verified."),
    "doctor": Verb("doctor", "doctor", "Check everything a launch needs; start nothing."),
    "play": Verb("play", "play", "Run a playbook: named steps, one status line each."),
    "env": Verb("env", "app", "The container's environment: freeze, diff, sync."),
    "init": Verb("init", "init", "Write a first inventory, start script and trainer config."),
    "inventory": Verb("inventory", "app", "List, find and check hosts and containers."),
    "completion": Verb("completion", "completion", "Print the completion script of a shell."),
    "lab": Verb("orchestrator.lab.cli", "app", "A loopback Proxmox host on this machine."),
}


HABITS = {
    **dict.fromkeys(("log", "logs", "follow"), "tail"),
    **dict.fromkeys(("run", "start", "submit"), "launch"),
    **dict.fromkeys(("kill", "cancel", "rm"), "stop"),
    **dict.fromkeys(("list", "ls", "runs"), "ps"),
    **dict.fromkeys(("diagnose", "why", "debug"), "diag"),
    **dict.fromkeys(("ssh", "shell", "enter"), "exec"),
    **dict.fromkeys(("check", "preflight"), "doctor"),
}
"""What fingers type from other tools. Letters alone took `list` for `stop`."""


class VerbCommand(TyperCommand):
    """Keeps the words after ``--`` apart from targets, and ends on Ctrl-C with 130."""

    takes_command = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND_KEY] = tuple(args[at + 1 :])
            args = args[:at]
            if not self.takes_command:
                ctx.fail("This verb takes no -- COMMAND.")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with interrupt.raised():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


class CommandVerb(VerbCommand):
    """A verb with ``-- COMMAND…``."""

    takes_command = True

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


class VerbGroup(TyperGroup):
    """Verbs by name; the summaries of the table stand in for modules that nobody called."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = args[: args.index("--")] if "--" in args else args
        ctx.meta[JSON_KEY] = "--json" in words
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except WRONG_USAGE as error:
            if not ctx.meta[JSON_KEY]:
                raise
            # Whoever asked for JSON parses what comes.
            verb = getattr(getattr(error, "ctx", None), "command_path", "dflashctl")
            raise UsageError(error.format_message(), next_step=f"{verb} --help") from None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        verb = VERBS.get(cmd_name)
        return load(cmd_name, verb) if verb else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from orchestrator.inventory import nearest

            meant = HABITS.get(args[0])
            near = f"; here it is {meant!r}" if meant else nearest(args[0], VERBS, cutoff=0.6)
            ctx.fail(f"No such verb {args[0]!r}{near}")
        return super().resolve_command(ctx, args)


def load(name: str, verb: Verb) -> Any:
    """Import a verb and make its command."""
    where = verb.module if "." in verb.module else f"orchestrator.cli.{verb.module}"
    found = getattr(importlib.import_module(where), verb.attribute)
    if isinstance(found, typer.Typer):
        found.rich_markup_mode = None
        found._add_completion = False
        command = typer.main.get_command(found)
        command.name = name
        return command
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(name, cls=CommandVerb if verb.takes_command else VerbCommand)(found)
    return typer.main.get_command(app)


def show_version(wanted: bool) -> None:
    if wanted:
        from orchestrator import version

        typer.echo(f"dflashctl {version.text()}")
        raise typer.Exit


def build() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        cls=VerbGroup,
        rich_markup_mode=None,
        # Typer's own would complete no target and no run: `dflashctl completion` does.
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        help="Launch, watch and diagnose DFlash drafter training in Proxmox containers.",
        epilog="A target is an inventory name, a group, or --host H --ct N. "
        "`dflashctl VERB --help` tells more.",
    )

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option(
                "--version", help="Show version and commit.", is_eager=True, callback=show_version
            ),
        ] = False,
    ) -> None:
        pass

    return app
