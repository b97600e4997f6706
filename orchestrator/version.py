"""Which dflashctl this is: its version, and the commit it was built from or stands at."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

VERSION = "0.1.0"
"""The only place: pyproject.toml reads it from here, so that an uninstalled checkout knows it."""

COMMIT_FILE = "_commit.txt"
"""Beside this module in a wheel and an sdist (`hatch_build.py`), never in a checkout."""

_HERE = Path(__file__).parent
# A checkout on a dead network mount must not hold up `--version`.
_GIT_S = 3.0


def commit() -> str | None:
    """Twelve digits, with ``-dirty`` where tracked files differ; None where nobody knows."""
    try:
        return (_HERE / COMMIT_FILE).read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return commit_of(_HERE.parent)


def commit_of(folder: Path) -> str | None:
    """Git's answer for a checkout; None for a folder that merely lies inside somebody's."""
    if not (folder / ".git").exists():
        return None
    words = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def text() -> str:
    """``0.1.0 (98c408d1a2b3)``."""
    known = commit()
    return f"{VERSION} ({known})" if known else VERSION
