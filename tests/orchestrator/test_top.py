"""The dashboard's frame at several widths, and what becomes of the containers' answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.alarm import Watched
from orchestrator.errors import ContainerNotRunning, DflashctlError, HostUnreachable, RefusedError
from orchestrator.run import RunSummary
from orchestrator.terminal_text import fit_name
from orchestrator.top import Alarm, Row, column_widths, frame, sparkline, state_text

RUN = "nightly-20260101-120000-ab12"


def row(run_id: str = RUN, where: str = "lab-200", **fields: Any) -> Row:
    watched = Watched()
    watched.feed(RunSummary.model_validate({"run_id": run_id, "state": "training", **fields}))
    return Row(where, watched, run_id)


FULL = {"step": 1200, "steps": 40000, "tokens_per_s": 15500.0, "eta_s": 7200.0}


def texts(rows: list[Row], width: int = 80, alarms: list[Alarm] | None = None) -> list[str]:
    return [line.text for line in frame(rows, alarms or [], width, "12:00:00")]


def test_at_80_columns_everything_is_on_one_line() -> None:
    one = row(**FULL)
    one.rates, one.gpu = [10.0, 20.0, 30.0, 40.0], 97.0
    assert texts([one]) == [
        "dflashctl top  12:00:00  1 training",
        "",
        "RUN                  WHERE      STATE     STEP        TOK/S          ETA    GPU",
        "nightly-2…20000-ab12 lab-200    training  1200/40000  15.5k  ▂▄▆▇    2h00m  97%",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    rows = [row(RUN + "-" * 60, "a-very-long-container-name" * 3, **FULL) for _ in range(3)]
    for one in rows:
        one.rates = [1.0] * 500
    lines = texts(rows, width, [Alarm("12:00:00", RUN + "-" * 60, "x" * 300)])
    assert max(len(line) for line in lines) <= max(width, 72)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (HostUnreachable("no answer"), "unreachable"),
        (ContainerNotRunning("it is stopped"), "not running"),
        # As `ps` calls it: it was reached, and lacks what would answer.
        (RefusedError("the container has no /opt/venv/bin/python"), "unknown"),
    ],
)
def test_why_a_container_is_silent(error: DflashctlError, word: str) -> None:
    silent = Row("a")
    silent.watched.miss(error)
    assert state_text(silent) == word


def test_at_120_columns_a_run_id_is_whole() -> None:
    assert RUN in texts([row(**FULL)], 120)[3]


def test_live_runs_come_first_and_containers_without_runs_last() -> None:
    ended = row("old-20260101-000000-0000", where="a")
    ended.watched.feed(RunSummary(run_id="old-20260101-000000-0000", state="failed"))
    idle = Row("a")
    lines = texts([idle, ended, row(where="z")])
    assert [line.split()[1] for line in lines[3:]] == ["z", "a", "a"]
    assert "idle" in lines[-1]


def test_a_container_that_does_not_answer_is_unreachable_not_idle() -> None:
    silent = Row("lab-201")
    silent.watched.miss(HostUnreachable("no route"))
    assert texts([silent])[3].split() == ["-", "lab-201", "no", "answer"]


def test_without_runs_it_says_so() -> None:
    assert texts([])[0] == "dflashctl top  12:00:00  no runs"


def test_alarms_stand_below_the_newest_last() -> None:
    lines = texts([row()], alarms=[Alarm("12:00:00", RUN, f"alarm {n}") for n in range(20)])
    assert lines[-1].endswith("-ab12: alarm 19")
    assert not any(line.endswith("alarm 11") for line in lines)


def test_a_long_name_leaves_an_alarm_its_words() -> None:
    name = "n" * 40 + "-20261130-024037-5557"
    (*_, line) = texts([row()], alarms=[Alarm("12:00:00", name, "throughput is 4.6k tok/s")])
    assert line.endswith("-5557: throughput is 4.6k tok/s") and len(line) <= 80


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([], ""),
        ([0.0, 0.0], ""),
        ([1.0, 2.0, 4.0, 8.0], "▁▂▄▇"),
        ([8.0] * 50 + [2.0] * 10, "▂" * 10),
    ],
)
def test_a_sparkline_starts_at_zero(values: list[float], drawn: str) -> None:
    assert sparkline(values, 10) == drawn


@given(st.lists(st.floats(allow_nan=True, allow_infinity=False)), st.integers(1, 40))
def test_any_values_make_a_sparkline_of_at_most_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= width


@given(st.integers(80, 400))
def test_columns_fill_the_width_and_never_more(width: int) -> None:
    widths = column_widths(width)
    assert width - 12 <= sum(widths) + len(widths) - 1 <= max(width, 72)


def test_a_shortened_run_id_keeps_its_end() -> None:
    assert fit_name(RUN, 20).endswith("-ab12")
    assert len(fit_name(RUN, 20)) == 20


def test_a_state_is_readable_at_80_columns() -> None:
    watched = Watched()
    watched.miss(HostUnreachable("pve9 does not answer", host="pve9", next_step=""))

    assert "no answer" in texts([Row("pve9/300", watched)])[3]
    assert "unreachable" in texts([Row("pve9/300", watched)], 120)[3]
