"""The report page: what a run's lines become, and what a hostile container cannot do to it."""

from __future__ import annotations

import math
import re

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.report.page import RunRecord, charts, render
from orchestrator.report.plot import Chart, Mark, Series, draw, thin, ticks
from trainer.telemetry import EventLine, StepLine


def steps(count: int, **over: object) -> list[StepLine]:
    return [
        StepLine.model_validate(
            {"time": 1000.0 + i, "step": i + 1, "steps": count, "loss": 9.0 - i / count}
            | {"accuracy": [0.5, 0.3, 0.1], "tau": 1.5, "tokens_per_s": 15500.0}
            | over
        )
        for i in range(count)
    ]


def test_every_curve_of_the_design_is_drawn_from_the_step_lines() -> None:
    titles = [c.title for c in charts(steps(5), [])]
    assert titles == [
        "Loss",
        "Estimated acceptance length",
        "Accuracy",
        "Throughput",
        "Idle",
        "Queue",
        "Memory",
    ]
    accuracy = charts(steps(5), [])[2]
    assert [s.name for s in accuracy.series] == ["slot 1", "slot 2", "slot 3"]
    assert accuracy.series[2].points[0] == (1, 0.1)


def test_an_event_is_marked_at_the_last_step_done_when_it_happened() -> None:
    events = [
        EventLine(time=1002.5, event="recompile", detail={"name": "drafter"}),
        EventLine(time=1003.0, event="evaluated", detail={}),
    ]
    marks = charts(steps(10), events)[0].marks
    assert [(m.x, m.kind, m.text) for m in marks] == [(3, "compile", "recompile name drafter")]


def test_a_run_without_steps_says_so_instead_of_drawing_axes() -> None:
    there = "a (host h, container 1)"
    page = render(RunRecord({"run_id": "r1", "state": "starting"}, where=there))
    assert "<dt>where</dt><dd>a (host h, container 1)</dd>" in page
    assert "metrics.jsonl" in page and "nothing recorded" not in page
    assert "<svg" not in page


def test_a_loss_that_is_not_finite_breaks_the_curve_and_nothing_else() -> None:
    figure = draw(Chart("Loss", "", [Series("loss", [(1, 2.0), (2, None), (3, 1.0), (4, 1.5)])]))
    path = re.search(r'class="curve s0" d="([^"]+)"', figure)
    assert path and path[1].count("M") == 2


def test_text_from_the_container_is_never_markup() -> None:
    hostile = "<script>alert(1)</script>"
    page = render(
        RunRecord(
            {"run_id": hostile, "state": hostile, "host": hostile, "ct": 200},
            {"command": hostile, hostile: {"x": hostile}},
            steps(2),
            [EventLine(time=1001, event=hostile, detail={"d": hostile})],
            [{"code": hostile, "severity": '"><b>', "title": hostile, "remedy": hostile}],
            [hostile],
        )
    )
    assert "<script" not in page
    assert '"><b>' not in page


def test_the_page_asks_nothing_of_the_network() -> None:
    page = render(RunRecord({"run_id": "r"}, {}, steps(3)))
    assert not re.search(r"(src|href)=|url\(|@import", page)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_the_least_and_the_greatest_value(values: list[float]) -> None:
    points = [(float(i), v) for i, v in enumerate(values)]
    kept = thin(points)
    assert len(kept) <= 600
    assert {min(values), max(values)} <= {y for _, y in kept}
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_and_inside(low: float, spread: float) -> None:
    high = low + spread
    found = ticks(low, high)
    assert 1 <= len(found) <= 12
    slack = 1e-6 * max(abs(low), abs(high), spread)
    assert all(low - slack <= t <= high + slack and math.isfinite(t) for t in found)


def test_a_mark_outside_the_curve_is_left_out() -> None:
    figure = draw(Chart("t", "", [Series("s", [(1, 1.0), (2, 2.0)])], [Mark(9, "alarm", "late")]))
    assert "late" not in figure


FINDING = {
    "code": "compile.fx_race",
    "severity": "fatal",
    "title": "several threads traced at once",
    "evidence": [
        {"source": "log", "line": 88121, "text": "[drafter-1] RuntimeError: <FX>"},
        {"source": "stacks", "line": None, "text": "rank 3: get"},
    ],
    "remedy": "first do this\nthen <that>",
    "consequences": [{"code": "throughput.collapse", "title": "the rate fell to 4.6k tok/s"}],
}


def test_a_finding_shows_its_evidence_its_steps_and_what_followed() -> None:
    page = render(RunRecord({"run_id": "r", "state": "training"}, findings=[FINDING]))

    assert "log:88121  [drafter-1] RuntimeError: &lt;FX&gt;\nstacks  rank 3: get" in page
    assert "first do this\nthen &lt;that&gt;" in page
    assert "therefore <code>throughput.collapse</code> the rate fell to 4.6k tok/s" in page
    assert "<span>fatal</span>" in page


def test_a_failed_run_that_nobody_diagnosed_is_not_called_well() -> None:
    assert "Nothing is wrong" not in render(RunRecord({"run_id": "r", "state": "failed"}))
    assert "Nothing is wrong" in render(RunRecord({"run_id": "r", "state": "finished"}))


def test_an_events_details_are_for_reading() -> None:
    event = EventLine(
        time=1.0,
        event="checkpoint",
        detail={
            "path": "/workspace/dflashctl/runs/r-1/checkpoints/step-00001000",
            "tau": 1.7343062298612555,
            "best": True,
        },
    )

    page = render(RunRecord({"run_id": "r-1", "state": "training"}, events=[event]))

    assert "path checkpoints/step-00001000, tau 1.734, best yes" in page


def test_an_axis_has_more_than_one_number_on_it() -> None:
    assert ticks(1.2, 9.0) == [2, 4, 6, 8]
    assert ticks(0, 2.6) == [0, 1, 2]
