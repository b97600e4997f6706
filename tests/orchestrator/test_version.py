"""`--version` names version and commit wherever the code lies, and never fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import version

ROOT = Path(__file__).parents[2]
VARIABLES = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def said(folder: Path, **variables: str) -> str:
    program = "from orchestrator import version; print(version.text())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**VARIABLES, **variables, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The module alone, in a repository of its own; nothing of it is installed."""
    package = tmp_path / "checkout" / "orchestrator"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(ROOT / "orchestrator" / "version.py", package)
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-qm", "one")
    return package.parent


def test_an_uninstalled_checkout_asks_git(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    assert said(checkout) == f"{version.VERSION} ({commit})"
    (checkout / "orchestrator" / "__init__.py").write_text("# changed\n")
    assert said(checkout) == f"{version.VERSION} ({commit}-dirty)"


def test_what_was_built_brings_its_commit(checkout: Path) -> None:
    (checkout / "orchestrator" / version.COMMIT_FILE).write_text("abcdef012345\n")
    assert said(checkout) == f"{version.VERSION} (abcdef012345)"


def test_a_copy_inside_somebody_elses_repository_does_not_take_that_ones_commit(
    checkout: Path,
) -> None:
    inside = checkout / "site-packages"
    shutil.copytree(checkout / "orchestrator", inside / "orchestrator")
    assert said(inside) == version.VERSION


def test_without_git_or_with_a_broken_repository_the_version_alone_is_told(checkout: Path) -> None:
    assert said(checkout, PATH="/nonexistent") == version.VERSION
    (checkout / ".git" / "HEAD").write_text("no ref\n")
    assert said(checkout) == version.VERSION


def test_the_command_line_prints_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "--version"],
        env={**VARIABLES, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"dflashctl {version.VERSION}")
