"""Curves of a program that is not ours: what the lines of its log become."""

from __future__ import annotations

import math
from typing import Any

import pytest

from orchestrator.logged_steps import as_lines, filled, parse
from orchestrator.report.page import RunRecord, log_charts, render
from orchestrator.run import RunSummary
from orchestrator.top import SEED_LINES, _with_log

PLAIN = "\n".join(f"step {n} loss {3 - n / 100} lr 3e-4 tok/s {10500 + n}" for n in range(1, 6))


def points(text: str) -> list[tuple[int | None, float | None]]:
    return [(step.step, step.loss) for step in parse(text)]


def test_a_rate_is_not_the_learning_rate_before_it() -> None:
    assert [s.tokens_per_s for s in parse(PLAIN)] == [10501, 10502, 10503, 10504, 10505]
    assert [s.tokens_per_s for s in parse("step 1 loss 2.0 lr 0.0003 tok/s 9000")] == [9000]
    assert [s.tokens_per_s for s in parse("step 1 loss 2.0 lr 0.0003 12.5k tok/s")] == [12500]


def test_each_drawing_of_a_progress_bar_is_a_step() -> None:
    bar = "\r".join(f" {n}%|█| {n}/100 [00:1{n}<01:30,  4.99it/s, loss={4 - n}]" for n in (1, 2, 3))
    assert points(bar) == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert parse(bar)[0].total == 100


def test_a_dictionary_without_a_number_has_the_bars_before_it() -> None:
    """As transformers' Trainer prints them, whose version 5 writes numbers in quotes."""
    text = (
        "\r 10%|█ | 50/500 [00:10<01:30,  5.0it/s]\r{'loss': 2.5, 'grad_norm': 1.5, 'epoch': 0.1}\n"
        "\r 20%|██| 100/500 [00:20<01:20,  5.0it/s]\r{'loss': '2.25', 'epoch': '0.2'}\n"
        "{'eval_loss': 9.0, 'epoch': 0.2}\n"
        "{'train_runtime': 99.0, 'train_loss': 7.0, 'epoch': 1.0}\n"
    )
    assert points(text) == [(50, 2.5), (100, 2.25)]
    assert parse(text)[0].gradient == 1.5


def test_without_any_number_lines_are_counted() -> None:
    assert points("{'loss': 3.0, 'epoch': 0.1}\n{'loss': 2.0, 'epoch': 0.2}") == [
        (1, 3.0),
        (2, 2.0),
    ]


def test_two_lines_of_one_step_are_one() -> None:
    (step,) = parse("step 7 loss 2.5\nstep 7 12.0k tok/s\n")
    assert (step.loss, step.tokens_per_s) == (2.5, 12000)


def test_of_two_rates_of_a_step_the_first_is_the_runs() -> None:
    text = "".join(f"step {n} 121.6k tok/s\nstep {n} (gpu 0) 15.2k tok/s\n" for n in (1, 2))
    assert [step.tokens_per_s for step in parse(text)] == [121_600, 121_600]


def test_of_several_ranks_one_is_drawn() -> None:
    text = "\n".join(f"[rank{r}]: step {n} loss {n + r}" for n in (1, 2, 3) for r in (0, 1))
    assert points(text) == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize(
    "text",
    ["", "Downloading: 10%|█| 50/500 [00:10<01:30, 4.99MB/s]", "the loss is weighted", "epoch 3"],
)
def test_a_log_that_tells_no_step_gives_none(text: str) -> None:
    assert parse(text) == []


def test_the_page_draws_what_the_log_tells_and_says_so() -> None:
    page = render(RunRecord({"run_id": "r", "state": "training"}, logged=parse(PLAIN)))
    assert page.count("<svg") == 2 and "nothing recorded" not in page
    assert "Drawn from the log" in page and "<dt>loss</dt><dd>2.9500</dd>" in page
    assert [c.title for c in log_charts(parse(PLAIN))] == ["Loss", "Throughput"]


def test_a_loss_that_is_not_finite_breaks_the_curve_only() -> None:
    steps = parse("step 1 loss 2.0\nstep 2 loss nan\nstep 3 loss 1.0")
    assert math.isnan(steps[1].loss or 0.0)
    assert [line.loss for line in as_lines(steps)] == [2.0, None, 1.0]
    assert "<svg" in render(RunRecord({"run_id": "r"}, logged=steps))


def test_what_the_agent_knows_stands() -> None:
    ours = RunSummary(run_id="r", state="training", step=3, steps=9)
    assert filled(ours, parse(PLAIN)) is ours
    theirs = filled(RunSummary(run_id="r", state="training"), parse(PLAIN))
    assert (theirs.step, theirs.steps, theirs.tokens_per_s) == (5, None, 10505)


class Channel:
    """Answers `tail` with a log."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def request(self, kind: str, **fields: Any) -> Channel:
        self.asked.append({"kind": kind, **fields})
        return self

    def frames(self) -> list[tuple[dict[str, Any], bytes]]:
        return [({}, PLAIN.encode())]


def test_the_dashboard_asks_for_the_log_of_such_a_run_alone() -> None:
    channel: Any = Channel()
    past: dict[str, Any] = {"theirs": []}
    shown = _with_log(channel, RunSummary(run_id="theirs", state="training"), past)
    assert [line.tokens_per_s for line in past["theirs"]] == [10501, 10502, 10503, 10504, 10505]
    assert shown.step == 5
    (asked,) = channel.asked
    assert (asked["kind"], asked["files"], asked["lines"]) == ("tail", ["train.log"], SEED_LINES)
    for run in (
        RunSummary(run_id="ours", state="training", step=1),
        RunSummary(run_id="over", state="finished"),
    ):
        assert _with_log(channel, run, {}) is run
    assert len(channel.asked) == 1
