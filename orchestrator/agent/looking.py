"""Looks at a machine that may be ill: each has its own time limit, none can fail another.

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

AT_ONCE = 8
TEXT_LIMIT = 256 << 10


class Failed(Exception):
    """A look found out why it cannot see; the words are the answer."""


class Look(NamedTuple):
    ok: bool
    value: Any
    """Text, or a small JSON value."""
    seconds: float
    error: str = ""


def command(argv: Sequence[str], limit_s: float, *, check: bool = False) -> str:
    """What it prints on both outputs, however it ends (its message is often the finding).

    ``Failed`` if it is not there, is too slow, or, with ``check``, ends with another code than 0.
    """
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
        output, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(child.pid, signal.SIGKILL)
        raise Failed(f"timed out after {limit_s:g} s") from error
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


def at_once(
    looks: Mapping[str, Callable[[], Any]],
    limit_s: float,
    tell: Callable[[str, Look], None],
) -> dict[str, Look]:
    """All of them, a few at a time; ``tell`` hears of each as it comes, from this thread."""
    answers: queue.SimpleQueue[tuple[str, Look]] = queue.SimpleQueue()
    waiting = list(looks.items())
    begun: dict[str, float] = {}
    found: dict[str, Look] = {}

    def work(name: str, look: Callable[[], Any]) -> None:
        start = time.monotonic()
        answers.put((name, _look(look, start)))

    while waiting or begun:
        while waiting and len(begun) < AT_ONCE:
            name, look = waiting.pop(0)
            begun[name] = time.monotonic()
            threading.Thread(target=work, args=(name, look), daemon=True).start()
        # A little longer than the commands' own limit: their words are better than ours.
        patience = min(begun.values()) + limit_s + 0.5 - time.monotonic()
        try:
            name, result = answers.get(timeout=max(0.0, patience))
        except queue.Empty:
            name = min(begun, key=lambda one: begun[one])
            result = Look(False, None, limit_s, f"timed out after {limit_s:g} s")
        if begun.pop(name, None) is None:
            # Answered after we had given it up.
            continue
        found[name] = result
        tell(name, result)
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
