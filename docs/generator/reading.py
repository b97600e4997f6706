"""The code as syntax trees, and Markdown of what they say.

Models and rules are read so, because importing the models takes torch and a rule's words lie
inside its function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = "<!-- Written by docs/generate.py from {sources}. Do not edit. -->\n\n"


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
