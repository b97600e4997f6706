"""What the meters of both sides say together."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from trainer.pipeline.gauge import Gauge, Usage

pytestmark = pytest.mark.torch


def read(targets: Usage, drafters: Usage) -> dict[str, float]:
    gauge = Gauge(microbatches=4)
    gauge.read(0, 1.0, Usage(targets.workers), Usage(drafters.workers))
    return gauge.read(1000, 1.0, targets, drafters)


def test_idle_shares_and_capacities() -> None:
    found = read(Usage(2, busy_s=2.0, idle_s=2.0), Usage(1, busy_s=4.0))
    assert (found["target_idle"], found["drafter_idle"]) == (0.5, 0.0)
    # 1000 tokens in 2 s of work by two; in 4 s by one.
    assert (found["target_capacity"], found["drafter_capacity"]) == (1000.0, 250.0)
    # Four microbatches in one step.
    assert (found["target_ms"], found["drafter_ms"]) == (500.0, 1000.0)


@pytest.mark.parametrize(
    ("targets", "drafters", "split"),
    [
        (Usage(4, busy_s=3.0), Usage(4, busy_s=5.0), (3, 5)),
        (Usage(4, busy_s=5.0), Usage(4, busy_s=3.0), (5, 3)),
        (Usage(1, busy_s=1.0), Usage(1, busy_s=9.0), (1, 1)),
        (Usage(1, busy_s=1.0), Usage(7, busy_s=30.0), (1, 7)),
    ],
)
def test_the_split_that_the_measures_ask_for(
    targets: Usage, drafters: Usage, split: tuple[int, int]
) -> None:
    found = read(targets, drafters)
    assert (found["recommended_targets"], found["recommended_drafters"]) == split


def test_copies_are_told_where_they_are_measured() -> None:
    gauge = Gauge(microbatches=1)
    nothing = Usage(1)
    assert gauge.read(0, 1.0, nothing, nothing, transfer_s=1.0) == {}
    assert gauge.read(9, 1.0, nothing, nothing, transfer_s=1.5)["transfer_s"] == 0.5
    assert "transfer_s" not in read(Usage(1, busy_s=1.0), Usage(1, busy_s=1.0))


def test_memory_is_told_where_devices_have_their_own() -> None:
    found = read(Usage(2, 1.0, 0.0, memory_gb=30.0), Usage(1, 1.0, 0.0, memory_gb=40.0))
    assert (found["target_memory_gb"], found["drafter_memory_gb"]) == (15.0, 40.0)
    assert "target_memory_gb" not in read(Usage(2, 1.0), Usage(1, 1.0))


def test_nothing_is_recommended_before_both_sides_have_worked() -> None:
    assert "recommended_targets" not in read(Usage(1, busy_s=1.0), Usage(1))
