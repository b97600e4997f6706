"""A person's terminal on a run's tmux session, through a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest
from laptop import Cli

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]


class Terminal:
    """``dflashctl`` on a pseudo-terminal."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self.seen = b""
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(cli.home)
            environment = {**cli.environment, "TERM": "xterm-256color"}
            argv = [sys.executable, "-m", "orchestrator.cli", *words]
            os.execve(sys.executable, argv, environment)

    def until(self, words: bytes, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while words not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.descriptor], [], [], 0.5)[0]:
                try:
                    self.seen += os.read(self.descriptor, 65536)
                except OSError:
                    assert words in self.seen, self.seen
                    return

    def type(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def exit_code(self) -> int:
        while True:
            try:
                if not os.read(self.descriptor, 65536):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_the_session_is_seen_and_left_without_harm(cli: Cli, code: Path) -> None:
    words = ("launch", "lab-201", "--", "sh", "-c", "while :; do echo alive; sleep 0.5; done")
    run_id = cli.json(*words, cwd=code)["run_id"]
    terminal = Terminal(cli, "attach")
    terminal.until(b"alive")
    terminal.type(b"\x02d")
    terminal.until(b"detached")
    assert terminal.exit_code() == 0
    assert cli.json("status")["state"] == "training"
    assert cli("attach", "--dry-run", code=0).stdout.startswith("ssh -t ")
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
