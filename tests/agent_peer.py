"""The laptop's side of one channel, as small as a test needs it; the agent is the real one.

Where its program lies already it is forked from a bare interpreter (``fork_server.py``); that it
starts from nothing too is shown by ``test_agent_loader.py``, ``test_channel.py`` and the lab.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fork_server import Forked, ForkServer

from orchestrator.agent.frames import Decoder, encode
from orchestrator.agent.loader import LOADER, argv, header
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


LOCALE = ("LC_ALL", "LC_CTYPE", "LANG")
"""An interpreter reads them as it begins."""


@cache
def _server() -> ForkServer:
    """Has imported what every agent takes from the standard library."""
    flags = argv()[1:-2]
    return ForkServer("import fcntl, json, pwd, re, threading, typing", os.environ, *flags)


def fork_agent(variables: Mapping[str, str], stdin: int, stdout: int, stderr: int) -> Forked:
    """What ``argv(sys.executable)`` starts."""
    return _server().start(
        "-c",
        [LOADER],
        cwd=Path("/"),
        variables=variables,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )


class ProcessLink:
    """A process as the link of an ``AgentChannel``.

    Its input is a socket: a channel sends from several threads, and a pipe that one of them closed
    left its number, which another was about to write to, to the next test's.
    """

    def __init__(self, argv: list[str]) -> None:
        self._input, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                argv, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
        assert self.process.stdout and self.process.stderr
        self._output, self._errors = self.process.stdout, self.process.stderr
        self.sent = 0

    def send(self, data: bytes | memoryview) -> None:
        self.sent += len(data)
        self._input.sendall(data)

    def receive(self) -> bytes:
        return self._output.read(1 << 16)

    def receive_error(self) -> bytes:
        return self._errors.read(1 << 16)

    def finish_input(self) -> None:
        self._input.shutdown(socket.SHUT_WR)

    def status(self, timeout: float) -> int | None:
        return self.process.wait(timeout)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()


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
        variables = os.environ if environment is None else environment
        there = workdir / "dflashctl" / "agent" / f"{bundle().digest}.pyz"
        pipes = [os.pipe() for _ in range(3)]
        (source, to), (answers, sink), (errors, complaints) = pipes
        self._stdin = open(to, "wb", buffering=0)  # noqa: SIM115
        self._stdout = open(answers, "rb", buffering=0)  # noqa: SIM115
        self._stderr = open(errors, "rb")  # noqa: SIM115
        self.process: Forked | subprocess.Popen[bytes]
        if (
            command is None
            and python == sys.executable
            and there.exists()
            and all(variables.get(name) == os.environ.get(name) for name in LOCALE)
        ):
            self.process = fork_agent(variables, source, sink, complaints)
        else:
            self.process = subprocess.Popen(
                command or argv(python),
                stdin=source,
                stdout=sink,
                stderr=complaints,
                env=variables,
                cwd="/",
            )
        for theirs in (source, sink, complaints):
            os.close(theirs)
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
        self.introduce(not there.exists() if send_program is None else send_program)

    def introduce(self, send_program: bool) -> None:
        program = bundle()
        data = program.data if send_program else b""
        self.write(header(program.digest, len(data), str(self.workdir)) + data)

    def resync(self) -> None:
        self.write(RESYNC)
        self.introduce(True)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with self._lock:
            while view:
                view = view[self._stdin.write(view) :]

    def _inbox(self, number: int) -> queue.Queue[tuple[dict[str, Any], bytes]]:
        return self.frames.setdefault(number, queue.Queue())

    def _read(self) -> None:
        decoder = None
        while data := self._stdout.read(1 << 20):
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
        self.errors = self._stderr.read()

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
        self._stdin.close()
        code = self.process.wait(WAIT)
        for reader in self._readers:
            reader.join(WAIT)
        self._stdout.close()
        self._stderr.close()
        return code
