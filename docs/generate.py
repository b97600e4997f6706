"""Write docs/reference/*.md from the code: ``python docs/generate.py``; ``--check``: fail if stale.

Models and rules are read as syntax trees, because importing the models takes torch and a rule's
words lie inside its function; the verbs come from the command line's own tree.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from orchestrator.paths import (  # noqa: E402
    DEFAULT_WORKDIR,
    ContainerPaths,
    HostPaths,
    LaptopPaths,
    RunPaths,
)

OUT = ROOT / "docs" / "reference"
HEADER = "<!-- Written by docs/generate.py from {sources}. Do not edit. -->\n\n"


# -- reading the code -----------------------------------------------------------------------------


def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def classes_of(path: str) -> dict[str, ast.ClassDef]:
    return {n.name: n for n in tree_of(path).body if isinstance(n, ast.ClassDef)}


def docstring_after(body: list[ast.stmt], at: int) -> str:
    """The text that stands below statement ``at``, as one line."""
    follower = body[at + 1] if at + 1 < len(body) else None
    if isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant):
        return one_line(str(follower.value.value))
    return ""


def one_line(text: str) -> str:
    """Markdown of a docstring: single spaces, ``code`` as Markdown spells it."""
    return " ".join(text.split()).replace("``", "`")


def first_paragraph(node: ast.ClassDef | ast.FunctionDef) -> str:
    return one_line((ast.get_docstring(node) or "").split("\n\n")[0])


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


# -- verbs ----------------------------------------------------------------------------------------


def verbs() -> str:
    from orchestrator.cli.app import VERBS, load

    parts = [
        HEADER.format(sources="the command line's own tree"),
        "# Every verb\n\n",
        "A target is an inventory name, a group, or `--host H --ct N`. Without one, verbs that "
        "take a run mean\nthe newest. Words after `--` are a command for the container. "
        "`dflashctl VERB --help` says the same.\n\n",
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


# -- config ---------------------------------------------------------------------------------------


def config() -> str:
    sources = (
        "trainer/config.py",
        "trainer/data/settings.py",
        "trainer/drafter/config.py",
        "trainer/objective.py",
    )
    models = {name: node for path in sources for name, node in classes_of(path).items()}
    parts = [
        HEADER.format(sources=", ".join(sources)),
        "# Every field of a config\n\n",
        "The file is YAML; `python -m trainer check CONFIG` explains it. Unknown keys are refused "
        "with the nearest\nright one. [The trainer](../trainer.md) tells how they are used.\n",
    ]
    sections("", "TrainConfig", models, parts)
    parts.append("\n## The drafter as it is saved\n\n")
    parts.append(
        "What the `drafter` section and the target resolve to: the event `started` has it, and "
        "every checkpoint.\n\n"
    )
    parts.append(fields_table(models["DrafterConfig"], models))
    return "".join(parts)


def sections(path: str, name: str, models: dict[str, ast.ClassDef], parts: list[str]) -> None:
    """A section's table, then those below it."""
    node = models[name]
    title = f"`{path}`" if path else "The top"
    kinds = [annotation for field, annotation, *_ in fields(node) if field == "kind"]
    for kind in re.findall(r"^Literal\['(\w+)'\]$", "".join(kinds)):
        title += f", kind `{kind}`"
    parts.append(f"\n## {title}\n\n{first_paragraph(node)}\n\n")
    parts.append(fields_table(node, models))
    for field, annotation, _, _, _ in fields(node):
        inner = annotation.replace("PromptSource", "FilePrompts | SelfPrompts")
        for part in re.findall(r"\w+", inner):
            if part in models:
                sections(f"{path}.{field}".lstrip("."), part, models, parts)


def meaning(annotation: str, text: str, models: dict[str, ast.ClassDef]) -> str:
    """A field's docstring; of a section the docstring of its model will do."""
    of_its_own = models.get(annotation.removesuffix(" | None"))
    return text or (first_paragraph(of_its_own) if of_its_own is not None else "")


