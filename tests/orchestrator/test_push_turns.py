"""How often a push waits for the far side, counted on the wire of a real agent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import release as releases
from orchestrator import snapshot
from orchestrator.agent import loader
from orchestrator.agent_bundle import bundle
from orchestrator.channel import AgentChannel
from orchestrator.paths import LaptopPaths
from orchestrator.push import Arrivals, Push
from orchestrator.release import Release

SLOW_S = 0.1
"""An answer is handed over when nothing has been sent for so long, as by a link of long delay: so
whatever can be sent without it has been sent."""


class SlowLink:
    """An agent's pipes; ``turns`` counts what was sent only after something was heard."""

    def __init__(self, workdir: Path) -> None:
        self.process = subprocess.Popen(
            loader.argv(sys.executable),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self.turns = 0
        self._heard = True
        self._sent = time.monotonic()

    def send(self, data: bytes | memoryview) -> None:
        self.turns += self._heard
        self._heard = False
        self._sent = time.monotonic()
        assert self.process.stdin
        view = memoryview(data)
        while view:
            view = view[self.process.stdin.write(view) :]

    def receive(self) -> bytes:
        assert self.process.stdout
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        while (left := self._sent + SLOW_S - time.monotonic()) > 0:
            time.sleep(left)
        self._heard = True
        return data

    def receive_error(self) -> bytes:
        assert self.process.stderr
        return os.read(self.process.stderr.fileno(), 1 << 16)

    def finish_input(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()

    def status(self, timeout: float) -> int | None:
        return self.process.wait(timeout)

    def close(self) -> None:
        self.process.wait()


class Far:
    def __init__(self, folder: Path) -> None:
        self.code = folder / "code"
        self.code.mkdir()
        self.workdir = folder / "far"
        self.workdir.mkdir()
        self.laptop = LaptopPaths({"HOME": str(folder)})

    def release(self) -> Release:
        return releases.build(snapshot.find_root(self.code, self.code), self.laptop)

    def push(self, trusted: bool = True) -> int:
        """The round trips."""
        link = SlowLink(self.workdir)
        with AgentChannel(
            link, bundle(), str(self.workdir), trusted=trusted, host="h", ct=1
        ) as channel:
            blobs, commit = Push(channel, self.release(), Arrivals(None)).send()
            for request in [*blobs, commit]:
                request.result()
            return link.turns


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    far = Far(tmp_path)
    for number in range(20):
        (far.code / f"file{number}").write_bytes(os.urandom(50_000))
    far.push(trusted=False)
    yield far


def test_one_changed_file_takes_two_round_trips(far: Far) -> None:
    (far.code / "file3").write_bytes(os.urandom(50_000))
    assert far.push() == 2


def test_nothing_changed_takes_no_more(far: Far) -> None:
    assert far.push() <= 2
