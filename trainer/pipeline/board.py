"""What the threads of one run share: one condition to wait on, the first cause, signs of life.

Every wait of every thread goes through ``Board.wait``; it ends when the run fails or is closed, so
a dead stage never leaves the others waiting. One condition for all of them: at some hundred
hand-offs a second the needless wake-ups cost less than a lock a queue would in order of taking.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from trainer.errors import TrainerError, named_line
from trainer.pipeline.stages import EventSink

GRACE_S = 30.0
"""How long the main thread may take to leave after a stall, before the process is ended for it."""


class Halted(Exception):
    """The run is over: another stage failed, or the executor was closed. Never the cause."""


class StallError(TrainerError):
    """A stage showed no sign of life beyond the limit."""

    exit_code = 1


@dataclass(frozen=True)
class Failure:
    stage: str
    error: BaseException


@dataclass
class Activity:
    name: str
    waiting: bool
    watched_s: float = 0.0
    """Added up by the watchdog, not read off a clock: that runs on while the process is stopped or
    its container frozen, which is no stage's fault."""


class Pulse:
    """What one thread is doing, and for how long. Waiting for another stage is no stall."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread: int | None = None
        self.set("starting", waiting=True)

    def set(self, activity: str, *, waiting: bool = False) -> None:
        # One assignment: the watchdog reads it without a lock.
        self.now = Activity(activity, waiting)

    @contextmanager
    def waiting(self, activity: str) -> Iterator[None]:
        before = self.now.name
        self.set(activity, waiting=True)
        try:
            yield
        finally:
            self.set(before)

    def watched(self, seconds: float) -> None:
        """By the watchdog: so long a nap has gone by."""
        self.now.watched_s += seconds

    def stalled_for(self) -> float:
        now = self.now
        return 0.0 if now.waiting else now.watched_s


class Board:
    def __init__(self, event: EventSink) -> None:
        self.changed = threading.Condition()
        self.failure: Failure | None = None
        self.closed = False
        self.noticed = threading.Event()
        self.pulses: list[Pulse] = []
        self._event = event
        self._event_lock = threading.Lock()

    def event(self, event: str, /, **detail: object) -> None:
        """The run's event sink, one thread at a time."""
        with self._event_lock:
            self._event(event, **detail)

    def pulse(self, name: str) -> Pulse:
        pulse = Pulse(name)
        self.pulses.append(pulse)
        return pulse

    def wait(self, ready: Callable[[], bool], pulse: Pulse | None, what: str) -> None:
        """Until ``ready()``, called with ``changed`` held (and holding it already is allowed).
        Raises ``Halted`` when the run is over."""
        with self.changed:
            self.check()
            if ready():
                return
            if pulse is None:
                self._wait(ready)
                return
            with pulse.waiting(what):
                self._wait(ready)

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            # A time-out lets the main thread run its signal handlers on every platform.
            self.changed.wait(timeout=0.5)
            self.check()

    def check(self) -> None:
        if self.failure is not None or self.closed:
            raise Halted

    def fail(self, stage: str, error: BaseException) -> None:
        """Record the first cause and wake everybody; later ones are its noise."""
        with self.changed:
            if self.failure is not None or self.closed:
                return
            self.failure = Failure(stage, error)
            self.changed.notify_all()
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.event("failed", stage=stage, error=named_line(error), traceback=text)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.noticed.set()

    def raise_failure(self) -> None:
        """The first cause, in the caller's thread, with the stage's own traceback."""
        self.noticed.set()
        if self.failure is None:
            raise Halted
        raise self.failure.error


class Watchdog(threading.Thread):
    """Fails the run when a stage shows no sign of life for ``limit_s``, naming where it stands.

    A hung device call cannot be interrupted: if the main thread hangs in one too and does not
    notice within ``GRACE_S``, the process is ended with the stacks of all threads on stderr.
    """

    def __init__(self, board: Board, limit_s: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._board = board
        self._limit_s = limit_s

    def run(self) -> None:
        nap = min(1.0, self._limit_s / 4)
        while self._board.failure is None and not self._board.closed:
            time.sleep(nap)
            for pulse in self._board.pulses:
                pulse.watched(nap)
            worst = max(self._board.pulses, key=Pulse.stalled_for, default=None)
            if worst is not None and worst.stalled_for() > self._limit_s:
                self._stalled(worst)
                return

    def _stalled(self, pulse: Pulse) -> None:
        frame = sys._current_frames().get(pulse.thread or 0)
        where = _position(frame)
        error = StallError(
            f"{pulse.name}: '{pulse.now.name}' has lasted more than {self._limit_s:g} s ({where})",
            next_step="look at this thread's stack above the other messages; raise "
            "pipeline.stall_limit_s if it is only slow",
        )
        if frame is not None:
            print("".join(traceback.format_stack(frame)), file=sys.stderr, flush=True)
        self._board.fail(pulse.name, error)
        if not self._board.noticed.wait(GRACE_S):
            for thread, stack in sys._current_frames().items():
                print(
                    f"thread {thread}:\n{''.join(traceback.format_stack(stack))}", file=sys.stderr
                )
            print(f"{error}\nended: the main thread hangs as well", file=sys.stderr, flush=True)
            os._exit(1)


def _position(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "thread has ended"