def fields_table(node: ast.ClassDef, models: dict[str, ast.ClassDef]) -> str:
    rows = []
    for field, annotation, limits, default, text in fields(node):
        text = meaning(annotation, text, models)
        given = f"`{default}`" if default else "required"
        rows.append((f"`{field}`", f"`{as_type(annotation)}`", limits, given, text))
    return table(("field", "type", "limits", "default", "meaning"), rows)


def fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str, str, str]]:
    """(name, type, limits, default, meaning) of each field of a pydantic model."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "at least"}
    for at, statement in enumerate(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        value, limits, default = statement.value, [], ""
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
            limits = [
                f"{signs[k.arg]} {ast.unparse(k.value)}" for k in value.keywords if k.arg in signs
            ]
            default = as_yaml(value.args[0]) if value.args else ""
            if any(k.arg == "default_factory" for k in value.keywords):
                default = "now"
        elif value is not None:
            default = as_yaml(value)
        annotation = ast.unparse(statement.annotation)
        meaning = docstring_after(node.body, at)
        yield statement.target.id, annotation, ", ".join(limits), default, meaning


ALIASES = {"Text": "str | None", "Argv": "list[str]", "Program": "str", "AbsolutePath": "str"}


def as_type(annotation: str) -> str:
    """Without validators and names that only the code knows."""
    shown = re.sub(r"^Annotated\[(.+?), (?:After|Before)Validator\(.+?\)\]", r"\1", annotation)
    shown = re.sub(r"\bNumber\b", "int", ALIASES.get(shown, shown))
    return re.sub(r"tuple\[(.+), \.\.\.\]", r"list[\1]", shown)


def as_yaml(value: ast.expr) -> str:
    """A default as one would write it in the file."""
    if isinstance(value, ast.Call):
        inside = ", ".join(ast.unparse(argument) for argument in value.args)
        return inside.strip("'") if inside else "its own defaults"
    text = ast.unparse(value)
    words = {"None": "null", "True": "true", "False": "false", "''": '""', "()": "[]"}
    words["DEFAULT_WORKDIR"] = DEFAULT_WORKDIR
    return words.get(text, text.strip("'"))


# -- inventory and playbooks ----------------------------------------------------------------------


def inventory() -> str:
    models = classes_of("orchestrator/inventory.py")
    parts = [
        HEADER.format(sources="orchestrator/inventory.py"),
        "# Every key of an inventory\n\nA YAML file, or a folder of them: "
        "[your own host](../howto/own-host.md) shows one. Unknown keys are refused with the\n"
        "nearest right one.\n",
    ]
    for title, names in (
        ("The top", ["Inventory"]),
        ("A host", ["Host"]),
        ("A container, and `defaults`", ["Container", "ContainerSettings"]),
    ):
        parts.append(f"\n## {title}\n\n")
        parts += [fields_table(models[name], models) + "\n" for name in names]
    return "".join(parts).rstrip() + "\n"


def playbooks() -> str:
    models = classes_of("orchestrator/playbook/actions.py")
    parts = [
        HEADER.format(sources="orchestrator/playbook/actions.py"),
        "# Every action of a playbook\n\nHow they are put together: "
        "[playbooks](../howto/playbooks.md).\n",
    ]
    for name, node in models.items():
        if name != "Action":
            parts.append(f"\n## {name.lower()}\n\n{first_paragraph(node)}\n\n")
            parts.append(fields_table(node, models))
    return "".join(parts)


# -- the run's folder -----------------------------------------------------------------------------


def run_folder() -> str:
    nodes = classes_of("orchestrator/paths.py")
    places: list[tuple[str, str, Any]] = [
        ("A run", "RunPaths", RunPaths("RUN")),
        ("A container", "ContainerPaths", ContainerPaths()),
        ("A Proxmox host", "HostPaths", HostPaths()),
        ("The laptop", "LaptopPaths", LaptopPaths({"HOME": "/home/you"})),
    ]
    parts = [
        HEADER.format(sources="orchestrator/paths.py"),
        "# Where everything lies\n\n",
        "A run's folder is `<workdir>/dflashctl/runs/<run id>/` in its container, `RUN` below. The "
        "container holds\nthe truth; `dflashctl pull` copies it. The trainer adds `data/`, "
        "`evaluation.json`, `nonfinite/` and, under\ntorchrun, `ranks/`.\n",
    ]
    for title, name, instance in places:
        parts.append(f"\n## {title}\n\n{first_paragraph(nodes[name])}\n\n")
        parts.append(table(("path", "what it is"), list(path_rows(nodes[name], instance))))
    return "".join(parts)


def path_rows(node: ast.ClassDef, instance: Any) -> Iterator[tuple[str, str]]:
    for function in (n for n in node.body if isinstance(n, ast.FunctionDef)):
        if function.name != "__init__":
            names = [argument.arg for argument in function.args.args[1:]]
            values = ["ab12…" if name == "digest" else f"<{name}>" for name in names]
            shown = getattr(instance, function.name)(*values)
            shown = shown.root if isinstance(shown, RunPaths) else shown
            yield f"`{home(shown)}`", first_paragraph(function)
            continue
        for at, statement in enumerate(function.body):
            if not isinstance(statement, ast.Assign):
                continue
            name = ast.unparse(statement.targets[0]).removeprefix("self.")
            if name.isidentifier() and name not in ("workdir", "root", "run_id"):
                if not isinstance(shown := getattr(instance, name, None), (str, Path)):
                    continue
                yield f"`{home(shown)}`", docstring_after(function.body, at)


def home(path: object) -> str:
    return str(path).replace("/home/you", "~")


# -- diagnosis ------------------------------------------------------------------------------------


def diagnosis() -> str:
    from orchestrator.diag.codes import CODES

    found: dict[str, list[Cause]] = {code: [] for code in CODES}
    for path in sorted((ROOT / "orchestrator" / "diag").rglob("*.py")):
        for cause in causes_in(path):
            found[cause.code].append(cause)
    silent = [code for code, causes in found.items() if not causes]
    if silent:
        raise SystemExit(f"no rule yields {', '.join(silent)}; remove the code or write its rule")
    parts = [
        HEADER.format(sources="orchestrator/diag/codes.py and orchestrator/diag/rules"),
        "# Every diagnosis\n\n",
        f"`dflashctl diag` names {len(CODES)} causes, each with its evidence. The remedies below "
        "are the general\nones; `diag` fills in the names of your run (`CT`, `HOST`, `PATH`) and "
        "may add a line that your evidence\ncalls for. What the run survived is shown as `info`. "
        "Exit code 1: something fatal.\n",
    ]
    family = ""
    for code, causes in found.items():
        if code.partition(".")[0] != family:
            family = code.partition(".")[0]
            parts.append(f"\n## {family}\n")
        severities = dict.fromkeys(s for cause in causes for s in cause.severities)
        parts.append(f"\n### {code}\n\n**{' or '.join(severities)}** · {CODES[code]}\n")
        told: set[str] = set()
        for cause in causes:
            if cause.recognized:
                parts.append(f"\nSeen as: {cause.recognized}\n")
            if cause.remedy not in told:
                told.add(cause.remedy)
                parts.append("\n" + "".join(f"    {line}\n" for line in cause.remedy.split("\n")))
    return "".join(parts)


class Cause:
    """One place in a rule that yields a code."""

    def __init__(self, code: str, severities: list[str], recognized: str, remedy: str) -> None:
        self.code = code
        self.severities = severities
        self.recognized = recognized
        self.remedy = remedy


def causes_in(path: Path) -> Iterator[Cause]:
    """Every ``e.found("code", title, at, remedy, severity=…)`` of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    outside = assignments(tree.body)
    for function in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
        inside = {**outside, **assignments(list(ast.walk(function)))}
        text = one_line(ast.get_docstring(function) or "")
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(".found"):
                continue
            code, _, _, remedy = call.args[:4]
            if isinstance(code, ast.Constant):
                yield Cause(str(code.value), severities(call), text, plain(remedy, inside))
                text = ""  # Told once, with the first of several findings.


