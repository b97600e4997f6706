"""SIGINT and SIGTERM: finish the step, or leave at once where nothing is half done."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SETTLE_S = 1.0


class Stopped(BaseException):
    """A signal asked the run to leave. Not an ``Exception``: nobody may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, as a shell reports them."""
        return 128 + self.number


class StopSignals:
    """While entered, signals raise ``Stopped`` at once, or after ``defer(True)`` are remembered.

    A second signal raises at once everywhere, unless it comes within ``SETTLE_S``: a signal to the
    whole process group reaches a rank twice, directly and handed on by torchrun.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._received_at = 0.0
        self._deferring = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def defer(self, deferring: bool) -> None:
        """True: only remember a first signal. False: raise it, if there was one."""
        self._deferring = deferring
        if not deferring and self.received is not None:
            raise Stopped(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        second = self.received is not None and time.monotonic() - self._received_at > SETTLE_S
        if self.received is None:
            self._received_at = time.monotonic()
        self.received = number
        if second or not self._deferring:
            raise Stopped(number)
