"""A run's state follows from its folder and from who lives; nothing stored can become untrue."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import process, status
from orchestrator.agent.program import boot_id
from orchestrator.agent.status import STALL_AT_LEAST_S, STALL_QUIET_S, summary
from orchestrator.paths import RunPaths
from trainer.telemetry import QUIET_EVENTS

NOW = time.time()
ME = {"pid": os.getpid(), "start": process.table()[os.getpid()].start, "boot_id": boot_id()}
DEAD = {"pid": os.getpid(), "start": 1, "boot_id": boot_id()}
STEP = {"step": 10, "steps": 400, "loss": 8.03, "tau": 1.1, "tokens_per_s": 15500.0, "eta_s": 60}


class Folder:
    """A run's folder, made by hand."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.paths = RunPaths(str(root))
        self.write("run.json", {"name": "n", "boot_id": boot_id(), "created": time.time()})

    def write(self, name: str, record: dict[str, Any]) -> None:
        Path(self.paths.root, name).write_text(json.dumps(record))

    def lines(self, name: str, *records: dict[str, Any], torn: str = "") -> None:
        text = "".join(json.dumps({"time": NOW, **record}) + "\n" for record in records)
        Path(self.paths.root, name).write_text(text + torn)

    def alive(self, **fields: Any) -> None:
        self.write("supervisor.json", {**ME, "attempt": 1, "child": None, **fields})

    def state(self, **options: Any) -> str:
        return str(summary(self.paths, lines=0, **options)["state"])

    def age(self, seconds: float) -> None:
        for path in Path(self.paths.root).iterdir():
            os.utime(path, (NOW - seconds, NOW - seconds))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    global NOW
    # A test may run many minutes after it was collected.
    NOW = time.time()
    return Folder(tmp_path / "r-1")


def test_a_new_folder_is_starting_then_it_never_started(folder: Folder) -> None:
    assert folder.state() == "starting"
    folder.write("run.json", {"boot_id": boot_id(), "created": NOW - 3600})
    found = summary(folder.paths, lines=0)
    assert (found["state"], found["reason"]) == ("failed", "it never started")


def test_a_command_without_telemetry_trains_once_it_has_spoken(folder: Folder) -> None:
    folder.alive()
    assert folder.state() == "starting"
    Path(folder.paths.log).write_text("hello\n")
    assert folder.state() == "training"


def test_events_and_steps_tell_compiling_from_training(folder: Folder) -> None:
    folder.alive()
    folder.lines("events.jsonl", {"event": "started"}, {"event": "compiling"})
    assert folder.state() == "compiling"
    folder.lines("events.jsonl", {"event": "compiling"}, {"event": "training"})
    assert folder.state() == "training"
    folder.lines("events.jsonl", {"event": "compiled", "time": NOW - 5})
    folder.lines("metrics.jsonl", STEP)
    assert folder.state() == "training"


@pytest.mark.parametrize("event", ["started", "data"])
def test_a_target_that_still_writes_its_data_is_not_compiling(folder: Folder, event: str) -> None:
    folder.alive()
    folder.lines("events.jsonl", {"event": event})
    assert folder.state() == "preparing"
    folder.age(STALL_AT_LEAST_S + 600)
    assert folder.state() == "preparing"
    folder.lines("events.jsonl", {"event": event}, {"event": "plan"})
    assert folder.state() == "compiling"


def test_a_restarted_run_compiles_again(folder: Folder) -> None:
    folder.alive(attempt=2, attempt_started=NOW - 10)
    folder.lines("metrics.jsonl", {**STEP, "time": NOW - 100})
    folder.lines("events.jsonl", {"event": "compiling", "time": NOW - 5})
    assert folder.state() == "compiling"


def test_the_summary_has_the_newest_numbers(folder: Folder) -> None:
    folder.alive()
    folder.lines("metrics.jsonl", {"step": 9}, STEP, torn='{"step": 11, "lo')
    found = summary(folder.paths, lines=0)
    assert {key: found[key] for key in STEP} == STEP


def test_numbers_that_are_none_are_left_out(folder: Folder) -> None:
    folder.alive()
    folder.lines("metrics.jsonl", {**STEP, "loss": float("nan"), "tau": "1.1", "step": 10.0})
    found = summary(folder.paths, lines=0)
    assert (found["loss"], found["tau"], found["step"]) == (None, None, 10)


def test_silence_is_a_stall_when_the_runs_own_steps_do_not_explain_it(folder: Folder) -> None:
    folder.alive()
    steps = [{"step": number, "time": NOW - 1000 + number} for number in range(10)]
    folder.lines("metrics.jsonl", *steps)
    folder.age(STALL_AT_LEAST_S + 60)
    assert folder.state() == "stalled"
    assert folder.state(stall_s=10_000) == "training"
    slow = [{"step": number, "time": NOW - 1000 + 100 * number} for number in range(10)]
    folder.lines("metrics.jsonl", *slow)
    folder.age(STALL_AT_LEAST_S + 60)
    assert folder.state() == "training"


def test_compiling_may_be_silent_for_long(folder: Folder) -> None:
    folder.alive()
    folder.lines("events.jsonl", {"event": "compiling"})
    folder.age(STALL_AT_LEAST_S + 600)
    assert folder.state() == "compiling"


