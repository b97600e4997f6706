"""Threads, new shapes, checkpoints and a foreign tracer, all at once: no error, no eager run, right
gradients."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from compile_threads import (  # noqa: E402
    INDUCTOR,
    Events,
    Task,
    assert_right,
    body,
    in_thread,
    step,
)

from trainer.compile_lock import CompileLock  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def storm(
    locking: CompileLock, functions: list[Any], sizes: list[int], guard: Any, steps: int
) -> int:
    """Threads with a function each and a foreign tracer; how many traces that one made."""
    over = threading.Event()

    def trace() -> int:
        traces = 0
        while not over.is_set():
            with guard():
                torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
            traces += 1
            time.sleep(0.002)
        return traces

    def work(offset: int, function: Any) -> None:
        for i in range(steps):
            size = sizes[(i + offset) % len(sizes)]
            assert_right(step(locking, function, size, i % 2 == 1), size)

    tracer = Task(trace, "foreign")
    workers = [
        Task(in_thread(locking, lambda i=i, f=f: work(i, f)), f"drafter{i}")
        for i, f in enumerate(functions)
    ]
    try:
        for worker in workers:
            worker.result()
    finally:
        over.set()
    return int(tracer.result())


def test_storm_of_threads_new_shapes_checkpoints_and_a_foreign_tracer(
    locking: CompileLock, events: Events
) -> None:
    functions = [locking.compile(body, f"drafter{i}", **INDUCTOR) for i in range(3)]
    sizes = list(range(12, 24))
    assert storm(locking, functions, sizes, locking.exclusive, steps=24) > 0
    # All warm now. A tracer that knows nothing of the lock may join in; nothing may compile.
    locking.end_warm_up()
    assert storm(locking, functions, sizes, contextlib.nullcontext, steps=240) > 0
    stats = locking.stats()
    assert (stats.eager_runs, stats.recompiles) == (0, 0)
    assert not events.named("eager_fallback") and not events.named("recompile")
    assert locking.health().problems() == []
