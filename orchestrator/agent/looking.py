"""Looks at a machine that may be ill: side by side, with one end for all; none fails another.

A command that hangs in the kernel (``nvidia-smi`` on a lost GPU, ``df`` on a dead mount) cannot be
killed and so is never waited for; a function that hangs leaves a thread behind.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# `nvidia-smi topo -m` underlines its head even into a pipe.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

LATE_S = 0.25
"""Beyond the limit: a command's own words about it are better than ours."""
TEXT_LIMIT = 256 << 10


class Failed(Exception):
    """A look found out why it cannot see; the words are the answer."""


class Look(NamedTuple):
    ok: bool
    value: Any
    """Text, or a small JSON value."""
    seconds: float
    error: str = ""


class Limit:
    """Of all that one answer needs: a second command has what the first left of it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())


def command(argv: Sequence[str], limit: Limit | float, *, check: bool = False) -> str:
    """What it prints on both outputs, however it ends (its message is often the finding).

    ``Failed`` if it is not there, is too slow, or, with ``check``, ends with another code than 0.
    """
    limit = limit if isinstance(limit, Limit) else Limit(limit)
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise Failed(f"{argv[0]}: not found") from error
    except OSError as error:
        raise Failed(f"{argv[0]}: {error.strerror}") from error
    try:
        output, _ = child.communicate(timeout=limit.left_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(child.pid, signal.SIGKILL)
        raise Failed(_timed_out(limit.seconds)) from error
    text = _COLOURS.sub("", output[-TEXT_LIMIT:].decode("utf-8", "replace")).rstrip("\n")
    if check and child.returncode != 0:
        raise Failed(text or f"{argv[0]} ended with {child.returncode}")
    return text


def text_of(path: str, limit: int = TEXT_LIMIT) -> str:
    """A file's text; ``Failed`` in words if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(limit).rstrip("\n")
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from error


def _timed_out(seconds: float) -> str:
    return f"timed out after {seconds:g} s"


def at_once(
    looks: Mapping[str, Callable[[], Any]],
    limit_s: float,
    tell: Callable[[str, Look], None],
    *,
    width: int | None = None,
) -> dict[str, Look]:
    """All of them side by side, all within ``limit_s`` from now (and ``LATE_S``); ``tell`` hears of
    each as it comes, from this thread.

    :param width: no more than so many at a time, where each is costly; those that a hanging one
        leaves no place for are told as timed out, too.
    """
    answers: queue.SimpleQueue[tuple[str, Look]] = queue.SimpleQueue()
    until = time.monotonic() + limit_s + LATE_S
    waiting = list(looks.items())
    found: dict[str, Look] = {}

    def work(name: str, look: Callable[[], Any]) -> None:
        answers.put((name, _look(look, time.monotonic())))

    def begin(count: int) -> None:
        for name, look in waiting[:count]:
            threading.Thread(target=work, args=(name, look), daemon=True).start()
        del waiting[:count]

    begin(width or len(waiting))
    while len(found) < len(looks):
        try:
            name, result = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        found[name] = result
        tell(name, result)
        begin(1)
    for name in looks:
        if name not in found:
            found[name] = Look(False, None, limit_s, _timed_out(limit_s))
            tell(name, found[name])
    return found


def _look(look: Callable[[], Any], start: float) -> Look:
    try:
        value, error = look(), ""
    except Failed as failure:
        value, error = None, str(failure)
    except OSError as failure:
        value, error = None, f"{failure.filename or ''}: {failure.strerror}".lstrip(": ")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as failure:
        # Text of another form than any seen so far: one look is lost, not all of them.
        value, error = None, f"not understood: {failure!r}"
    return Look(not error, value, round(time.monotonic() - start, 3), error)
