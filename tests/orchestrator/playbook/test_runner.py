"""Steps run in order, one line each, and the first failure says how to go on."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from orchestrator.errors import NotFoundError, RefusedError
from orchestrator.playbook.actions import Exec
from orchestrator.playbook.book import BoundStep, parse
from orchestrator.playbook.runner import Done, describe, resume_argv, run, start_index

BOOK = parse(
    """
steps:
  - preflight
  - exec: {command: [a, "b c"], cwd: /x}
  - launch: {push: false}
  - wait: {until: training}
""",
    "book",
).bind()


def actions(done: list[str], broken: str | None = None) -> dict[str, Any]:
    def perform(kind: str) -> Any:
        def function(action: object) -> Done:
            if kind == broken:
                raise RefusedError("GPU 0 is leased", next_step="wait", host="pve", ct=200)
            done.append(kind)
            return Done(f"did {kind}", {"kind": kind})

        return function

    return {step.kind: perform(step.kind) for step in BOOK}


def test_every_step_runs_once_in_order() -> None:
    done: list[str] = []
    results = list(run(BOOK, actions(done)))
    assert done == ["preflight", "exec", "launch", "wait"]
    assert [r.line(9) for r in results] == [
        "1/4 preflight  ok         0s  did preflight",
        "2/4 exec       ok         0s  did exec",
        "3/4 launch     ok         0s  did launch",
        "4/4 wait       ok         0s  did wait",
    ]
    assert results[1].as_dict()["data"] == {"kind": "exec"}


def test_the_first_failure_ends_the_play_with_that_steps_error() -> None:
    done: list[str] = []
    results = list(run(BOOK, actions(done, broken="launch")))
    assert done == ["preflight", "exec"]
    assert [r.as_dict()["state"] for r in results] == ["ok", "ok", "failed"]
    assert results[-1].line(9) == "3/4 launch     FAILED     0s"
    assert results[-1].as_dict()["error"]["next"] == "wait"


def test_a_fault_of_our_own_is_not_taken_for_a_failed_step() -> None:
    def broken(action: object) -> Done:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(run(BOOK, {"preflight": broken}))


@pytest.mark.parametrize(("start", "ran"), [("launch", 2), ("3", 2), (None, 4), ("wait", 1)])
def test_a_play_can_start_at_a_step_by_name_or_number(start: str | None, ran: int) -> None:
    done: list[str] = []
    results = list(run(BOOK, actions(done), start_index(BOOK, start)))
    assert len(done) == ran
    assert [r.skipped for r in results].count(True) == 4 - ran


def test_an_unknown_step_is_told_with_the_nearest() -> None:
    for wrong in ("lunch", "5", "0"):
        with pytest.raises(NotFoundError):
            start_index(BOOK, wrong)


def test_the_command_that_goes_on_keeps_target_values_and_run() -> None:
    hostile = "name=a b'; rm -rf /"
    argv = resume_argv("launch", "wait", ["lab-200"], [hostile], "run-20260101-000000-abcd")
    assert shlex.split(shlex.join(argv)) == [
        *("dflashctl", "play", "launch", "lab-200", "--set", hostile),
        *("--run", "run-20260101-000000-abcd", "--start-at", "wait"),
    ]


def test_check_shows_each_parameter_that_was_given() -> None:
    assert [describe(step) for step in BOOK] == [
        [],
        ["command: a 'b c'", "cwd: /x"],
        ["push: no"],
        ["until: training"],
    ]
    assert BoundStep("x", Exec(command=["y"])).kind == "exec"
