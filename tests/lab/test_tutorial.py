"""The tutorial's commands do what it says. Training itself is `make demo`'s to test."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from laptop import ROOT, Cli

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

EXPECTED = {
    "Start the lab": {"inventory": 0},
    "Ask whether a launch would work": {"doctor": 0},
    "Watch it": {"tail": 0, "status": 0, "top": 0, "diag": 0},
    "The end": {"status": 0, "diag": 0},
    "Break something": {"launch": 0, "tail": 1, "diag": 1, "stop": 0, "ps": 0},
}
"""Exit code of each verb, by section; of `tail` and `diag` in the last after a run that fails."""

NOT_HERE = {
    "lab": "the user's own lab; test_lab_cli.py runs these verbs on another",
    "launch --host lab --ct 200 --code playbooks/demo": "trains for minutes: `make demo` does",
}
"""What its commands begin with, and why they are not run here."""


def commands(title: str) -> list[list[str]]:
    """The words after ``dflashctl`` of a section's blocks, in order."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    section = re.split(r"^## \d+\. ", text, flags=re.MULTILINE)
    body = next(part for part in section if part.startswith(title))
    lines = re.findall(r"^    dflashctl (.*)$", body, re.MULTILINE)
    return [
        shlex.split(line, comments=True)
        for line in lines
        if not any(line.startswith(words) for words in NOT_HERE)
    ]


def test_every_section_with_commands_is_run_by_a_test() -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## \d+\. (.*)$", text, re.MULTILINE)
    assert {t for t in titles if commands(t)} == {*EXPECTED, "Bring it home"}


def test_the_demos_launch_finds_its_folder_and_its_config(cli: Cli) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    dflashctl (launch .*playbooks/demo.*)$", text, re.MULTILINE)
    shown = cli(*shlex.split(line), "--dry-run", cwd=ROOT, code=0).stdout
    assert '"trainer", "train", "config.yaml"' in shown


@pytest.mark.parametrize("title", EXPECTED)
def test_each_command_of_a_section_ends_as_it_says(title: str, cli: Cli, tmp_path: Path) -> None:
    cli("launch", "lab-200", "--no-push", "--wait", "--", "echo", "done", cwd=tmp_path)
    shown = commands(title)
    assert {words[0] for words in shown} == set(EXPECTED[title])
    for words in shown:
        done = cli(*words, cwd=tmp_path, code=EXPECTED[title][words[0]])
        if words[0] == "tail" and title == "Break something":
            assert done.stdout.splitlines() == ["begin", "[dflashctl] failed, exit code 3"]


def test_pull_and_report_fetch_the_newest_run(cli: Cli, tmp_path: Path) -> None:
    run = cli("launch", "lab-200", "--no-push", "--wait", "--", "echo", "done", cwd=tmp_path)
    assert run.returncode == 0
    for words in commands("Bring it home"):
        cli(*words, cwd=tmp_path, code=0)
    assert (tmp_path / "out/demo/train.log").read_text() == "done\n"
    assert "<html" in (tmp_path / "demo.html").read_text()