def assignments(body: list[Any]) -> dict[str, ast.expr]:
    """The first value of each name: the general one, before evidence changes it."""
    found: dict[str, ast.expr] = {}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, node.value)
    return found


def severities(call: ast.Call) -> list[str]:
    for keyword in call.keywords:
        if keyword.arg == "severity":
            value = keyword.value
            ends = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            return [str(end.value) for end in ends if isinstance(end, ast.Constant)]
    return ["fatal"]


PLACEHOLDERS = (
    ("CT", r"number|container_of|own_number|ct\b"),
    ("PORT", r"\bport\b"),
    ("HOST", r"\bhost"),
    ("PATH", r"path|folder|mount|where|cache"),
    ("PYTHON", r"python"),
    ("PACKAGE", r"package|module|missing"),
    ("FILE", r"file"),
    ("LINE", r"line"),
)


def plain(value: ast.expr, names: dict[str, ast.expr]) -> str:
    """A remedy as text: the general branch where evidence decides, a placeholder where it names."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.BinOp):
        parts = (value.left, value.right) if isinstance(value.op, ast.Add) else ()
        known = [p for p in parts if not isinstance(p, ast.Name) or is_text(names.get(p.id))]
        return "".join(plain(part, names) for part in known) if parts else "…"
    if isinstance(value, ast.JoinedStr):
        return "".join(plain(part, names) for part in value.values)
    if isinstance(value, ast.FormattedValue):
        return plain(value.value, names)
    if isinstance(value, ast.IfExp):
        other = plain(value.orelse, names)
        return (
            other if other or isinstance(value.orelse, ast.Constant) else plain(value.body, names)
        )
    if isinstance(value, ast.Name) and is_text(names.get(value.id)):
        return plain(names[value.id], {**names, value.id: ast.Constant("")})
    if isinstance(value, ast.BoolOp):
        return plain(value.values[-1], names)
    source = ast.unparse(value).lower()
    return next((word for word, hint in PLACEHOLDERS if re.search(hint, source)), "…")


def is_text(value: ast.expr | None) -> bool:
    if isinstance(value, ast.IfExp):
        return is_text(value.body) and is_text(value.orelse)
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value != ""
    )


# -- events ---------------------------------------------------------------------------------------


def events() -> str:
    source = "trainer/telemetry.py"
    text = (ROOT / source).read_text(encoding="utf-8")
    kinds = re.search(r"EventKind = Literal\[\n(.*?)\n\]", text, re.DOTALL)
    if kinds is None:
        raise SystemExit(f"{source} has no EventKind = Literal[...]")
    rows = []
    for line in kinds[1].splitlines():
        name, comment = re.fullmatch(r'\s*"(\w+)",\s*#\s*(.*)', line).groups()  # type: ignore[union-attr]
        meaning, _, detail = comment.partition("detail: ")
        rows.append((f"`{name}`", meaning.rstrip("; "), detail))
    models = classes_of(source)
    line_fields = [*fields(models["_Line"]), *fields(models["StepLine"])]
    steps = [(f"`{n}`", f"`{kind}`", meaning) for n, kind, _, _, meaning in line_fields]
    return "".join(
        [
            HEADER.format(sources=source),
            "# Events and metrics\n\nThe trainer appends JSON lines to two files of the run's "
            "folder. A newer trainer may write keys\nthat are not here; readers pass them over.\n\n"
            '## events.jsonl\n\n`{"time": …, "event": …, "detail": {…}}`\n\n',
            table(("event", "when", "detail"), rows),
            "\n## metrics.jsonl\n\nOne record for each logged step.\n\n",
            table(("field", "type", "meaning"), steps),
        ]
    )


PAGES: dict[str, Callable[[], str]] = {
    "verbs.md": verbs,
    "config.md": config,
    "inventory.md": inventory,
    "playbooks.md": playbooks,
    "run-folder.md": run_folder,
    "diagnosis.md": diagnosis,
    "events.md": events,
}


def stale() -> list[str]:
    """The pages that differ from the code."""
    return [
        name
        for name, page in PAGES.items()
        if not (OUT / name).is_file() or (OUT / name).read_text(encoding="utf-8") != page()
    ]


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    arguments.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    if arguments.parse_args().check:
        for name in (old := stale()):
            print(f"docs/reference/{name} is stale; run python docs/generate.py", file=sys.stderr)
        return int(bool(old))
    OUT.mkdir(exist_ok=True)
    for name in stale():
        (OUT / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
