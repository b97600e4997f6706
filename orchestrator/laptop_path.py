"""Paths on the laptop as people type them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.errors import DflashctlError, UsageError


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


def did_you_mean(path: Path, *, folder: bool = False) -> str:
    """``; did you mean configs/train.yaml?``: of what is there, the nearest to a path that is not.

    :param folder: a folder is wanted, not a file.
    """
    import difflib

    here = Path(path.anchor)
    for number, part in enumerate(path.parts[1:] if path.anchor else path.parts, 1):
        if part == ".." or (here / part).exists():
            here = here / part
            continue
        is_last = number == len(path.parts) - bool(path.anchor)
        try:
            names = [one.name for one in here.iterdir() if one.is_dir() == (folder or not is_last)]
        except OSError:
            return ""
        close = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
        if not close:
            return ""
        here = here / close[0]
    found = here.is_dir() if folder else here.is_file()
    return f"; did you mean {here}?" if found and here != path else ""


def read_text(
    path: Path,
    what: str,
    instead: str,
    *,
    wrong: type[DflashctlError] = UsageError,
    absent: type[DflashctlError] = UsageError,
) -> str:
    """A file of text that a person named.

    :param what: it is, such as ``inventory``.
    :param instead: what to do where there is none.
    :raises DflashctlError: ``absent``, or ``wrong`` where it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        error = absent(f"{what} {path} does not exist{did_you_mean(path)}", next_step=instead)
    except OSError as refused:
        error = wrong(
            f"{what} {path} cannot be read: {refused.strerror}",
            next_step=f"make it readable: ls -l {path}",
        )
    except UnicodeDecodeError as broken:
        error = wrong(
            f"{what} {path} is not UTF-8 text (byte {broken.start})", next_step="save it as UTF-8"
        )
    raise error


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
