"""Threads round torch.compile whose moves a test decides: no timing luck.

One thread is frozen *inside* ``Tracer.trace`` by a hook, after it has set torch's tracing flag; the
other acts; then the first goes on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx._symbolic_trace import Tracer
from torch.utils.checkpoint import checkpoint

from trainer.compile_lock import CompileLock

SIZES = (8, 9)
"""Warm before the threads act. Other sizes are new shapes: they compile."""

# Only inductor traces while it compiles a backward; aot_eager is enough for all else.
INDUCTOR = {"backend": "inductor"}
AOT_EAGER = {"backend": "aot_eager"}


def body(x: Any, w: Any) -> Any:
    # One matrix product: inductor calls the library and needs no C++ compiler for it.
    return torch.addmm(x, x, w)


def inputs(size: int) -> list[Any]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, size, generator=generator, requires_grad=True) for _ in range(2)]


class Task(threading.Thread):
    """A thread that keeps what its function returned or raised."""

    def __init__(self, function: Callable[[], Any], name: str = "task") -> None:
        super().__init__(name=name, daemon=True)
        self._function = function
        self.value: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self.error = error

    def result(self) -> Any:
        self.join(60)
        assert not self.is_alive(), f"{self.name} hangs"
        if self.error is not None:
            raise self.error
        return self.value


class Freezer:
    """Holds one thread inside ``Tracer.trace``, where the tracing flag is already set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.inside = threading.Event()
        self.go_on = threading.Event()
        self.armed = threading.Event()

    @contextlib.contextmanager
    def frozen(self, function: Callable[[], Any]) -> Iterator[Task]:
        """``function`` in a thread that stands still in its first trace after ``armed`` is set."""
        original = Tracer.create_args_for_root
        freezer = self

        def create_args_for_root(tracer: Any, *args: Any, **kwargs: Any) -> Any:
            mine = threading.current_thread().name == "frozen"
            if mine and freezer.armed.is_set() and not freezer.inside.is_set():
                freezer.inside.set()
                assert freezer.go_on.wait(60)
            return original(tracer, *args, **kwargs)

        self._monkeypatch.setattr(Tracer, "create_args_for_root", create_args_for_root)
        task = Task(function, "frozen")
        try:
            assert self.inside.wait(60), f"never traced; {task.error!r}"
            yield task
        finally:
            self.go_on.set()
            task.join(60)


class Events(list[tuple[str, dict[str, Any]]]):
    def __call__(self, name: str, /, **detail: Any) -> None:
        self.append((name, detail))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [detail for event, detail in self if event == name]


def in_thread(locking: CompileLock, function: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with locking.thread():
            return function()

    return run


def warm(locking: CompileLock, functions: list[Any], sizes: tuple[int, ...] = SIZES) -> None:
    """Every shape, plain and under checkpointing, one after the other, in threads of their own."""

    def all_shapes() -> None:
        for function in functions:
            for size in sizes:
                for recompute in (False, True):
                    step(locking, function, size, recompute)

    Task(in_thread(locking, all_shapes)).result()


def step(locking: CompileLock, function: Any, size: int, recompute: bool = False) -> list[Any]:
    """Forward and backward; the gradients."""
    arguments = inputs(size)
    if recompute:
        out = checkpoint(function, *arguments, use_reentrant=False)
    else:
        out = function(*arguments)
    locking.backward(out.sum())
    return [a.grad for a in arguments]


def eager_gradients(size: int) -> list[Any]:
    arguments = inputs(size)
    body(*arguments).sum().backward()
    return [a.grad for a in arguments]


def assert_right(gradients: list[Any], size: int) -> None:
    for got, expected in zip(gradients, eager_gradients(size), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def wait_until_blocked(task: Task) -> None:
    """Until the thread stands in the lock's acquire, or has ended."""
    while task.is_alive():
        assert task.ident is not None
        frame = sys._current_frames().get(task.ident)
        if frame is not None and frame.f_code.co_name == "_acquire":
            return
        time.sleep(0.001)


# -- what the frozen thread does; each returns a function to run in the thread "frozen" ------------


def without_caches() -> None:
    """In this thread: a hit in the cache of an earlier run would trace nothing."""
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.force_disable_caches = True


def lazy_backward(freezer: Freezer, function: Any) -> Callable[[], Any]:
    """A new shape whose backward is compiled within ``backward()``, as torch does by default."""

    def run() -> Any:
        torch._dynamo.config.automatic_dynamic_shapes = False
        torch._functorch.config.force_non_lazy_backward_lowering = False
        without_caches()
        arguments = inputs(21)
        out = function(*arguments)
        freezer.armed.set()
        out.sum().backward()
        return [a.grad for a in arguments]

    return run


def forward_compile(freezer: Freezer, function: Any) -> Callable[[], Any]:
    """A new shape; forward and backward are compiled within the forward call."""

    def run() -> Any:
        without_caches()
        freezer.armed.set()
        arguments = inputs(22)
        function(*arguments).sum().backward()
        return [a.grad for a in arguments]

    return run


def foreign_trace(freezer: Freezer, guard: Any = contextlib.nullcontext) -> Callable[[], Any]:
    """Another library traces a module of its own."""

    def run() -> Any:
        freezer.armed.set()
        with guard():
            return torch.fx.symbolic_trace(torch.nn.Linear(2, 2))

    return run
