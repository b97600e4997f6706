"""Trackers get what ``metrics.jsonl`` gets, and never cost a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.errors import ConfigError
from trainer.telemetry import EventLine, RunWriter, StepLine
from trainer.trackers import Guarded, check_trackers, make_trackers, numbers

LINE = StepLine(
    step=7, steps=9, loss=1.5, accuracy=[0.5, 0.25], tau=1.75, tokens=100, target_idle=0.25
)


def test_every_measure_has_a_name_and_none_is_made_up() -> None:
    found = dict(numbers(LINE))
    assert found["loss"] == 1.5
    assert (found["accuracy/1"], found["accuracy/2"]) == (0.5, 0.25)
    assert found["target_idle"] == 0.25
    assert not {"drafter_idle", "step", "steps", "time"} & found.keys()


def test_one_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="report_to names tensorboard, wandb") as error:
        check_trackers(["tensorboard", "wandb"])
    assert "pip install tensorboard wandb" in error.value.next_step


def test_one_that_fails_is_left_out_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        asked = 0

        def step(self, line: StepLine) -> None:
            self.asked += 1
            raise OSError("no space left")

        def event(self, line: EventLine) -> None:
            raise AssertionError("it was left out")

        close = event

    broken: Any = Broken()
    guarded = Guarded("wandb", broken)
    for _ in range(3):
        guarded.step(LINE)
    guarded.event(EventLine(event="finished"))
    guarded.close()
    assert broken.asked == 1
    said = capsys.readouterr().out
    assert said == "wandb is left out from here on: OSError: no space left\n"


def test_tensorboard_reads_the_same_numbers_and_hides_what_a_resume_repeats(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((1, 2, 3, 4), (3, 4, 5)):
        writer = RunWriter(tmp_path)
        writer.trackers += make_trackers(["tensorboard"], tmp_path, {})
        for step in steps:
            writer.step(LINE.model_copy(update={"step": step, "loss": step + len(steps)}))
        writer.event("evaluated", tau=2.5, prompts=3)
        writer.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    losses = {scalar.step: scalar.value for scalar in read.Scalars("loss")}
    assert losses == {1: 5, 2: 6, 3: 6, 4: 7, 5: 8}
    assert {s.value for s in read.Scalars("evaluation/tau")} == {2.5}
    assert read.Scalars("accuracy/2")[0].value == 0.25


def test_wandb_keeps_an_offline_run_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    (tracker,) = make_trackers(["wandb"], tmp_path, {"seed": 1})
    tracker.step(LINE)
    tracker.event(EventLine(event="evaluated", detail={"tau": 2.5}))
    tracker.close()
    assert list((tmp_path / "wandb").glob("offline-run-*"))
