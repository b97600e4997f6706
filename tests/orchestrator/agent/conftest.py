"""The real agent, started through the real loader, spoken to over real pipes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_peer import WAIT, Peer, furnish

from orchestrator.agent.process import Tree, alive

Start = Callable[..., Peer]


@pytest.fixture
def workdir(tmp_path: Path, warm_program: Path) -> Path:
    return furnish(tmp_path / "work", warm_program)


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A file system of its own, of a size such as ``1m``, in a folder; skips where none can be."""
    made: list[Path] = []

    def make(size: str) -> Path:
        folder = tmp_path / f"disk-{len(made)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("mounting a small file system needs root")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def agents(workdir: Path) -> Iterator[Start]:
    """Starts agents on the test's workdir; all are ended afterwards."""
    peers: list[Peer] = []

    def start(**options: Any) -> Peer:
        peer = Peer(options.pop("workdir", workdir), **options)
        peers.append(peer)
        return peer

    yield start
    for peer in peers:
        if peer.process.poll() is None:
            peer.process.kill()
        peer.close()


class Runs:
    """Starts runs through one agent and waits for what they come to; tmux has its own socket."""

    def __init__(self, start: Start, workdir: Path, sockets: Path) -> None:
        self.workdir = workdir
        self.sockets = sockets
        self.environment = {**os.environ, "TMUX_TMPDIR": str(sockets)}
        self._start = start
        self.agent = self.new_agent()
        self._count = 0

    def new_agent(self, **options: Any) -> Peer:
        return self._start(environment=self.environment, **options)

    def new_id(self) -> str:
        # Of this test process alone: a run's processes are found by its id wherever they went, so
        # that two tests at the same time with the same id would end each other's.
        self._count += 1
        return f"t{os.getpid()}x{self._count}-20260101-000000-{self._count:04x}"

    def start(self, *command: str, **fields: Any) -> dict[str, Any]:
        run_id = fields.pop("run_id", None) or self.new_id()
        fields.setdefault("name", run_id)
        # Several side by side, as nobody gets them without asking for it.
        fields.setdefault("force", True)
        return self.agent.call("run.start", run_id=run_id, command=list(command), **fields)

    def python(self, code: str, **fields: Any) -> dict[str, Any]:
        return self.start(sys.executable, "-S", "-c", code, **fields)

    def status(self, run: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return self.agent.call("run.status", run_id=run["run_id"], **fields)

    def wait(self, condition: Callable[[], Any], seconds: float = WAIT) -> Any:
        until = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < until, "it never happened"
            time.sleep(0.02)
        return found

    def ending(self, run: dict[str, Any]) -> dict[str, Any]:
        """exit.json, when it is there."""
        path = Path(run["run_dir"], "exit.json")
        self.wait(path.exists)
        return dict(json.loads(path.read_text()))

    def says(self, run: dict[str, Any], text: str) -> None:
        """Wait until the log has it."""
        self.wait(lambda: text in Path(run["log"]).read_text(errors="replace"))

    def tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", *arguments], env=self.environment, capture_output=True, text=True
        )
        return done.stdout + done.stderr


@pytest.fixture
def runs(agents: Start, workdir: Path) -> Iterator[Runs]:
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux")
    # Not below tmp_path: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="dfl") as sockets:
        made = Runs(agents, workdir, Path(sockets))
        yield made
        _end_all(workdir)
        made.tmux("kill-server")


def _end_all(workdir: Path) -> None:
    """Whatever a test left behind: its supervisors and their trees, by PID."""
    for path in workdir.glob("dflashctl/runs/*/supervisor.json"):
        record = json.loads(path.read_text())
        run_id = path.parent.name
        for member in Tree(run_id, record["pid"]).members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        if alive(record["pid"], record["start"]):
            os.kill(record["pid"], signal.SIGKILL)


@pytest.fixture
def agent(agents: Start) -> Peer:
    peer = agents()
    peer.hello()
    return peer
