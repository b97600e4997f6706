"""torch.compile in threads: no race, no eager run, no compile after warm-up; and refusals.

No timing luck: one thread is frozen *inside* ``Tracer.trace`` (after it has set torch's tracing
flag) by a hook, the other acts, then the first goes on. The cases without the lock must fail: they
prove that the cases with it test something.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx._symbolic_trace import Tracer  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from trainer import torch_internals  # noqa: E402
from trainer.compile_lock import (  # noqa: E402
    CompileLock,
    CompileRaceError,
    EagerRunError,
    LockHeldError,
    RecompileError,
    own_code,
)

pytestmark = pytest.mark.torch

SIZES = (8, 9)
"""Warm before the threads act. Other sizes are new shapes: they compile."""

flag_is_global = pytest.mark.skipif(
    not torch_internals.tracing_flag_is_global(), reason="torch made the flag thread-local in 2.14"
)
needs_torch_before_2_13 = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13),
    reason="torch 2.13 hides this case",
)
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


@pytest.fixture(autouse=True)
def no_structured_trace() -> Iterator[None]:
    """Pytest's log capture makes torch write megabytes of structured trace at each compile."""
    logger = logging.getLogger("torch.__trace")
    level = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(level)


@pytest.fixture
def freezer(monkeypatch: pytest.MonkeyPatch) -> Freezer:
    # The first compile of a process sets up process-wide state: let it be another function's.
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    return Freezer(monkeypatch)


class Events(list[tuple[str, dict[str, Any]]]):
    def __call__(self, name: str, /, **detail: Any) -> None:
        self.append((name, detail))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [detail for event, detail in self if event == name]


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def locking(events: Events) -> Iterator[CompileLock]:
    lock = CompileLock(event=events, foreign_trace_limit_s=30)
    yield lock
    lock.close()


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


# -- without the lock -----------------------------------------------------------------------------


@flag_is_global
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize(
    "other",
    [
        "lazy backward compile",
        "foreign trace",
        # From 2.13 on is_compiling() is true for all threads meanwhile, which hides the race.
        pytest.param("forward compile", marks=needs_torch_before_2_13),
    ],
)
def test_without_the_lock_a_warm_call_fails_while_another_thread_traces(
    freezer: Freezer, other: str, recompute: bool, locking: CompileLock
) -> None:
    mine, theirs = (torch.compile(own_code(body, name), **INDUCTOR) for name in ("mine", "theirs"))
    warm(locking, [mine, theirs])
    frozen = {
        "lazy backward compile": lazy_backward(freezer, theirs),
        "foreign trace": foreign_trace(freezer),
        "forward compile": in_thread(locking, forward_compile(freezer, theirs)),
    }[other]
    with freezer.frozen(frozen), pytest.raises(RuntimeError, match=torch_internals.FX_RACE):
        step(locking, mine, 8, recompute)


# -- with the lock --------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["warm", "checkpoint", "compile"])
@pytest.mark.parametrize("other", ["lazy backward compile", "forward compile", "foreign trace"])
def test_with_the_lock_the_call_waits_and_is_right(
    freezer: Freezer, other: str, act: str, locking: CompileLock, events: Events
) -> None:
    mine, theirs = (locking.compile(body, name, **INDUCTOR) for name in ("mine", "theirs"))
    warm(locking, [mine, theirs])
    frozen: Callable[[], Any] = {
        "lazy backward compile": lambda: lazy_backward(freezer, theirs),
        "forward compile": lambda: in_thread(locking, forward_compile(freezer, theirs)),
        "foreign trace": lambda: foreign_trace(freezer, locking.exclusive),
    }[other]()
    size = 23 if act == "compile" else 8
    with freezer.frozen(frozen) as first:
        second = Task(in_thread(locking, lambda: step(locking, mine, size, act == "checkpoint")))
        wait_until_blocked(second)
        assert second.is_alive()
        freezer.go_on.set()
        assert_right(second.result(), size)
        first.result()
    assert locking.stats().waits >= 1
    assert locking.stats().eager_runs == 0
    assert not events.named("eager_fallback")
    assert locking.health().problems() == []


@flag_is_global
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpoint"])
def test_a_tracer_that_takes_no_lock_is_waited_for(
    freezer: Freezer, recompute: bool, locking: CompileLock
) -> None:
    mine = locking.compile(body, "mine", **AOT_EAGER)
    warm(locking, [mine])
    with freezer.frozen(foreign_trace(freezer)):
        second = Task(in_thread(locking, lambda: step(locking, mine, 8, recompute)))
        while locking.stats().foreign_traces == 0:
            time.sleep(0.001)
        freezer.go_on.set()
        assert_right(second.result(), 8)
    assert locking.stats().eager_runs == 0


@flag_is_global
def test_a_flag_that_stays_set_is_an_error_that_says_so(freezer: Freezer) -> None:
    locking = CompileLock(foreign_trace_limit_s=0.05)
    mine = locking.compile(body, "mine", **AOT_EAGER)
    warm(locking, [mine])
    with freezer.frozen(foreign_trace(freezer)):
        with pytest.raises(CompileRaceError, match="does not hold the compile lock"):
            step(locking, mine, 8)
        assert "tracing flag is set" in locking.health().problems()[0]
    assert locking.health().problems() == []
    locking.close()


