"""The two halves meet at one door: ``trainer/telemetry.py``, which imports no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from orchestrator.agent.__main__ import OPERATIONS
from orchestrator.paths import RunPaths
from trainer.telemetry import EVENTS_FILE, METRICS_FILE

ROOT = Path(__file__).parents[1]


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def modules(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, package
    return found


def imports(package: str) -> Iterator[tuple[str, str]]:
    """Path and module of every import statement, at any depth of a file."""
    for path in modules(package):
        for node in nodes(path):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                yield str(path.relative_to(ROOT)), name


def top(name: str) -> str:
    return name.partition(".")[0]


def test_the_controller_imports_no_torch_and_only_the_door_of_the_trainer() -> None:
    heavy = {"torch", "transformers", "safetensors", "numpy"}
    assert [
        (path, name)
        for path, name in imports("orchestrator")
        if top(name) in heavy or (top(name) == "trainer" and name != "trainer.telemetry")
    ] == []


def test_the_trainer_never_imports_the_controller() -> None:
    assert [found for found in imports("trainer") if top(found[1]) == "orchestrator"] == []


def test_the_agent_needs_only_the_standard_library_and_its_vendored_libtmux() -> None:
    allowed = sys.stdlib_module_names | {"libtmux", "orchestrator", "agent", "__future__"}
    assert [found for found in imports("orchestrator/agent") if top(found[1]) not in allowed] == []


def test_both_halves_call_a_runs_files_by_the_same_names() -> None:
    written = RunPaths("")
    assert (written.metrics, written.events) == (METRICS_FILE, EVENTS_FILE)


@pytest.mark.parametrize("module", ["orchestrator.cli", "trainer.telemetry"])
def test_importing_it_loads_neither_torch_nor_the_network_stack(module: str) -> None:
    found = "sorted({'torch', 'fabric', 'paramiko'} & sys.modules.keys())"
    script = f"import sys, {module}; sys.exit(str({found}) if {found} else 0)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.torch
@pytest.mark.slow
def test_what_checks_a_config_or_becomes_torchrun_loads_nothing_that_only_training_needs() -> None:
    pytest.importorskip("torch")
    modules = "trainer.commands.check, trainer.commands.train, trainer.commands.export"
    found = "sorted({'torch._dynamo', 'transformers.modeling_utils'} & sys.modules.keys())"
    script = f"import sys, {modules}; sys.exit(str({found}) if {found} else 0)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_controller_asks_for_everything_that_the_agent_can_do() -> None:
    outside = [path for path in modules("orchestrator") if "agent" not in path.parts]
    # Of calls alone: errors of the agent have names of the same form.
    asked = {
        node.args[0].value
        for path in outside
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in {"request", "call"} and node.args
        if isinstance(node.args[0], ast.Constant)
    }
    assert set(OPERATIONS) <= asked


def test_the_trainer_says_what_it_lacks_where_nothing_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "trainer", "check", "train.yaml"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert " has no " in done.stderr and "dflashctl launch --config" in done.stderr
    assert "Traceback" not in done.stderr
