"""Every diagnosis with its remedy, from the code table and the rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generator.reading import HEADER, ROOT, one_line
from orchestrator.diag.evidence import GO_ON


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
                yield Cause(
                    str(code.value), severities(call, function), text, plain(remedy, inside)
                )
                text = ""  # Told once, with the first of several findings.


def assignments(body: list[Any]) -> dict[str, ast.expr]:
    """The first value of each name: the general one, before evidence changes it."""
    found: dict[str, ast.expr] = {}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, node.value)
    return found


def severities(call: ast.Call, function: ast.FunctionDef) -> list[str]:
    for keyword in call.keywords:
        if keyword.arg == "wanted":
            return ["info"]
        if keyword.arg == "severity":
            return ends(keyword.value, function)
    return ["fatal"]


def ends(value: ast.expr | None, function: ast.FunctionDef) -> list[str]:
    """What a conditional expression, or a name of the function, may come to."""
    if isinstance(value, ast.IfExp):
        return [*ends(value.body, function), *ends(value.orelse, function)]
    if isinstance(value, ast.Name):
        given = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            and ast.unparse(node).partition("=")[0].partition(":")[0].strip() == value.id
        ]
        return [end for one in given for end in ends(one, function)]
    return [str(value.value)] if isinstance(value, ast.Constant) else []


PLACEHOLDERS = (
    ("", r"ssh_options|_of_a_shell"),
    ("root@HOST", r"ssh_host"),
    ("NAME", r"target_of"),
    ("RUN", r"run_of"),
    ("SCRIPT", r"^script$"),
    (GO_ON, r"\be\.go_on\b"),
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
