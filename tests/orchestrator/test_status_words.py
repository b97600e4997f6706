"""What `status` prints of a run that somebody stopped, or that takes no step just now."""

from __future__ import annotations

import time
from typing import Any

import pytest

from orchestrator.cli.runs import _show
from orchestrator.inventory import ContainerSettings, Host
from orchestrator.run import RunRef, RunSummary
from orchestrator.target import HostTarget, Target

RUN = "train-20260901-080000-1b4c"


def shown(answer: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    host = HostTarget(name="pve1", settings=Host())
    target = Target(name="train-a", host=host, ct=200, settings=ContainerSettings())
    answer = {"run_id": RUN, **answer}
    _show(RunSummary.model_validate(answer), RunRef(target, RUN), answer)
    return capsys.readouterr().out


def test_who_stopped_it_and_when(capsys: pytest.CaptureFixture[str]) -> None:
    at = 1_788_224_395.0
    text = shown({"state": "stopped", "exit": {"stop": {"who": "ben@vm", "time": at}}}, capsys)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    assert f"stopped by   ben@vm at {when}\n" in text


def test_a_stop_without_a_time_or_a_name_is_no_reason_to_fail(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "stopped by   ben@vm\n" in shown(
        {"state": "stopped", "exit": {"stop": {"who": "ben@vm"}}}, capsys
    )
    assert "stopped by" not in shown({"state": "stopped", "exit": {"stop": None}}, capsys)


def test_a_run_that_ended_by_itself_was_stopped_by_nobody(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "stopped by" not in shown({"state": "finished", "exit": {"stop": None}}, capsys)


def test_a_command_is_shown_as_it_can_be_typed_again(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown({"state": "training", "command": ["bash", "-c", "echo a; exit 3"]}, capsys)
    assert "command      bash -c 'echo a; exit 3'\n" in text
    text = shown({"state": "training", "command": ["python", "-c", "import x\nx.go()"]}, capsys)
    assert f"command      python -c 'import x\n{'':13}x.go()'\n" in text


@pytest.mark.parametrize(("steps", "told"), [(400, "3/400"), (None, "3")])
def test_a_program_need_not_say_how_many_steps_there_are(
    steps: int | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"step         {told}\n" in shown(
        {"state": "training", "step": 3, "steps": steps}, capsys
    )


def test_a_run_that_evaluates_says_so_where_its_steps_are_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "phase        evaluating\n" in shown(
        {"state": "training", "phase": "evaluating"}, capsys
    )
    assert "phase" not in shown({"state": "training", "phase": "checkpoint"}, capsys)
    assert "phase" not in shown({"state": "failed", "phase": "evaluating"}, capsys)
