"""Paths on the laptop as people type them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What a person asked to be written at ``path``, or below it.

    :raises UsageError: it cannot be: no room, no permission, something else stands there.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{error.filename or path} cannot be written: {error.strerror or error}",
            next_step="make room there, or give another place",
        ) from None
