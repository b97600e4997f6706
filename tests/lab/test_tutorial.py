"""The tutorial's commands do what it says. Training itself is `make demo`'s to test."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from laptop import ROOT, Cli

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

EXPECTED = {
    "Ask whether a launch would work": {"doctor": 0},
    "Break something": {"launch": 0, "tail": 1, "diag": 1, "stop": 0, "ps": 0},
}
"""Exit code of each verb, by section; of `tail` and `diag` after a run that fails."""


def commands(title: str) -> list[list[str]]:
    """The words after ``dflashctl`` of a section's blocks, in order."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    section = re.split(r"^## \d+\. ", text, flags=re.MULTILINE)
    body = next(part for part in section if part.startswith(title))
    lines = re.findall(r"^    dflashctl (.*)$", body, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("title", EXPECTED)
def test_each_command_of_a_section_ends_as_it_says(title: str, cli: Cli, tmp_path: Path) -> None:
    shown = commands(title)
    assert {words[0] for words in shown} == set(EXPECTED[title])
    for words in shown:
        done = cli(*words, cwd=tmp_path, code=EXPECTED[title][words[0]])
        if words[0] == "tail":
            assert done.stdout.splitlines() == ["begin", "[dflashctl] failed, exit code 3"]


def test_pull_and_report_fetch_the_newest_run(cli: Cli, tmp_path: Path) -> None:
    run = cli("launch", "lab-200", "--no-push", "--wait", "--", "echo", "done", cwd=tmp_path)
    assert run.returncode == 0
    for words in commands("Bring it home"):
        cli(*words, cwd=tmp_path, code=0)
    assert (tmp_path / "out/demo/train.log").read_text() == "done\n"
    assert "<html" in (tmp_path / "demo.html").read_text()
