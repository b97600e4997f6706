"""The threads executor on a CPU, with real stages: it trains as inline does, and it ends well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_job import Events, make_drafter, make_target, tiny_job, tiny_plan  # noqa: E402

from trainer.compile_lock import CompileLock  # noqa: E402
from trainer.errors import TrainerError  # noqa: E402
from trainer.pipeline.board import Pulse, StallError  # noqa: E402
from trainer.pipeline.inline import InlineExecutor  # noqa: E402
from trainer.pipeline.reduce import ReplicasDifferError, fingerprint  # noqa: E402
from trainer.pipeline.stages import Job, StepResult, Sums  # noqa: E402
from trainer.pipeline.threads import ThreadsExecutor  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 4


@contextmanager
def running(job: Job, targets: int, drafters: int, **pipeline: Any) -> Iterator[ThreadsExecutor]:
    plan = tiny_plan(targets, drafters, job.batches.slots, **pipeline)
    executor = ThreadsExecutor(job, plan)
    try:
        executor.start()
        yield executor
    finally:
        executor.close()
        assert not any(worker.is_alive() for worker in executor._workers())


def losses(results: list[StepResult]) -> list[float]:
    return [Sums.read(r.sums).mean_loss for r in results]


def inline(job: Job, steps: int = STEPS) -> tuple[list[StepResult], dict[str, Any]]:
    executor = InlineExecutor(job, torch.device("cpu"))
    executor.start()
    return [executor.step(i) for i in range(steps)], executor.state()


def assert_same_weights(left: dict[str, Any], right: dict[str, Any]) -> None:
    for kind in ("master", "average", "square"):
        for name, tensor in left[kind].items():
            torch.testing.assert_close(tensor, right[kind][name], rtol=1e-4, atol=1e-5)


FEW = [pytest.param(*counts, marks=pytest.mark.slow) for counts in ((1, 1), (3, 1), (1, 2))]

# -- the same training ----------------------------------------------------------------------------


@pytest.mark.parametrize(("targets", "drafters"), [*FEW, (2, 4)])
def test_losses_and_weights_are_those_of_the_inline_executor(targets: int, drafters: int) -> None:
    job, _ = tiny_job(4)
    expected, state = inline(job)
    with running(job, targets, drafters, check_equal_every=1) as executor:
        results = [executor.step(i) for i in range(STEPS)]
        assert losses(results) == pytest.approx(losses(expected), rel=1e-5)
        assert [r.tokens for r in results] == [r.tokens for r in expected]
        for got, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(got.gradient_norm, wanted.gradient_norm, rtol=1e-4, atol=0)
        assert_same_weights(executor.state(), state)


def test_a_microbatch_without_an_anchor_takes_part() -> None:
    job, _ = tiny_job(2, empty=frozenset({(0, 1), (1, 0), (1, 1)}))
    expected, state = inline(job)
    with running(job, 1, 2, check_equal_every=1) as executor:
        results = [executor.step(i) for i in range(STEPS)]
        assert losses(results) == pytest.approx(losses(expected), rel=1e-5)
        assert losses(results)[1] == 0.0
        assert_same_weights(executor.state(), state)


def test_replicas_are_equal_bit_for_bit() -> None:
    job, _ = tiny_job(6)
    with running(job, 2, 3) as executor:
        for i in range(STEPS):
            executor.step(i)
        prints = {fingerprint(d.stage.weights()) for d in executor.drafters}
    assert len(prints) == 1


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped() -> None:
    job, _ = tiny_job(4)
    with running(job, 2, 2) as executor:
        through = [executor.step(i) for i in range(STEPS)]
    with running(job, 2, 2) as executor:
        [executor.step(i) for i in range(2)]
        state = executor.state()
    with running(job, 2, 2) as executor:
        executor.load(state)
        rest = [executor.step(i) for i in range(2, STEPS)]
    assert losses(rest) == losses(through[2:])


def test_steps_follow_each_other() -> None:
    job, _ = tiny_job(2)
    with running(job, 1, 1) as executor:
        executor.step(3)
        with pytest.raises(ValueError, match="step 3 was asked for, 4 is next"):
            executor.step(3)


def test_the_last_step_of_the_data_is_the_last_of_the_targets() -> None:
    job, _ = tiny_job(2, steps=3)
    with running(job, 2, 2) as executor:
        [executor.step(i) for i in range(3)]
        assert [d.ring.depth_now() for d in executor.drafters] == [0, 0]


# -- back-pressure --------------------------------------------------------------------------------


def test_targets_run_ahead_by_the_slots_and_no_further() -> None:
    made: list[int] = []

    class Counting:
        def __init__(self, device: Any) -> None:
            self._inner = make_target(device)
            self.device, self.dtype = self._inner.device, self._inner.dtype
            self.feature_width = self._inner.feature_width

        def features(self, batch: Any, out: Any = None) -> Any:
            made.append(1)
            return self._inner.features(batch, out)

    job, _ = tiny_job(2, steps=50, target=Counting)
    with running(job, 1, 2, queue_depth=3) as executor:
        made.clear()
        executor.step(0)
        wait_for(lambda: all(d.ring.depth_now() == 3 for d in executor.drafters))
        # 2 microbatches of the step are used up; 2 drafters of 3 slots are full.
        assert len(made) == 2 + 2 * 3


# -- telemetry ------------------------------------------------------------------------------------


def test_every_step_says_what_each_side_could_do() -> None:
    job, events = tiny_job(4)
    with running(job, 2, 2) as executor:
        results = [executor.step(i) for i in range(STEPS)]
    known = results[-1].telemetry
    assert 0 <= known["target_idle"] <= 1 and 0 <= known["drafter_idle"] <= 1
    assert known["target_capacity"] > 0 and known["drafter_capacity"] > 0
    assert 0 <= known["queue_depth"] <= 2
    names = [d["name"] for d in events.named("compiled")]
    assert names == ["target 0", "target 1", "drafter 0", "drafter 1"]


def test_lock_counts_are_part_of_it() -> None:
    job, _ = tiny_job(2)
    lock = CompileLock()
    job = Job(job.batches, job.make_target, job.make_drafter, job.event, lock)
    with running(job, 1, 1) as executor:
        known = executor.step(0).telemetry
    inline = InlineExecutor(job, torch.device("cpu"))
    inline.start()
    alone = inline.step(0).telemetry
    inline.close()
    lock.close()
    for counts in (known, alone):
        assert counts["recompiles"] == 0 and counts["lock_waits"] == 0


# -- failure --------------------------------------------------------------------------------------


class Faulty:
    """A drafter that does ``act`` at its n-th microbatch (the warm-up's is number 1)."""

    def __init__(self, device: Any, act: Callable[[], None], at: int) -> None:
        self._inner = make_drafter(device)
        self._act, self._at, self._calls = act, at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def accumulate(self, batch: Any, features: Any, finished: Any = None) -> Any:
        self._calls += 1
        if self._calls == self._at:
            self._act()
        return self._inner.accumulate(batch, features, finished)


def faulty_job(act: Callable[[], None], at: int = 3, which: int = 1) -> tuple[Job, Events]:
    """Drafter number ``which`` of those built is faulty."""
    built: list[int] = []

    def make(device: Any) -> Any:
        built.append(1)
        return Faulty(device, act, at) if len(built) - 1 == which else make_drafter(device)

    return tiny_job(4, steps=50, drafter=make)


def fail() -> None:
    raise RuntimeError("the second drafter broke")


def test_a_failing_drafter_ends_all_with_its_own_error_first() -> None:
    job, events = faulty_job(fail)
    with running(job, 2, 2) as executor, pytest.raises(RuntimeError, match="drafter broke") as got:
        [executor.step(i) for i in range(10)]
    assert any("fail" in str(entry.name) for entry in got.traceback)
    (failed,) = events.named("failed")
    assert failed["stage"] == "drafter 1"
    assert failed["error"] == "RuntimeError: the second drafter broke"
    assert "in fail" in failed["traceback"]


def test_a_failing_target_ends_all() -> None:
    class Broken:
        def __init__(self, device: Any) -> None:
            self._inner = make_target(device)
            self._calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def features(self, batch: Any, out: Any = None) -> Any:
            self._calls += 1
            if self._calls == 4:
                raise RuntimeError("the target broke")
            return self._inner.features(batch, out)

    job, events = tiny_job(4, steps=50, target=Broken)
    with running(job, 2, 2) as executor, pytest.raises(RuntimeError, match="target broke"):
        [executor.step(i) for i in range(20)]
    assert events.named("failed")[0]["stage"].startswith("target")


def test_a_failure_while_building_is_raised_by_start() -> None:
    def broken(device: Any) -> Any:
        raise TrainerError("no such weights")

    job, events = tiny_job(2, target=broken)
    executor = ThreadsExecutor(job, tiny_plan(1, 1, 2))
    with pytest.raises(TrainerError, match="no such weights"):
        executor.start()
    executor.close()
    assert events.named("failed")[0]["stage"] == "target 0"


def test_a_stage_that_hangs_is_named_with_its_line() -> None:
    release = threading.Event()
    job, events = faulty_job(lambda: bool(release.wait(60)))
    with running(job, 1, 2, stall_limit_s=0.5) as executor:
        try:
            with pytest.raises(StallError, match="drafter 1: 'drafter forward and backward, step"):
                [executor.step(i) for i in range(10)]
        finally:
            release.set()
    assert events.named("failed")[0]["stage"] == "drafter 1"


def test_waiting_for_a_slow_stage_is_no_stall() -> None:
    release = threading.Event()
    job, _ = faulty_job(lambda: bool(release.wait(60)), which=0)
    with running(job, 1, 2) as executor:
        slow, other = executor.drafters
        step = threading.Thread(target=lambda: [executor.step(i) for i in range(2)])
        step.start()
        wait_for(lambda: other.pulse.now.name == "waiting for the sum of gradients")
        wait_for(lambda: slow.pulse.stalled_for() > 0)
        assert other.pulse.stalled_for() == 0
        release.set()
        step.join(60)


def test_only_time_that_the_watchdog_was_awake_counts_as_a_stall() -> None:
    pulse = Pulse("drafter 0")
    pulse.set("drafter forward and backward, step 1")
    # A process that is stopped meanwhile, or whose container is frozen, sees no naps go by.
    assert pulse.stalled_for() == 0
    pulse.watched(1.0)
    pulse.watched(1.0)
    assert pulse.stalled_for() == 2.0
    pulse.set("optimizer, step 1")
    assert pulse.stalled_for() == 0


def test_weights_that_differ_stop_the_run() -> None:
    job, _ = tiny_job(4, steps=50)
    with running(job, 1, 2, check_equal_every=2) as executor:
        executor.step(0)
        with torch.no_grad():
            executor.drafters[1].stage.weights()[0][3] += 1e-7
        with pytest.raises(ReplicasDifferError, match="at step 2 the weights of drafter 1 differ"):
            executor.step(1)


def test_closing_in_the_middle_ends_every_thread() -> None:
    job, _ = tiny_job(4, steps=50)
    with running(job, 3, 2) as executor:
        executor.step(0)


def test_the_fingerprint_sees_one_bit_and_order() -> None:
    weights = torch.arange(8, dtype=torch.float32)
    swapped = weights[[1, 0, *range(2, 8)]]
    changed = weights.clone()
    changed.view(torch.int32)[5] ^= 1
    assert len({fingerprint([w]) for w in (weights, swapped, changed)}) == 3
    assert fingerprint([weights]) == fingerprint([weights.clone()])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
