"""The compile lock: what it refuses, what it counts, what it leaves as it was."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from compile_threads import (  # noqa: E402
    AOT_EAGER,
    SIZES,
    Events,
    Task,
    assert_right,
    body,
    inputs,
    step,
    warm,
)
from torch.fx._symbolic_trace import Tracer  # noqa: E402

from trainer.compile_lock import (  # noqa: E402
    CompileLock,
    EagerRunError,
    LockHeldError,
    RecompileError,
    own_code,
)

pytestmark = pytest.mark.torch


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
