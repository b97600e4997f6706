"""Every verb of the command line and of the trainer, from their own trees."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from generator.reading import HEADER, table


def verbs() -> str:
    from orchestrator.cli.app import VERBS, load

    parts = [
        HEADER.format(sources="the command line's own tree"),
        "# Every verb\n\n",
        "A target is an inventory name, a group, or `--host H --ct N`. Without one, verbs that "
        "take a run mean\nthe newest. Words after `--` are a command for the container. "
        "`dflashctl VERB --help` says the same.\n\n"
        "With `--json` each answer is one object. Of several runs or containers, and of what "
        "follows a log or a\nplaybook, each has a line of its own: `jq` reads them, "
        "`python -m json.tool` needs `--json-lines`.\n\n",
        "Exit codes: 0 good · 1 the run failed, or diag found something fatal · 2 wrong usage · "
        "3 unreachable, so\nthe state is unknown · 4 refused (preflight, lease, double launch) · "
        "5 no such thing · 130 interrupted.\n\n",
    ]
    for name, verb in VERBS.items():
        command = load(name, verb)
        parts.append(f"## {name}\n\n")
        own = getattr(command, "commands", {})
        if not own:
            parts.append(describe_verb(f"dflashctl {name}", command, verb.takes_command))
            continue
        parts.append(f"{paragraph(command.help)}\n\n")
        for part, sub in own.items():
            parts.append(f"### {name} {part}\n\n")
            parts.append(describe_verb(f"dflashctl {name} {part}", sub, False))
    parts.append(trainer_verbs())
    return "".join(parts).rstrip() + "\n"


def describe_verb(title: str, command: Any, takes_command: bool) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(
        [title, "[OPTIONS]", *map(argument_name, arguments)]
        + (["[-- COMMAND...]"] if takes_command else [])
    )
    rows = [(f"`{argument_name(p)}`", paragraph(p.help)) for p in arguments]
    rows += [(option_name(p), option_help(p)) for p in options]
    text = f"    {usage}\n\n{paragraph(command.help)}\n\n"
    return text + (table(("", ""), rows) + "\n" if rows else "")


def argument_name(param: Any) -> str:
    name = param.metavar or str(param.name).upper()
    name = name if param.required or name.startswith("[") else f"[{name}]"
    return name if param.nargs == 1 or name.endswith("...") else f"{name}..."


def option_name(param: Any) -> str:
    names = [f"`{name}`" for name in [*param.opts, *param.secondary_opts]]
    if not (param.is_flag or param.count):
        names[-1] = names[-1][:-1] + f" {param.metavar or str(param.name).upper()}`"
    return ", ".join(names)


def option_help(param: Any) -> str:
    said = paragraph(param.help)
    if param.envvar:
        said += f" Also `${param.envvar}`."
    default = param.default
    shown = not callable(default) and default not in (None, False, True, (), [])
    if shown and "efault" not in said:
        said += f" Default: `{default}`."
    return said


def paragraph(text: str | None) -> str:
    return " ".join((text or "").split()).replace("``", "`")


def trainer_parser() -> argparse.ArgumentParser:
    from trainer.__main__ import parser

    return parser()


def trainer_verbs() -> str:
    parts = ["## python -m trainer\n\nIn the container, or wherever torch is. See [the trainer]("
             "../trainer.md).\n\n"]  # fmt: skip
    for title, made in subparsers(trainer_parser(), "python -m trainer"):
        rows = []
        for action in made._actions:
            if action.dest == "help":
                continue
            name = ", ".join(action.option_strings) or str(action.dest).upper()
            if action.option_strings and action.nargs != 0:
                value = "|".join(action.choices) if action.choices else action.dest.upper()
                name += f" {value}"
            rows.append((f"`{name}`", paragraph(action.help)))
        parts.append(f"### {title.removeprefix('python -m ')}\n\n{made.description or ''}\n\n")
        parts.append(table(("", ""), rows) + "\n")
    return "".join(parts)


def subparsers(
    top: argparse.ArgumentParser, title: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    nested = [a for a in top._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield title, top
    for action in nested:
        said = {str(choice.dest): choice.help for choice in action._choices_actions}
        for name, made in action.choices.items():
            made.description = made.description or said.get(name)
            yield from subparsers(made, f"{title} {name}")
