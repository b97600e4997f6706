"""The two halves meet at one door: ``trainer/telemetry.py``, which imports no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.agent.__main__ import OPERATIONS
from orchestrator.paths import RunPaths
from trainer.telemetry import EVENTS_FILE, METRICS_FILE

ROOT = Path(__file__).parents[1]


def imports_of(path: Path) -> set[str]:
    """Every module named by an import statement, at any depth of the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def modules(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, package
    return found


@pytest.mark.parametrize("path", modules("orchestrator"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_controller_imports_no_torch_and_only_the_door_of_the_trainer(path: Path) -> None:
    for name in imports_of(path):
        top = name.partition(".")[0]
        assert top not in {"torch", "transformers", "safetensors", "numpy"}, name
        assert top != "trainer" or name == "trainer.telemetry", name


@pytest.mark.parametrize("path", modules("trainer"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_trainer_never_imports_the_controller(path: Path) -> None:
    assert not {n for n in imports_of(path) if n.partition(".")[0] == "orchestrator"}


@pytest.mark.parametrize(
    "path", modules("orchestrator/agent"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_agent_needs_only_the_standard_library_and_its_vendored_libtmux(path: Path) -> None:
    allowed = sys.stdlib_module_names | {"libtmux", "orchestrator", "agent", "__future__"}
    for name in imports_of(path):
        assert name.partition(".")[0] in allowed, name


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
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
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
