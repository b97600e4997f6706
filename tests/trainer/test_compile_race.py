"""The race on torch's tracing flag: it is there without the lock, and gone with it.

The cases without the lock must fail: they prove that the cases with it test something.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from compile_threads import (  # noqa: E402
    AOT_EAGER,
    INDUCTOR,
    Events,
    Freezer,
    Task,
    assert_right,
    body,
    foreign_trace,
    forward_compile,
    in_thread,
    inputs,
    lazy_backward,
    step,
    wait_until_blocked,
    warm,
)

from trainer import torch_internals  # noqa: E402
from trainer.compile_lock import CompileLock, CompileRaceError, own_code  # noqa: E402

pytestmark = pytest.mark.torch

# Inductor is 2.5 s of imports, and only this case needs it; the others prove the same of the lock.
LAZY_BACKWARD = pytest.param("lazy backward compile", marks=pytest.mark.slow)


def backend(other: str) -> dict[str, str]:
    return INDUCTOR if other == "lazy backward compile" else AOT_EAGER


flag_is_global = pytest.mark.skipif(
    not torch_internals.tracing_flag_is_global(), reason="torch made the flag thread-local in 2.14"
)
needs_torch_before_2_13 = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13),
    reason="torch 2.13 hides this case",
)


# -- without the lock -----------------------------------------------------------------------------


@flag_is_global
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize(
    "other",
    [
        LAZY_BACKWARD,
        "foreign trace",
        # From 2.13 on is_compiling() is true for all threads meanwhile, which hides the race.
        pytest.param("forward compile", marks=needs_torch_before_2_13),
    ],
)
def test_without_the_lock_a_warm_call_fails_while_another_thread_traces(
    freezer: Freezer, other: str, recompute: bool, locking: CompileLock
) -> None:
    options = backend(other)
    mine, theirs = (torch.compile(own_code(body, name), **options) for name in ("mine", "theirs"))
    warm(locking, [mine, theirs])
    frozen = {
        "lazy backward compile": lazy_backward(freezer, theirs),
        "foreign trace": foreign_trace(freezer),
        "forward compile": in_thread(locking, forward_compile(freezer, theirs)),
    }[other]
    with freezer.frozen(frozen), pytest.raises(RuntimeError, match=torch_internals.FX_RACE):
        step(locking, mine, 8, recompute)


# -- with the lock --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [
        "checkpoint",  # a warm call, and another inside of backward
        pytest.param("warm", marks=pytest.mark.slow),
        pytest.param("compile", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("other", [LAZY_BACKWARD, "forward compile", "foreign trace"])
def test_with_the_lock_the_call_waits_and_is_right(
    freezer: Freezer, other: str, act: str, locking: CompileLock, events: Events
) -> None:
    mine, theirs = (locking.compile(body, name, **backend(other)) for name in ("mine", "theirs"))
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
