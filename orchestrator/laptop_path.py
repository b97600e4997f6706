"""Paths on the laptop as people type them."""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import UsageError


def laptop_path(text: str | Path) -> Path:
    """With ``~`` and ``~user`` filled in.

    :raises UsageError: no such user, or a user without a home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(
            f"{text}: there is no such user's home folder on this machine",
            next_step="give the whole path, from / on",
        ) from None


def working_folder() -> Path:
    """:raises UsageError: it was removed while the shell stood in it."""
    try:
        return Path.cwd()
    except OSError:
        raise UsageError(
            "the folder this shell stands in is gone",
            next_step="change to the project's folder (cd), or give --code DIR",
        ) from None
