"""Playbooks against real containers: steps, their failures, and going on from there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from laptop import Cli, new_name

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

FAKE = Path(__file__).with_name("fake_run.py")

BOOK = """
description: a whole life
variables: {steps: "20", word: hello, code: "0"}
steps:
  - preflight:
  - push:
  - exec: {command: [printf, "<%s>\\n", "{{word}}"]}
  - launch: {command: [python3, fake_run.py, "{{steps}}", "0.1", "99", "{{code}}"], name: book}
  - wait: {until: training, timeout_s: 60}
    name: trains
  - wait: {timeout_s: 60}
    name: ends
  - pull: {what: logs, to: out}
"""


@pytest.fixture
def code(code: Path) -> Path:
    shutil.copy(FAKE, code)
    (code / "book.yaml").write_text(BOOK)
    return code


def test_the_steps_run_in_order_and_the_logs_come_home(cli: Cli, code: Path) -> None:
    done = cli("play", "./book.yaml", "lab-201", cwd=code, code=0)
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["1/7", "preflight", "ok"],
        ["2/7", "push", "ok"],
        ["3/7", "exec", "ok"],
        ["4/7", "launch", "ok"],
        ["5/7", "trains", "ok"],
        ["6/7", "ends", "ok"],
        ["7/7", "pull", "ok"],
    ]
    # A wait may last for hours: what the run does meanwhile is told.
    assert re.search(r"^dflashctl: lab-201 book-\S+: training$", done.stderr, re.MULTILINE)
    (run,) = (code / "out").iterdir()
    assert "training" in (run / "train.log").read_text()
    assert not (run / "start.json").exists()


def test_a_hostile_value_reaches_the_command_as_one_word(cli: Cli, code: Path) -> None:
    hostile = "a b; touch /tmp/owned $(id) `id` '\" {{steps}} *"
    words = ("play", "./book.yaml", "lab-201", "--set", f"word={hostile}", "--set", "steps=1")
    done = cli(*words, cwd=code, code=0)
    assert f"<{hostile}>" in done.stderr


def test_the_first_failure_stops_it_and_names_the_command_that_goes_on(
    cli: Cli, code: Path
) -> None:
    broken, ready = code / "broken.yaml", new_name("/tmp/ready")
    broken.write_text(
        f"steps:\n  - push:\n  - exec: {{command: [test, -e, {ready}]}}\n"
        f"  - exec: {{command: [rm, {ready}]}}\n    name: clean\n"
    )
    done = cli("play", "./broken.yaml", "lab-201", cwd=code, code=1)
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["ok", "FAILED"]
    assert "test ended with exit code 1" in done.stderr
    again = done.stderr.split("go on from there: dflashctl ")[1].strip()
    assert again == "play ./broken.yaml lab-201 --start-at exec"
    cli("exec", "lab-201", "--", "touch", ready, code=0)
    done = cli(*shlex.split(again), cwd=code, code=0)
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["skipped", "ok", "ok"]


def test_a_run_that_fails_fails_its_wait_and_keeps_its_id_for_later(cli: Cli, code: Path) -> None:
    words = ("play", "./book.yaml", "lab-201", "--set", "code=3", "--set", "steps=1", "--json")
    done = cli(*words, cwd=code, code=1)
    *steps, end = [json.loads(line) for line in done.stdout.splitlines()]
    assert steps[-1]["state"] == "failed"
    assert "exit code 3" in end["message"]
    run_id = steps[3]["data"]["run_ids"][0]
    assert end["resume"][end["resume"].index("--run") + 1] == run_id


def test_check_reaches_nothing(cli: Cli, code: Path) -> None:
    cli.inventory.touch()
    done = cli("play", "./book.yaml", "nowhere", "--check", cwd=code, code=0)
    assert "command: python3 fake_run.py 20 0.1 99 0" in done.stdout


def test_launch_is_a_playbook_too(cli: Cli, lab: Lab, code: Path) -> None:
    (code / "start_training.sh").write_text("echo from the script\n")
    cli("play", "launch", "lab-201", "--set", "name=scripted", cwd=code, code=0)
    done = cli("watch", "--every", "0.2s", "--json", code=0)
    assert json.loads(done.stdout.splitlines()[-1])["run_id"].startswith("scripted-")
    assert "from the script" in cli("tail", "--no-follow", code=0).stdout


def test_the_same_environment_everywhere_is_asked_for_before_a_run_on_several(
    cli: Cli, code: Path
) -> None:
    book = code / "same.yaml"
    book.write_text("steps:\n  - env: {fail_on: breaks}\n")
    done = cli("play", "./same.yaml", "lab-200", "lab-201", cwd=code)
    assert done.returncode in {0, 4}
    assert "1/1 env" in done.stdout


RESUME = """
steps:
  - launch: {command: [sh, -c, "echo from $DFLASH_RESUME"], name: again, resume: true}
  - wait: {timeout_s: 60}
"""


@pytest.fixture
def resume(code: Path) -> str:
    """A playbook that goes on with the last run; as its path is given."""
    (code / "resume.yaml").write_text(RESUME)
    return "./resume.yaml"


def test_a_run_goes_on_from_the_newest_complete_checkpoint_of_the_last(
    cli: Cli, code: Path, resume: str
) -> None:
    make = "mkdir -p $DFLASH_RUN_DIR/checkpoints/step-3 $DFLASH_RUN_DIR/checkpoints/step-20.tmp"
    first = cli("launch", "lab-201", "--wait", "--", "sh", "-c", make, cwd=code, code=0)
    run_id = first.stdout.splitlines()[0]
    cli("play", resume, cwd=code, code=0)
    said = cli("tail", "--no-follow", code=0).stdout
    assert said == f"from /workspace/dflashctl/runs/{run_id}/checkpoints/step-3\n"


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(
    cli: Cli, code: Path, resume: str
) -> None:
    cli("launch", "lab-201", "--wait", "--", "true", cwd=code, code=0)
    done = cli("play", resume, cwd=code, code=5)
    assert "no complete checkpoint" in done.stderr


def test_behind_attempts_that_died_at_once_the_run_with_a_checkpoint_is_named(
    cli: Cli, code: Path, resume: str
) -> None:
    make = "mkdir -p $DFLASH_RUN_DIR/checkpoints/step-3"
    good = cli("launch", "lab-201", "--wait", "--", "sh", "-c", make, cwd=code, code=0)
    for _ in range(2):
        cli("launch", "lab-201", "--wait", "--", "false", cwd=code, code=1)
    done = cli("play", resume, cwd=code, code=5)
    assert f"--set run={good.stdout.split()[0]}" in done.stderr
