"""Gradients are summed while backward goes on, and the sum ends with the run, whatever ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import enter_rank, run_ranks, train_until_it_fails  # noqa: E402
from test_threads import STEPS, running, wait_for  # noqa: E402
from tiny_job import make_drafter, tiny_job, tiny_plan  # noqa: E402

from trainer.pipeline.board import StallError  # noqa: E402
from trainer.pipeline.processes import ProcessesExecutor  # noqa: E402
from trainer.pipeline.reduce import fingerprint  # noqa: E402
from trainer.pipeline.stages import DrafterStage, Sums  # noqa: E402
from trainer.pipeline.threads import ThreadsExecutor  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

DEADLINE_S = 60.0


def last_of_backward(stage: Any, act: Callable[[], None]) -> None:
    """``act`` runs inside each backward pass, when all but the last parameter's gradient is there:
    ``fc`` reads the features, so its gradient is what a backward pass ends with."""
    stage.drafter.fc.weight.register_hook(lambda gradient: act())


# -- threads --------------------------------------------------------------------------------------


def counted_sums(executor: ThreadsExecutor) -> list[int]:
    """Of each drafter, the buckets that are summed; counted from now on."""
    done = [0] * len(executor.drafters)
    add = executor._sum.add

    def counting(party: int, *arguments: Any) -> None:
        add(party, *arguments)
        done[party] += 1

    executor._sum.add = counting  # type: ignore[method-assign]
    return done


def test_buckets_are_summed_before_backward_ends() -> None:
    """Both drafters stay inside their backward pass until the first buckets hold the sum."""
    job, _ = tiny_job(2)
    with running(job, 1, 2) as executor:
        done = counted_sums(executor)
        seen: list[list[Any]] = []

        def inside() -> None:
            wait_for(lambda: min(done) >= 4)
            seen.append([s.buckets[0].clone() for s in executor.summers])

        for drafter in executor.drafters:
            last_of_backward(drafter.stage, inside)
        executor.step(0)
        assert len(seen) == 2
        for left, right in seen:
            assert left.equal(right) and left.any()
        # All buckets and the sums of the losses.
        assert done == [len(executor.summers[0].buckets) + 1] * 2


def test_earlier_microbatches_of_a_step_are_not_summed() -> None:
    """Their gradients are not final: the last one's are added to them."""
    job, _ = tiny_job(6)
    with running(job, 1, 2) as executor:
        done = counted_sums(executor)
        before: list[int] = []
        for drafter in executor.drafters:
            last_of_backward(drafter.stage, lambda: before.append(max(done)))
        executor.step(0)
        assert before[:4] == [0] * 4


