"""The processes executor on a CPU: four real processes (2 targets, 2 drafters) under gloo."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import enter_rank, run_ranks, train_until_it_fails  # noqa: E402
from tiny_job import make_drafter, tiny_job, tiny_plan  # noqa: E402

from trainer.errors import ConfigError, ResourceError  # noqa: E402
from trainer.pipeline.inline import InlineExecutor  # noqa: E402
from trainer.pipeline.place import Deal, Place  # noqa: E402
from trainer.pipeline.processes import (  # noqa: E402
    PeerFailedError,
    ProcessesExecutor,
    lost_peer,
)
from trainer.pipeline.reduce import fingerprint  # noqa: E402
from trainer.pipeline.stages import Sums  # noqa: E402
from trainer.pipeline.threads import ThreadsExecutor  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 4
SLOTS = 4


# -- who does what --------------------------------------------------------------------------------


def place(rank: int, targets: int = 5, drafters: int = 3, nodes: int = 2) -> Place:
    size = targets + drafters
    return Place(rank, size * nodes, rank % size, targets, drafters)


def test_ranks_of_a_node_are_targets_then_drafters() -> None:
    assert [place(r).name for r in (0, 4, 5, 7)] == [
        "target 0",
        "target 4",
        "drafter 0",
        "drafter 2",
    ]
    assert [place(r).name for r in (8, 13)] == ["target 5", "drafter 3"]
    assert place(0).drafter_ranks() == [5, 6, 7, 13, 14, 15]
    assert [r for r in range(16) if place(r).leads] == [5]


def test_features_stay_within_a_node() -> None:
    assert place(9).target_rank(0) == 8 and place(9).drafter_rank(2) == 15


def test_every_microbatch_is_dealt_once_and_evenly() -> None:
    slots = 12
    dealt: list[int] = []
    for node in range(2):
        deal = Deal(place(8 * node), slots)
        steps = [list(deal.of_step(turn)) for turn in range(5)]
        dealt += [slot for slot, *_ in steps[0]]
        counts = [sum(d == i for _, _, d, _ in steps[1]) for i in range(3)]
        assert counts == [2, 2, 2]
        targets = [t for step in steps for _, t, _, _ in step]
        assert [targets.count(i) for i in range(5)] == [6] * 5
        numbers = [n for step in steps for _, _, d, n in step if d == 1]
        assert numbers == list(range(10))
    assert sorted(dealt) == list(range(slots))


def test_without_torchrun_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="needs torchrun") as error:
        Place.from_environment(tiny_plan(2, 1, 4))
    assert "--nproc-per-node 3" in error.value.next_step


def test_a_wrong_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError, match="4 processes a node; the plan has 2 targets and 1 draft"):
        Place.from_environment(tiny_plan(2, 1, 4))


def test_a_lost_connection_is_told_from_a_fault_of_ones_own() -> None:
    assert lost_peer(RuntimeError("[pair.cc:537] Connection closed by peer [127.0.0.1]:1"))
    assert lost_peer(RuntimeError("Timed out waiting 30000ms for recv operation to complete"))
    assert lost_peer(RuntimeError("Application timeout caused pair closure"))
    assert not lost_peer(RuntimeError("CUDA out of memory"))
    assert not lost_peer(ValueError("Connection"))


# -- four processes -------------------------------------------------------------------------------


def train_rank(rank: int, port: int, out: Any) -> None:
    """Some steps without an anchor on one drafter, a comparison at each, a stop agreed on."""
    enter_rank(rank, 4, port)
    job, events = tiny_job(SLOTS, steps=50, empty=frozenset({(1, 1), (1, 3)}))
    executor = ProcessesExecutor(job, tiny_plan(2, 2, SLOTS, check_equal_every=1))
    executor.start()
    losses, telemetry = [], {}
    for index in range(50):
        result = executor.step(index)
        losses.append(Sums.read(result.sums).mean_loss)
        telemetry = result.telemetry or telemetry
        # One rank is asked to leave during step index 1; a target.
        received = signal.SIGTERM if rank == 1 and index >= 1 else None
        if executor.agreed_stop(received) is not None:
            break
    state = executor.state()
    weights = None
    if not executor.place.is_target:
        weights = fingerprint(executor.part.stage.weights())
    executor.close()
    out.put((rank, losses, bool(state), weights, telemetry, [e for e, _ in events.seen]))


def fail_rank(rank: int, port: int, out: Any) -> None:
    """The second drafter's stage raises in the second step."""
    enter_rank(rank, 4, port)

    def drafter(device: Any) -> Any:
        stage = make_drafter(device)
        if rank == 3:
            stage.update = broken  # type: ignore[method-assign]
        return stage

    def broken(step: int, sums: Any) -> Any:
        raise RuntimeError("the second drafter broke")

    job, _ = tiny_job(SLOTS, steps=50, drafter=drafter)
    executor = ProcessesExecutor(job, tiny_plan(2, 2, SLOTS, stall_limit_s=30))
    executor.start()
    train_until_it_fails(executor, rank, out)


