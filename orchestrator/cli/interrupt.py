"""Ctrl-C at whatever moment it comes: exit code 130, never a traceback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """End the process as it is. Importing and ending leave nothing half-done, and an exception
    there would be printed by whoever happens to run: an import, a destructor, a thread's end."""
    os._exit(130)


def leave_at_once() -> None:
    """Until a verb begins. Where the signal is ignored (``nohup``, ``&``), it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


@contextmanager
def raised() -> Iterator[None]:
    """While a verb works: as KeyboardInterrupt, so that it can tidy up and say how things stand."""
    if signal.getsignal(signal.SIGINT) is not leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, leave)


@contextmanager
def told(words: str) -> Iterator[None]:
    """Say how things stand, where Ctrl-C ends the work within."""
    try:
        yield
    except KeyboardInterrupt:
        from orchestrator.cli import output

        output.notice(f"interrupted: {words}")
        raise