class Silent:
    """A drafter that tells no bucket, as a recorded one."""

    def __init__(self, device: Any) -> None:
        self._inner = make_drafter(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def accumulate(self, batch: Any, features: Any, finished: Any = None) -> Any:
        return self._inner.accumulate(batch, features)


class HeldUp(Silent):
    """One that tells only its first buckets: some parameter got no gradient."""

    def accumulate(self, batch: Any, features: Any, finished: Any = None) -> Any:
        def told(number: int) -> None:
            if finished is not None and number < 3:
                finished(number)

        return self._inner.accumulate(batch, features, told)


@pytest.mark.parametrize("drafters", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_what_is_told_early_changes_no_bit(drafters: int) -> None:
    """Nor does it matter when drafters tell different numbers of buckets."""
    built: list[int] = []

    def mixed(device: Any) -> DrafterStage:
        built.append(1)
        return HeldUp(device) if len(built) % 2 else make_drafter(device)

    results = []
    for make in (Silent, make_drafter, mixed):
        job, _ = tiny_job(2 * drafters, empty=frozenset({(1, drafters)}), drafter=make)
        with running(job, 1, drafters, check_equal_every=1) as executor:
            sums = [executor.step(i).sums for i in range(STEPS)]
            weights = {fingerprint(d.stage.weights()) for d in executor.drafters}
        assert len(weights) == 1
        results.append((torch.stack(sums), weights))
    for sums, weights in results[1:]:
        assert sums.equal(results[0][0]) and weights == results[0][1]


def test_a_step_says_how_long_its_sum_was_waited_for() -> None:
    job, _ = tiny_job(2)
    for drafters in (1, 2):
        with running(job, 1, drafters) as executor:
            known = [executor.step(i).telemetry for i in range(2)][-1]
        assert ("sum_wait_s" in known) == (drafters > 1)
        assert known.get("sum_wait_s", 0.0) >= 0


def test_a_failure_inside_a_backward_pass_ends_all_and_comes_first() -> None:
    """After its first buckets have been summed with the others', who wait for the rest."""
    job, events = tiny_job(2, steps=50)
    with running(job, 2, 2) as executor:
        done = counted_sums(executor)

        def broken() -> None:
            wait_for(lambda: min(done) >= 4)
            raise RuntimeError("the backward pass broke")

        last_of_backward(executor.drafters[1].stage, broken)
        with pytest.raises(RuntimeError, match="the backward pass broke"):
            executor.step(0)
    (failed,) = events.named("failed")
    assert failed["stage"] == "drafter 1"
    assert "in broken" in failed["traceback"]


def test_a_failure_in_a_sum_ends_all_and_comes_first() -> None:
    job, events = tiny_job(2, steps=50)
    with running(job, 2, 2) as executor:
        add = executor._sum._add_share
        count: list[int] = []

        def broken(party: int, *arguments: Any) -> None:
            count.append(party)
            if count.count(1) == 3:
                raise RuntimeError("a copy between devices failed")
            add(party, *arguments)

        executor._sum._add_share = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="a copy between devices failed"):
            executor.step(0)
    (failed,) = events.named("failed")
    assert failed["stage"] == "sum 1"


def test_a_sum_that_hangs_is_named_and_who_waits_for_it_is_not() -> None:
    release = threading.Event()
    job, events = tiny_job(2, steps=50)
    with running(job, 1, 2, stall_limit_s=1.0) as executor:
        add = executor._sum._add_share

        def hanging(party: int, *arguments: Any) -> None:
            if party == 0:
                release.wait(DEADLINE_S)
            add(party, *arguments)

        executor._sum._add_share = hanging  # type: ignore[method-assign]
        try:
            with pytest.raises(
                StallError, match="sum 0: 'gradient sum, bucket 1 of 11' has lasted"
            ):
                executor.step(0)
        finally:
            release.set()
    assert events.named("failed")[0]["stage"] == "sum 0"


# -- processes ------------------------------------------------------------------------------------


def overlapping_rank(rank: int, port: int, out: Any) -> None:
    """One target, two drafters: inside backward until the first buckets are summed."""
    enter_rank(rank, 3, port)
    job, _ = tiny_job(2, steps=STEPS)
    executor = ProcessesExecutor(job, tiny_plan(1, 2, 2, check_equal_every=1))
    executor.start()
    begun: list[int] = []
    part: Any = executor.part

    def inside() -> None:
        works = part.sum._works
        wait_for(lambda: len(works) >= 4 and all(w.is_completed() for w in works[:4]))
        begun.append(len(works))

    if not executor.place.is_target:
        last_of_backward(part.stage, inside)
    losses = []
    for index in range(STEPS):
        losses.append(Sums.read(executor.step(index).sums).mean_loss)
        executor.agreed_stop(None)
    weights = None if executor.place.is_target else fingerprint(part.stage.weights())
    executor.close()
    out.put((rank, losses, begun, weights))


@pytest.mark.slow
def test_ranks_sum_buckets_before_backward_ends_as_threads_do() -> None:
    answers = run_ranks(overlapping_rank, 3)
    job, _ = tiny_job(2, steps=STEPS)
    with running(job, 1, 2) as threads:
        expected = [Sums.read(threads.step(i).sums).mean_loss for i in range(STEPS)]
        weights = fingerprint(threads.drafters[0].stage.weights())
    for _, losses, begun, found in answers[1:]:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert begun == [10] * STEPS
        # A sum of two has one order of adding: the bits are those of the threads.
        assert found == weights


def failing_rank(rank: int, port: int, out: Any) -> None:
    """The second drafter fails inside its backward pass, when its first buckets are under way."""
    enter_rank(rank, 3, port)
    job, _ = tiny_job(2, steps=50)
    executor = ProcessesExecutor(job, tiny_plan(1, 2, 2, stall_limit_s=30))
    executor.start()
    part: Any = executor.part

    def broken() -> None:
        wait_for(lambda: part.sum._works[0].is_completed())
        raise RuntimeError("the backward pass broke")

    if rank == 2:
        last_of_backward(part.stage, broken)
    train_until_it_fails(executor, rank, out)


@pytest.mark.slow
def test_ranks_name_the_one_that_failed_inside_backward() -> None:
    answers = run_ranks(failing_rank, 3)
    assert answers[2][1:] == ("RuntimeError", "the backward pass broke")
    for _, kind, text in answers[:2]:
        assert kind == "PeerFailedError"
        assert text.startswith("drafter 1 (rank 2) failed first: RuntimeError: the backward pass")
