"""A person's terminal on a run's tmux session, through a real pseudo-terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from laptop import Cli, Terminal
from test_audit import audited

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]


def test_the_session_is_seen_and_left_without_harm_and_the_host_knows_by_whom(
    cli: Cli, lab: Lab, code: Path
) -> None:
    words = ("launch", "lab-201", "--", "sh", "-c", "while :; do echo alive; sleep 0.5; done")
    run_id = cli.json(*words, cwd=code)["run_id"]
    terminal = Terminal(cli, "attach")
    terminal.until(b"alive")
    terminal.type(b"\x02d")
    terminal.until(b"detached")
    assert terminal.exit_code() == 0
    assert cli.json("status")["state"] == "training"
    assert cli("attach", "--dry-run", code=0).stdout.startswith("ssh -t ")
    launched, attached = [line for line in audited(lab) if line.get("run_id") == run_id]
    assert {**launched, **attached} == {**attached, "action": "attach", "result": "ok"}
    cli("stop", run_id, code=0)


def test_without_a_terminal_it_says_so(cli: Cli, code: Path) -> None:
    assert "attach needs a terminal" in cli("attach", code=2).stderr


def test_a_session_that_is_gone_points_to_the_log(cli: Cli, code: Path) -> None:
    run_id = cli("launch", "lab-201", "--wait", "--", "true", cwd=code, code=0).stdout.split()[0]
    done = cli("attach", "--dry-run", run_id)
    assert "Traceback" not in done.stderr
    assert done.returncode in {0, 4}
    if done.returncode == 4:
        assert f"dflashctl tail {run_id}" in done.stderr


def test_a_terminal_that_the_container_does_not_know_gets_one_that_it_does(
    cli: Cli, code: Path
) -> None:
    cli("launch", "lab-201", "--", "sleep", "60", cwd=code, code=0)
    cli.extra["TERM"] = "xterm-nobodys"
    done = cli("attach", "--dry-run", code=0)
    assert "TERM=xterm-256color" in done.stdout
    assert "knows no terminal 'xterm-nobodys': attached as xterm-256color" in done.stderr
    cli.extra["TERM"] = "xterm-256color"
    assert cli("attach", "--dry-run", code=0).stderr == ""
