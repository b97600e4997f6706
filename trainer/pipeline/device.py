"""CUDA streams and events where there are some, and nothing where there are none.

Every worker has a stream of its own on its device, so that several on one device overlap, and one
on every other device of the run: a copy between devices runs on the source's current stream, and
the default one would put all threads' copies in a row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch


def enter_device(device: torch.device, others: Sequence[torch.device], priority: int = 0) -> None:
    """Make this thread's streams. They last as long as the thread. ``priority``: below 0, their
    kernels go before those of other streams that wait for room."""
    cuda = {d for d in (*others, device) if d.type == "cuda"}
    for each in cuda:
        torch.cuda.set_stream(torch.cuda.Stream(each, priority))
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Fence:
    """A point in one thread's work on a device that other threads' work can come after."""

    def __init__(self, device: torch.device, *, timing: bool = False) -> None:
        """At what the calling thread has launched on ``device`` so far."""
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=timing)
            self.event.record(torch.cuda.current_stream(device))
        self.time = time.perf_counter()

    def wait(self, device: torch.device) -> None:
        """What the calling thread launches on ``device`` from now on comes after this point."""
        if self.event is None:
            return
        if device.type == "cuda":
            torch.cuda.current_stream(device).wait_event(self.event)
        else:
            self.event.synchronize()

    def passed(self) -> bool:
        return self.event is None or self.event.query()

    def seconds_to(self, later: Fence) -> float:
        """Both with ``timing``, of one device, passed."""
        if self.event is None or later.event is None:
            return later.time - self.time
        return self.event.elapsed_time(later.event) / 1e3


class Meter:
    """Busy and idle time of one worker's device work: spans, and the gaps between them.

    Nothing waits for the device: spans are added up once their fences have passed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: deque[tuple[Fence, Fence]] = deque()
        self._last: Fence | None = None
        self._begun: Fence | None = None
        self.busy_s = 0.0
        self.idle_s = 0.0

    def begin(self) -> None:
        self._begun = Fence(self._device, timing=True)

    def end(self) -> Fence:
        assert self._begun is not None
        done = Fence(self._device, timing=True)
        self._spans.append((self._begun, done))
        self._add_up()
        return done

    def peak_memory_gb(self) -> float:
        """Of the device; 0 for a CPU, whose memory is the process's."""
        if self._device.type != "cuda":
            return 0.0
        return torch.cuda.max_memory_allocated(self._device) / 1e9

    def _add_up(self) -> None:
        while self._spans and self._spans[0][1].passed():
            begun, done = self._spans.popleft()
            if self._last is not None:
                self.idle_s += max(0.0, self._last.seconds_to(begun))
            self.busy_s += begun.seconds_to(done)
            self._last = done


def poll(fence: Fence, alive: Callable[[], None]) -> None:
    """Wait for a point without blocking inside the driver, where no failure of another stage could
    be seen; ``alive`` is called between looks and may raise."""
    pause = 1e-4
    while not fence.passed():
        alive()
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)
