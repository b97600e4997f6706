"""What runs in containers runs on Python 3.10. `make lint` checks with mypy what it takes from the
library; where an interpreter of 3.10 is at hand, the agent's own tests run on it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IN_CONTAINERS = sorted(
    [
        *(ROOT / "orchestrator" / "agent").rglob("*.py"),
        *(ROOT / "trainer").rglob("*.py"),
        *(ROOT / "orchestrator" / name for name in ("paths.py", "meeting.py")),
        ROOT / "orchestrator" / "environment" / "collector.py",
    ]
)


def test_it_parses_as_python_3_10() -> None:
    for path in IN_CONTAINERS:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))


def test_newer_syntax_would_be_seen() -> None:
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    pass\nexcept* OSError:\n    pass\n", feature_version=(3, 10))


def test_lint_looks_at_the_same_code() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    named = re.search(r"^IN_CONTAINERS := (.*)$", makefile, re.MULTILINE)
    assert named is not None
    modules = re.findall(r"-[pm] ([\w.]+)", named[1])
    places = [ROOT / module.replace(".", "/") for module in modules]
    for path in IN_CONTAINERS:
        assert any(path.is_relative_to(p) or path == p.with_suffix(".py") for p in places), path
