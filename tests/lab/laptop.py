"""The laptop's side of the lab tests."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from warm_cli import MODULE, base_environment, dflashctl

from orchestrator.run import ENDED

ROOT = Path(__file__).parents[2]


class Cli:
    """``dflashctl`` as a user runs it: a process of its own, with a home of its own.

    What is called is forked from a process that has its imports; what is started, asked for bytes,
    given a terminal or more variables starts from nothing, and so does every verb that
    ``test_howto.py`` and ``test_tutorial.py`` run.
    """

    def __init__(self, home: Path, inventory: Path) -> None:
        self.home = home
        self.inventory = inventory
        self.extra: dict[str, str] = {}
        """More environment variables."""

    @classmethod
    def at_home(cls, home: Path, inventory: Path) -> Cli:
        """Of somebody new: ``home`` is made."""
        home.mkdir()
        return cls(home, inventory)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **base_environment(),
            "HOME": str(self.home),
            "DFLASHCTL_INVENTORY": str(self.inventory),
            **self.extra,
        }

    def start(self, *words: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, *map(str, words)],
            cwd=cwd or self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self, *words: str | Path, cwd: Path | None = None, code: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end; ``code`` is the exit code that must come out. No traceback, ever."""
        done = self._run([str(word) for word in words], cwd or self.home)
        out, err = done.stdout, done.stderr
        assert "Traceback" not in err, err
        assert code is None or done.returncode == code, f"exit {done.returncode}: {out}\n{err}"
        return done

    def _run(self, words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        if not self.extra:
            return dflashctl(words, cwd=cwd, variables=self.environment)
        process = self.start(*words, cwd=cwd)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def json(self, *words: str | Path, cwd: Path | None = None, code: int = 0) -> dict[str, Any]:
        """The one JSON object that a verb prints."""
        at = words.index("--") if "--" in words else len(words)
        done = self(*words[:at], "--json", *words[at:], cwd=cwd, code=code)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def run_ids(self, container: str) -> set[str]:
        """Of all its runs: tests before this one may have had theirs in the same lab."""
        return {run["run_id"] for run in self.json("ps", container, "--all")["runs"]}

    def end_runs(self, *, but: Collection[int] = ()) -> None:
        """Of all containers, ``but`` these; for after a test."""
        for run in self.json("ps")["runs"]:
            if run["ct"] not in but and run["state"] not in ENDED:
                place = ("--host", "lab", "--ct", str(run["ct"]))
                self("stop", run["run_id"], *place, "--grace", "1s")

    def raw(
        self, *words: str | Path, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run to the end; its output as bytes."""
        return subprocess.run(
            [sys.executable, "-m", MODULE, *map(str, words)],
            cwd=cwd or self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
            check=False,
        )


def new_name(name: str) -> str:
    """For a run or a file: nothing in the lab has it yet, also when a test is tried again."""
    return f"{name}-{time.monotonic_ns():x}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for what comes by itself, and what it is."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
    return found


def own_lines(text: str) -> list[str]:
    """The run's own, without the supervisor's."""
    return [line for line in text.splitlines() if not line.startswith("[dflashctl]")]


def tree(folder: Path) -> dict[str, tuple[str, int]]:
    """Path → content's hash (or link target) and executable bit, for everything below."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = (str(path.readlink()), 0)
        elif path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = (digest, path.stat().st_mode & 0o100)
        elif not any(path.iterdir()):
            found[name] = ("empty folder", 0)
    return found


class Terminal:
    """``dflashctl`` on a pseudo-terminal."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self.seen = b""
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(cli.home)
            environment = {**cli.environment, "TERM": "xterm-256color"}
            argv = [sys.executable, "-m", MODULE, *words]
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
        """Key by key: what comes within a millisecond tmux takes for pasted, its prefix too."""
        for key in keys:
            os.write(self.descriptor, bytes([key]))
            time.sleep(0.02)

    def exit_code(self) -> int:
        while True:
            try:
                piece = os.read(self.descriptor, 65536)
                self.seen += piece
                if not piece:
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
