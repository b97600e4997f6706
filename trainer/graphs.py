"""A step as one CUDA graph: for a small drafter or target, launching kernels costs more than them.

A graph replays what was launched while it was recorded, on the same addresses: inputs are copied
into tensors that stay, results are read from tensors that the next replay overwrites. The recorded
function must not wait for the device and must not take a number from the host that changes.

On a CPU the function itself runs each time, so that everything round it is the same and tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

WARM_UPS = 3
"""Plain runs before the recording: compile, autotune, open libraries, settle the allocator."""


class Recorded(Generic[T]):
    """``function`` as a graph. Recorded at the first call or by ``record``; its warm-up runs are
    real runs: whatever they change (gradients, say) is the caller's to undo."""

    def __init__(self, function: Callable[[], T], device: torch.device) -> None:
        self._function = function
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: T

    def record(self) -> None:
        """Warm up and record; leaves the work of the warm-up runs behind, and no replay."""
        if self._device.type != "cuda":
            self._function()
            return
        # One stream for both: autograd adds gradients on the stream where a parameter was first
        # used, and a recorded stream may not wait for another.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._function()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use their devices meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._result = self._function()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._graph = graph

    def __call__(self) -> T:
        """One run; on a GPU the result is overwritten by the next."""
        if self._device.type != "cuda":
            return self._function()
        if self._graph is None:
            self.record()
        assert self._graph is not None
        self._graph.replay()
        return self._result
