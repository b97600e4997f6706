"""Every error that a person sees ends in what to do next."""

from __future__ import annotations

import ast
from pathlib import Path

from orchestrator import errors

ROOT = Path(__file__).parents[2] / "orchestrator"
KINDS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.DflashctlError)
}
# The agent's own errors get theirs by their kind (`agent_failure.py`); the lab's are its own.
MODULES = sorted(
    path
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0] not in {"agent", "lab", "errors.py"}
)


def without_next_step(path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)[:100]}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in KINDS
        and "next_step" not in {keyword.arg for keyword in node.keywords}
    ]


def test_every_error_says_what_to_do() -> None:
    assert [line for path in MODULES for line in without_next_step(path)] == []