def full_disk_rank(rank: int, port: int, out: Any) -> None:
    """The leading rank fails between two steps, where no executor looks."""
    enter_rank(rank, 4, port)
    job, _ = tiny_job(SLOTS, steps=50)
    executor = ProcessesExecutor(job, tiny_plan(2, 2, SLOTS))
    executor.start()
    try:
        try:
            for index in range(50):
                executor.step(index)
                if rank == 2 and index == 1:
                    raise ResourceError("the disk is full")
                executor.agreed_stop(None)
        finally:
            executor.close()
    except (ResourceError, PeerFailedError) as error:
        out.put((rank, type(error).__name__, str(error)))
        out.close()
        out.join_thread()
        os._exit(1)


@pytest.mark.slow
def test_two_and_two_train_as_threads_and_inline_do_and_stop_together() -> None:
    answers = run_ranks(train_rank)
    job, _ = tiny_job(SLOTS, empty=frozenset({(1, 1), (1, 3)}))
    reference = InlineExecutor(job, torch.device("cpu"))
    reference.start()
    expected = [Sums.read(reference.step(i).sums).mean_loss for i in range(STEPS)]
    threads = ThreadsExecutor(job, tiny_plan(2, 2, SLOTS))
    threads.start()
    threaded = [Sums.read(threads.step(i).sums).mean_loss for i in range(STEPS)]
    threads.close()

    # A target rank asked at step index 1, counted at the end of 2: all leave after 3.
    assert [len(losses) for _, losses, *_ in answers] == [4, 4, 4, 4]
    for _, losses, _, _, _, _ in answers[2:]:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert losses == pytest.approx(threaded, rel=1e-5)
    assert answers[2][3] == answers[3][3] is not None
    assert [has_state for _, _, has_state, *_ in answers] == [False, False, True, False]
    telemetry = answers[2][4]
    assert telemetry["target_capacity"] > 0 and telemetry["drafter_capacity"] > 0
    assert all(events == ["compiling", "compiled"] for *_, events in answers)


@pytest.mark.slow
def test_all_ranks_name_the_one_that_failed_first() -> None:
    answers = run_ranks(fail_rank)
    assert answers[3][1:] == ("RuntimeError", "the second drafter broke")
    for _, kind, text in answers[:3]:
        assert kind == "PeerFailedError"
        assert text.startswith("drafter 1 (rank 3) failed first: RuntimeError: the second drafter")
        assert "in broken" in text


@pytest.mark.slow
def test_a_failure_between_steps_is_told_to_all_and_waits_for_nobody() -> None:
    answers = run_ranks(full_disk_rank)
    assert answers[2][1:] == ("ResourceError", "the disk is full")
    for rank, kind, text in (answers[0], answers[1], answers[3]):
        assert kind == "PeerFailedError", rank
        assert text.startswith("drafter 0 (rank 2) failed first: ResourceError: the disk is full")