def test_torchs_own_lock_is_looked_up_at_each_call_and_free_in_backward(
    monkeypatch: pytest.MonkeyPatch, locking: CompileLock
) -> None:
    mine = locking.compile(body, "mine", **AOT_EAGER)
    warm(locking, [mine])

    class Recording:
        taken = 0

        def __init__(self) -> None:
            self.lock: Any = threading.RLock()

        def acquire(self, *args: Any, **kwargs: Any) -> bool:
            self.taken += 1
            return bool(self.lock.acquire(*args, **kwargs))

        def release(self) -> None:
            self.lock.release()

        def _is_owned(self) -> bool:
            return bool(self.lock._is_owned())

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *exc: object) -> None:
            self.release()

    lock = Recording()
    monkeypatch.setattr(torch._dynamo.convert_frame, "compile_lock", lock)
    arguments = inputs(8)
    out = mine(*arguments)
    assert lock.taken == 1
    held_in_backward: list[bool] = []
    arguments[0].register_hook(lambda g: held_in_backward.append(lock._is_owned()))
    locking.backward(out.sum())
    assert held_in_backward == [False]


# -- refusals -------------------------------------------------------------------------------------


def test_backward_under_the_lock_is_refused(locking: CompileLock) -> None:
    (x, _) = inputs(3)
    with locking.exclusive(), pytest.raises(LockHeldError, match="held across backward"):
        locking.backward(x.sum())
    locking.backward(x.sum())
    assert x.grad is not None


def test_an_eager_run_is_an_error_never_a_fallback(locking: CompileLock, events: Events) -> None:
    mine = locking.compile(body, "mine", **AOT_EAGER)
    warm(locking, [mine])
    with locking.exclusive():
        torch.compiler.set_stance("force_eager")
    try:
        with pytest.raises(EagerRunError, match=r"mine ran without torch\.compile"):
            mine(*inputs(8))
        assert "stance is 'force_eager'" in locking.health().problems()[0]
    finally:
        torch.compiler.set_stance("default")
    assert locking.stats().eager_runs == 1
    assert events.named("eager_fallback")[0]["name"] == "mine"


def test_the_recompile_limit_is_an_error_not_an_eager_run() -> None:
    locking = CompileLock(recompile_limit=1)
    mine = locking.compile(body, "mine", **AOT_EAGER)
    with locking.thread():
        mine(*inputs(8))
        with pytest.raises(RecompileError, match="mine was compiled 1 times and needs more"):
            mine(*inputs(9))
    assert locking.stats().eager_runs == 0
    locking.close()


def test_a_compile_after_warm_up_is_an_event_with_its_reason(
    locking: CompileLock, events: Events
) -> None:
    mine = locking.compile(body, "mine", **AOT_EAGER)
    with locking.thread():
        mine(*inputs(8))
        mine(*inputs(9))
        assert locking.stats().recompiles == 0
        locking.end_warm_up()
        mine(*inputs(8))
        assert not events.named("recompile")
        mine(*inputs(10))
    assert locking.stats().recompiles == 1
    (recompile,) = events.named("recompile")
    assert recompile["name"] == "mine"
    assert "size mismatch" in recompile["reason"]


def test_policy_fail_turns_it_into_an_error(events: Events) -> None:
    locking = CompileLock(policy="fail", event=events)
    mine = locking.compile(body, "mine", **AOT_EAGER)
    with locking.thread():
        mine(*inputs(8))
        locking.end_warm_up()
        with pytest.raises(RecompileError, match="mine was compiled again after warm-up"):
            mine(*inputs(11))
        mine(*inputs(8))
    locking.close()


def test_every_function_has_its_own_code_object_and_budget() -> None:
    one, two = own_code(body, "one"), own_code(body, "two")
    assert one.__code__ is not two.__code__
    assert one.__code__.co_name == "body__one"
    locking = CompileLock(recompile_limit=2)
    with locking.thread():
        for name in ("one", "two", "three"):
            mine = locking.compile(body, name, **AOT_EAGER)
            for size in SIZES:
                assert_right(step(locking, mine, size), size)
    locking.close()


def test_the_settings_of_a_thread_end_with_it() -> None:
    before = torch._dynamo.config.recompile_limit
    locking = CompileLock(recompile_limit=99)
    with locking.thread():
        assert torch._dynamo.config.recompile_limit == 99
        assert torch._functorch.config.force_non_lazy_backward_lowering
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()
    if torch.__version__ >= "2.12":
        assert torch._dynamo.config.recompile_limit == before
    locking.close()


# -- the trace ------------------------------------------------------------------------------------


def test_the_trace_names_the_thread_and_the_line_that_set_the_flag(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_TRACE_COMPILE", "1")
    original = Tracer.trace
    locking = CompileLock(event=events)

    def culprit() -> None:
        torch.fx.symbolic_trace(torch.nn.Linear(2, 2))

    for _ in range(2):
        Task(culprit, "a-library").result()
    locking.close()
    (seen,) = events.named("fx_trace")
    assert seen["thread"] == "a-library"
    assert seen["lock_held"] is False
    assert "culprit" in seen["stack"][-1]
    assert Tracer.trace is original


def test_no_trace_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_TRACE_COMPILE", raising=False)
    original = Tracer.trace
    locking = CompileLock()
    assert Tracer.trace is original
    assert locking.trace_log is None
    locking.close()


# -- storm ----------------------------------------------------------------------------------------


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


@pytest.mark.slow
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