@pytest.mark.parametrize("phase", sorted(QUIET_EVENTS))
def test_a_validation_may_be_silent_for_long_but_not_for_ever(folder: Folder, phase: str) -> None:
    folder.alive()
    steps = [{"step": number, "time": NOW - 9000 + number} for number in range(10)]
    folder.lines("metrics.jsonl", *steps)
    folder.lines("events.jsonl", {"event": "training"}, {"event": phase, "time": NOW - 8000})
    folder.age(STALL_QUIET_S - 60)
    assert folder.state() == "training"
    folder.age(STALL_QUIET_S + 60)
    assert folder.state() == "stalled"


def test_a_validation_that_took_an_hour_before_may_do_so_again(folder: Folder) -> None:
    folder.alive()
    folder.lines("metrics.jsonl", {"step": 1, "time": NOW - 9000})
    folder.lines(
        "events.jsonl",
        {"event": "validating", "time": NOW - 9000},
        {"event": "checkpoint", "time": NOW - 5400},
        {"event": "validating", "time": NOW - 4000},
    )
    folder.age(3700)
    assert folder.state() == "training"


def test_after_the_validation_silence_is_a_stall_again(folder: Folder) -> None:
    folder.alive()
    folder.lines("metrics.jsonl", {"step": 1, "time": NOW - 900})
    for end in ({"event": "checkpoint", "time": NOW - 700}, {"event": "training"}):
        folder.lines("events.jsonl", {"event": "validating", "time": NOW - 800}, end)
        folder.age(STALL_AT_LEAST_S + 60)
        assert folder.state() == "stalled"


def test_a_step_after_it_ends_the_quiet_phase_too(folder: Folder) -> None:
    folder.alive()
    folder.lines("events.jsonl", {"event": "validating", "time": NOW - 800})
    folder.lines("metrics.jsonl", {"step": 1, "time": NOW - 700})
    folder.age(STALL_AT_LEAST_S + 60)
    assert folder.state() == "stalled"


def test_the_agents_quiet_phases_are_the_trainers() -> None:
    assert status._QUIET == QUIET_EVENTS


@pytest.mark.parametrize("reason", ["finished", "failed", "stopped"])
def test_the_exit_record_has_the_last_word(folder: Folder, reason: str) -> None:
    folder.write("supervisor.json", {**DEAD, "child": None})
    folder.write("exit.json", {"reason": reason, "exit_code": 3, "signal": None, "ended": NOW})
    found = summary(folder.paths, lines=0)
    assert (found["state"], found["exit_code"], found["alive"]) == (reason, 3, False)


def test_a_supervisor_that_vanished_is_told(folder: Folder) -> None:
    folder.write("supervisor.json", {**DEAD, "child": None})
    found = summary(folder.paths, lines=0)
    assert (found["state"], found["alive"]) == ("failed", False)
    assert "killed" in found["reason"]


def test_a_pid_that_is_anothers_by_now_is_not_the_supervisor(folder: Folder) -> None:
    folder.alive(start=ME["start"] - 1)
    assert folder.state() == "failed"


def test_a_reboot_under_the_run_is_told(folder: Folder) -> None:
    folder.alive(boot_id="before")
    folder.write("run.json", {"boot_id": "before", "created": time.time()})
    found = summary(folder.paths, lines=0)
    assert (found["state"], found["rebooted"]) == ("failed", True)
    assert "rebooted" in found["reason"]


def test_a_stop_in_progress_is_told_beside_the_state(folder: Folder) -> None:
    folder.alive()
    folder.write("stop.json", {"who": "ann"})
    assert summary(folder.paths, lines=0)["stopping"]


def test_records_that_do_not_parse_do_not_hide_the_run(folder: Folder) -> None:
    for name in ("run.json", "supervisor.json", "exit.json", "heartbeat.json", "metrics.jsonl"):
        Path(folder.paths.root, name).write_bytes(b"\xff{ half")
    assert folder.state() in ("failed", "starting")


@pytest.mark.parametrize("wrong", ["x", 7, True, [], {}, {"pid": "x"}, None])
@pytest.mark.parametrize("name", ["run", "supervisor", "exit", "heartbeat"])
def test_records_of_other_types_cost_only_their_own_fields(
    folder: Folder, name: str, wrong: Any
) -> None:
    fields = ("name", "created", "boot_id", "command", "pid", "start", "child", "attempt", "time")
    fields += ("reason", "ended", "exit_code", "signal", "attempts", "lost_bytes", "started")
    folder.alive()
    folder.write(f"{name}.json", dict.fromkeys(fields, wrong))
    found = summary(folder.paths, lines=0)
    assert found["state"] in {"starting", "failed"}
    assert isinstance(found["created"], int | float | None)
    assert isinstance(found["attempts"], list | None)


def test_runs_are_listed_newest_first(runs: Any) -> None:
    made = [runs.start("true") for _ in range(3)]
    for run in made:
        runs.ending(run)
    live = runs.start("sleep", "60")
    found = [one["run_id"] for one in runs.agent.call("run.list")["runs"]]
    assert found == [live["run_id"], *(run["run_id"] for run in reversed(made))]
    only = runs.agent.call("run.list", live=True)["runs"]
    assert [one["run_id"] for one in only] == [live["run_id"]]
    assert len(runs.agent.call("run.list", limit=2)["runs"]) == 2
    assert runs.agent.call("run.status")["run_id"] == live["run_id"]


def test_one_that_lives_is_listed_however_many_newer_ones_have_ended(runs: Any) -> None:
    live = runs.start("sleep", "60")
    ended = [runs.start("true", force=True) for _ in range(2)]
    for run in ended:
        runs.ending(run)
    found = [one["run_id"] for one in runs.agent.call("run.list", limit=1)["runs"]]
    assert found == [ended[-1]["run_id"], live["run_id"]]
