"""The laptop's side of one channel, as small as a test needs it; the agent is the real one."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.frames import Decoder, encode
from orchestrator.agent.loader import argv, header
from orchestrator.agent.protocol import MAGIC, PAYLOAD_LIMIT, RESYNC, WINDOW
from orchestrator.agent_bundle import bundle

WAIT = 30.0
"""Longer than anything here takes; only a fault meets it."""


def seeds(few: int, many: int) -> list[Any]:
    """``few`` for every run of the tests, ``many`` for the soak."""
    heavy = [pytest.param(seed, marks=pytest.mark.soak) for seed in range(few, many)]
    return [*range(few), *heavy]


def interpreters(*versions: str) -> list[Path]:
    """One of each version that this machine has, on the PATH or from pyenv."""
    found = []
    for version in versions:
        made = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
        named = shutil.which(f"python{version}")
        found += made[:1] or ([Path(named)] if named else [])
    return found


def compiled_program(folder: Path) -> Path:
    """A folder with the program, compiled: what a container has from its second use on."""
    assert Peer(folder).close() == 0
    return folder / "dflashctl" / "agent"


def furnish(workdir: Path, program: Path) -> Path:
    """``workdir``, made, with that program: an agent starts there in a quarter of the time."""
    (workdir / "dflashctl").mkdir(parents=True)
    (workdir / "dflashctl").chmod(0o700)
    shutil.copytree(program, workdir / "dflashctl" / "agent")
    return workdir


class Peer:
    """The laptop's side of one channel, as small as a test needs it."""

    def __init__(
        self,
        workdir: Path,
        *,
        send_program: bool | None = None,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        command: list[str] | None = None,
    ) -> None:
        """``command`` starts the loader somewhere else, by default it is ``python`` here."""
        self.workdir = workdir
        self.process = subprocess.Popen(
            command or argv(python),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
        )
        self.frames: dict[int, queue.Queue[tuple[dict[str, Any], bytes]]] = {}
        self.preamble = b""
        self.errors = b""
        self._next = 0
        self._acks: dict[int, int] = {}
        self._answered: set[int] = set()
        self._acknowledged = threading.Condition()
        self._lock = threading.Lock()
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        if send_program is None:
            there = workdir / "dflashctl" / "agent" / f"{bundle().digest}.pyz"
            send_program = not there.exists()
        self.introduce(send_program)

    def introduce(self, send_program: bool) -> None:
        program = bundle()
        data = program.data if send_program else b""
        self.write(header(program.digest, len(data), str(self.workdir)) + data)

    def resync(self) -> None:
        self.write(RESYNC)
        self.introduce(True)

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with self._lock:
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def _inbox(self, number: int) -> queue.Queue[tuple[dict[str, Any], bytes]]:
        return self.frames.setdefault(number, queue.Queue())

    def _read(self) -> None:
        assert self.process.stdout is not None
        stream = self.process.stdout.fileno()
        decoder = None
        while data := os.read(stream, 1 << 20):
            if decoder is None:
                self.preamble += data
                if MAGIC not in self.preamble:
                    continue
                self.preamble, data = self.preamble.split(MAGIC, 1)
                decoder = Decoder()
            for head, payload in decoder.feed(data):
                with self._acknowledged:
                    self._acks[head["id"]] = head.get("ack", self._acks.get(head["id"], 0))
                    if not head.get("more"):
                        self._answered.add(head["id"])
                    self._acknowledged.notify_all()
                self._inbox(head["id"]).put((head, payload))
        for inbox in list(self.frames.values()):
            inbox.put(({"eof": True}, b""))
        self._inbox(0).put(({"eof": True}, b""))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()

    def receive(self, number: int) -> tuple[dict[str, Any], bytes]:
        """The next frame for this id, acknowledgements left out."""
        while True:
            head, payload = self._inbox(number).get(timeout=WAIT)
            if "ack" not in head:
                return head, payload

    def hello(self) -> dict[str, Any]:
        return self.receive(0)[0]["hello"]

    def send(self, op: str, payload: bytes = b"", **fields: Any) -> int:
        self._next += 1
        self._inbox(self._next)
        self.write(encode({"id": self._next, "op": op, **fields}, payload))
        return self._next

    def stream(self, op: str, data: bytes, piece: int = PAYLOAD_LIMIT, **fields: Any) -> int:
        number = self.send(op, more=True, **fields)
        for start in range(0, len(data), piece):
            self._await_window(number, start + piece)
            self.write(encode({"id": number, "more": True}, data[start : start + piece]))
        self.write(encode({"id": number}))
        return number

    def _await_window(self, number: int, sent: int) -> None:
        with self._acknowledged:
            self._acknowledged.wait_for(
                lambda: self._acks.get(number, 0) + WINDOW >= sent or number in self._answered, WAIT
            )

    def cancel(self, number: int) -> None:
        self.write(encode({"id": number, "cancel": True}))

    def finish(self, number: int) -> tuple[dict[str, Any], list[tuple[dict[str, Any], bytes]]]:
        """The answer to a request and the frames before it."""
        frames = []
        while True:
            head, payload = self.receive(number)
            if "eof" in head:
                self.process.wait(WAIT)
                raise EOFError(f"the agent ended: {self.errors.decode()}")
            if not head.get("more"):
                return head, frames
            frames.append((head, payload))

    def result(self, number: int) -> dict[str, Any]:
        head, _ = self.finish(number)
        assert head["ok"], head["error"]
        return head["result"]

    def error(self, number: int) -> dict[str, Any]:
        head, _ = self.finish(number)
        assert not head["ok"], head
        return head["error"]

    def call(self, op: str, payload: bytes = b"", **fields: Any) -> dict[str, Any]:
        return self.result(self.send(op, payload, **fields))

    def close(self) -> int:
        """End of input; the agent's own exit code."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        code = self.process.wait(WAIT)
        for reader in self._readers:
            reader.join(WAIT)
        return code
