"""A run that somebody stopped is no fault, and the diagnosis says who did it and when."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.diag import Evidence, Report, diagnose

STEPS = "".join(f"step {i}/90 | loss {9 - i / 50} | 15.1k tok/s\n" for i in range(9))


def stopped(log: str, who: str, **record: Any) -> Report:
    stop = {"who": who, "time": 1_788_224_395.0, "grace_s": 60}
    record = {"exit_code": None, "signal": 2, "reason": "stopped", "stop": stop, **record}
    return diagnose(Evidence.from_text(log, {"run_state": "stopped", "exit_record": record}))


@pytest.mark.parametrize(
    "end",
    [
        {"signal": 2},
        {"signal": 9, "killed": [812]},
        {"signal": 15},
        {"signal": None, "exit_code": 0},
        {"signal": None, "exit_code": 1},
        {"signal": None, "exit_code": 130},
        {"signal": None, "exit_code": 143},
    ],
    ids=str,
)
def test_however_it_ended_it_is_healthy_and_says_who_and_when(end: dict[str, Any]) -> None:
    found = stopped(STEPS, "ben@vm", **end)

    assert found.healthy
    assert found.exit_code == 0
    assert [(f.code, f.severity) for f in found.findings] == [("run.interrupted", "info")]
    assert found.findings[0].title == "stopped by ben@vm at 2026-09-01 00:59:55 UTC"


def test_a_stop_hides_no_fault_that_came_before_it() -> None:
    log = STEPS + "step 9/90 | loss nan | 15.1k tok/s\n" * 4
    assert stopped(log, "ben@vm").findings[0].code == "loss.nan"


def test_a_signal_that_nobody_asked_for_is_a_warning() -> None:
    (finding,) = stopped(STEPS, "a signal").findings
    assert (finding.code, finding.severity) == ("run.interrupted", "warning")


def test_a_log_alone_still_names_the_interruption() -> None:
    found = diagnose(Evidence.from_text(STEPS + "^C\nKeyboardInterrupt\n"))
    assert (found.findings[0].code, found.exit_code) == ("run.interrupted", 1)
