"""Every field of a file: configs, inventories, playbooks, and the lines that a run writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from generator.reading import (
    HEADER,
    ROOT,
    classes_of,
    docstring_after,
    first_paragraph,
    table,
)
from orchestrator.paths import DEFAULT_WORKDIR


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
