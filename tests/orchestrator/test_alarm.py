"""Which samples make an alarm, and which do not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.alarm import Throughput, Watched, best_of, seconds_per_step, status_line, verdict
from orchestrator.errors import HostUnreachable
from orchestrator.run import RunSummary
from trainer.telemetry import StepLine


def kinds(throughput: Throughput, values: list[float]) -> list[str]:
    return [notice.kind for value in values for notice in throughput.feed(value)]


def summary(state: str = "training", **fields: Any) -> RunSummary:
    return RunSummary.model_validate({"run_id": "r1", "state": state, **fields})


def lines(values: list[float], start: int = 1) -> list[StepLine]:
    return [
        StepLine(time=1000.0 + 2 * i, step=start + i, steps=1000, loss=1.0, tokens_per_s=v)
        for i, v in enumerate(values)
    ]


def test_the_collapse_of_the_long_night_is_told_once_with_its_numbers() -> None:
    throughput = Throughput()
    told = [n for v in [20_000.0] * 20 + [4_600.0] * 50 for n in throughput.feed(v)]
    assert [n.text for n in told] == [
        "throughput is 4.6k tok/s, 77% below its recent best of 20.0k tok/s"
    ]


def test_it_is_over_when_half_of_the_fall_is_made_good() -> None:
    values = [100.0] * 10 + [60.0] * 10 + [80.0] * 10 + [90.0] * 10
    assert kinds(Throughput(), values) == ["slow", "recovered"]


def test_a_run_that_stays_slow_for_ever_has_not_recovered() -> None:
    assert kinds(Throughput(), [100.0] * 10 + [50.0] * 2000) == ["slow"]


@pytest.mark.parametrize("dip", [[0.0, 5.0], [40.0, 40.0], [1.0, 1.0]])
def test_a_checkpoint_or_one_recompile_is_no_collapse(dip: list[float]) -> None:
    assert kinds(Throughput(), ([100.0] * 20 + dip) * 10) == []


def test_noise_of_ten_percent_is_no_collapse() -> None:
    source = random.Random(1)
    assert kinds(Throughput(), [100 * source.gauss(1, 0.1) for _ in range(3000)]) == []


def test_a_slow_decline_is_told_when_it_reaches_the_limit() -> None:
    throughput = Throughput()
    values = [100.0 - 0.2 * i for i in range(300)]
    first = next(v for v in values if throughput.feed(v))
    assert 65 < first < 71


def test_a_run_slower_than_the_one_before_it_is_told_once() -> None:
    throughput = Throughput(predecessor=best_of(lines([100.0] * 50)))
    assert kinds(throughput, [60.0] * 100) == ["slower"]
    assert kinds(Throughput(predecessor=100.0), [95.0] * 100) == []


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_whatever_the_samples_are_alarms_and_recoveries_alternate(values: list[float]) -> None:
    told = kinds(Throughput(), values)
    assert told == ["slow", "recovered"] * (len(told) // 2) + ["slow"] * (len(told) % 2)


def test_each_change_of_state_is_told_once() -> None:
    watched = Watched()
    states = ["starting", "starting", "compiling", "training", "training", "finished"]
    told = [n.text for s in states for n in watched.feed(summary(s))]
    assert told == ["starting", "starting → compiling", "compiling → training", "finished"]
    assert watched.is_over and verdict([watched]) == 0


def test_a_failed_run_says_how_and_gives_exit_code_1() -> None:
    watched = Watched()
    (notice,) = watched.feed(summary("failed", exit_code=3, reason="cuda out of memory"))
    assert notice.text == "failed: exit code 3, cuda out of memory"
    assert verdict([watched, Watched(summary=summary("finished"))]) == 1


def test_unreachable_is_told_once_and_is_neither_failed_nor_over() -> None:
    watched = Watched()
    watched.feed(summary("training"))
    gone = HostUnreachable("no route to host", host="pve1")
    told = [n for _ in range(3) for n in watched.miss(gone)]
    assert [(n.kind, n.text) for n in told] == [
        ("unreachable", "no route to host; it was training")
    ]
    assert (watched.state, watched.is_over, verdict([watched])) == ("unreachable", False, 3)
    assert [n.text for n in watched.feed(summary("training"))] == ["it answers again: training"]


def test_a_stall_names_the_silence_its_phase_and_the_limit() -> None:
    watched = Watched()
    watched.feed(summary("compiling"))
    (notice,) = watched.feed(summary("stalled", idle_s=3700, phase="compiling", stall_after_s=3600))
    assert notice.is_alarm
    assert notice.text == (
        "stalled: no line for 1h01m (last: compiling); in this phase 1h00m is the limit"
    )


def test_a_restart_by_the_supervisor_is_told() -> None:
    watched = Watched()
    watched.feed(summary("training", attempt=1))
    assert [n.kind for n in watched.feed(summary("training", attempt=2))] == ["restarted"]


def test_the_same_step_line_seen_twice_is_one_sample() -> None:
    watched = Watched()
    for _ in range(100):
        watched.feed(summary("training", step=10, tokens_per_s=5.0, metrics_time=1.0))
    assert watched.throughput.now is None


def test_who_comes_late_hears_what_still_holds_and_nothing_older() -> None:
    fallen, recovered = Watched(), Watched()
    assert [n.kind for n in fallen.seed(lines([100.0] * 20 + [40.0] * 20))] == ["slow"]
    assert recovered.seed(lines([100.0] * 20 + [40.0] * 20 + [100.0] * 20)) == []


def test_the_eta_is_the_trainers_own_else_it_follows_from_the_pace() -> None:
    watched = Watched()
    watched.seed(lines([10.0] * 20))
    watched.feed(summary("training", step=20, steps=1000, tokens_per_s=10.0, metrics_time=1038.0))
    assert watched.eta_s == 2 * 980
    watched.feed(summary("training", step=21, steps=1000, eta_s=7.0, metrics_time=1040.0))
    assert watched.eta_s == 7.0
    # Validation and evaluation follow: no 0 s that stands for minutes.
    watched.feed(summary("training", step=1000, steps=1000, metrics_time=1050.0))
    assert watched.eta_s is None


def test_a_pause_hardly_changes_the_pace() -> None:
    marks = [(float(t), t) for t in range(10)] + [(1000.0 + t, 10 + t) for t in range(10)]
    assert seconds_per_step(marks) == 1.0
    assert seconds_per_step([(1.0, 1)]) is None


def test_the_status_line_says_what_is_known() -> None:
    watched = Watched()
    assert status_line(watched) == "no answer yet"
    watched.feed(summary("training", step=120, steps=400, tokens_per_s=15500.0, eta_s=200.0))
    assert status_line(watched) == "training · step 120/400 · 15.5k tok/s · eta 3m20s"
