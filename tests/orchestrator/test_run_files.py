"""Which earlier run the present one is measured by, asked of the real agent."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_peer import furnish
from test_channel import Pipes

from orchestrator.agent.loader import argv
from orchestrator.agent_bundle import bundle
from orchestrator.channel import AgentChannel
from orchestrator.run_files import EARLIER_RUNS, comparable, first_before

OURS = ["python", "-m", "trainer", "train", "config.yaml"]
THEIRS = ["python", "train.py"]


@pytest.fixture
def channel(tmp_path: Path, warm_program: Path) -> Iterator[AgentChannel]:
    workdir = furnish(tmp_path / "workdir", warm_program)
    (workdir / "dflashctl" / "runs").mkdir()
    pipes = Pipes(argv(sys.executable))
    with AgentChannel(pipes, bundle(), str(workdir), trusted=False, host="h", ct=1) as opened:
        yield opened


class Past:
    """Runs that have ended, each after the one before."""

    def __init__(self, folder: Path, channel: AgentChannel) -> None:
        self.folder, self.channel = folder, channel
        self.last: str | None = None

    def run(self, command: list[str], rate: float | None = 100.0, length: int = 3072) -> str:
        name = f"r-{len(list(self.folder.iterdir()))}"
        home = self.folder / name
        home.mkdir()
        config = {"target": {"model": "m"}, "data": {"sequence_length": length}}
        steps = [
            {"time": 1.0 + at, "step": at, "steps": 99, "loss": 8.0, "tokens_per_s": rate}
            for at in range(20)
        ]
        files = {
            "run.json": [{"command": command, "predecessor": self.last}],
            "exit.json": [{"reason": "finished", "exit_code": 0}],
            "events.jsonl": [{"time": 1.0, "event": "started", "detail": {"config": config}}],
            "metrics.jsonl": steps if rate else [],
        }
        for file, lines in files.items():
            (home / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.last = name
        return name

    def measure(self, of: str) -> tuple[str, list[str]] | None:
        status = self.channel.call("run.status", run_id=of, lines=0)
        events = (self.folder / of / "events.jsonl").read_text()
        found = comparable(self.channel, status, events)
        return (found.run_id, found.unlike) if found else None


@pytest.fixture
def past(tmp_path: Path, channel: AgentChannel) -> Past:
    return Past(tmp_path / "workdir" / "dflashctl" / "runs", channel)


def test_of_two_programs_in_turns_each_is_measured_by_its_own(past: Past) -> None:
    past.run(OURS)
    past.run(THEIRS, 670_000.0)
    ours = past.run(OURS)
    theirs = past.run(THEIRS)

    assert past.measure(ours) == ("r-0", [])
    assert past.measure(theirs) == ("r-1", [])


def test_another_program_alone_is_no_measure(past: Past) -> None:
    past.run(THEIRS, 670_000.0)
    assert past.measure(past.run(OURS)) is None


def test_attempts_that_died_at_once_are_passed_over(past: Past) -> None:
    good = past.run(OURS)
    past.run(OURS, None)
    past.run(OURS, None)
    assert past.measure(past.run(OURS)) == (good, [])


def test_the_same_work_farther_back_is_a_better_measure_than_other_work(past: Past) -> None:
    same = past.run(OURS)
    past.run(OURS, length=8192)
    assert past.measure(past.run(OURS)) == (same, [])


def test_where_there_is_only_other_work_it_says_so(past: Past) -> None:
    past.run(OURS, length=512)
    other = past.run(OURS)
    assert past.measure(past.run(OURS, length=8192)) == (
        other,
        ["data.sequence_length 3072 → 8192"],
    )


def test_it_looks_back_so_far_and_no_farther(past: Past) -> None:
    past.run(OURS)
    for _ in range(EARLIER_RUNS):
        past.run(THEIRS)
    assert past.measure(past.run(OURS)) is None


def test_a_run_that_was_removed_ends_the_search(past: Past) -> None:
    past.last = "r-gone"
    past.run(OURS, None)
    assert past.measure(past.run(OURS)) is None


def test_the_nearest_run_before_that_is_good(past: Past) -> None:
    _, good, bad, last = (past.run(OURS) for _ in range(4))

    assert first_before(past.channel, last, lambda _, run_id: run_id != bad) == good
    assert first_before(past.channel, last, lambda _, run_id: run_id == last) is None
    assert first_before(past.channel, "r-gone", lambda *_: True) is None
