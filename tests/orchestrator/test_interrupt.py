"""Ctrl-C at any moment: exit code 130 and no traceback, in both programs.

The signal comes at an exact place: when a named module is imported, by a finder that sends it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEND = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"] and sys.meta_path[0] is self:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


def interrupted(
    tmp_path: Path, at: str, *words: str, ignore: bool = False
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(SEND)

    def before() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignore else signal.SIG_DFL)

    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "HOME": str(tmp_path), "INTERRUPT_AT": at}
    return subprocess.run(
        [sys.executable, *words],
        env={"PATH": "/usr/bin:/bin", **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=before,
    )


@pytest.mark.parametrize(
    "at",
    [
        "orchestrator.errors",
        "orchestrator.cli.app",
        "typer",
        "orchestrator.cli.runs",
        "pydantic",
        "yaml",
    ],
)
def test_no_import_of_the_controller_shows_a_traceback(tmp_path: Path, at: str) -> None:
    done = interrupted(tmp_path, at, "-m", "orchestrator.cli", "ps")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("at", "start"),
    [
        ("pathlib", ("-m", "orchestrator.cli")),
        ("orchestrator.cli.interrupt", ("-m", "orchestrator.cli")),
        ("orchestrator.cli.interrupt", ("-c", "from orchestrator.cli import main; main()")),
    ],
)
def test_nor_does_what_comes_before_the_first_verb(
    tmp_path: Path, at: str, start: tuple[str, ...]
) -> None:
    done = interrupted(tmp_path, at, *start, "ps")
    assert (done.returncode, done.stderr) == (130, "")


def test_completion_ends_as_quietly(tmp_path: Path) -> None:
    words = ("-m", "orchestrator.cli", "__complete", "p")
    done = interrupted(tmp_path, "orchestrator.cli.complete", *words)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.torch
@pytest.mark.parametrize(
    "at", ["trainer.commands", "torch", pytest.param("transformers", marks=pytest.mark.slow)]
)
def test_no_import_of_the_trainer_does(tmp_path: Path, at: str) -> None:
    pytest.importorskip("torch")
    done = interrupted(tmp_path, at, "-m", "trainer", "check", "none.yaml")
    assert (done.returncode, done.stderr) == (130, "")


def test_where_the_signal_is_ignored_it_stays_ignored(tmp_path: Path) -> None:
    done = interrupted(
        tmp_path, "orchestrator.errors", "-m", "orchestrator.cli", "--version", ignore=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("dflashctl ")
