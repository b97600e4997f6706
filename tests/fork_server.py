"""Processes that begin as ``python -m MODULE`` does, but with the imports made already.

An import of torch and transformers costs 5 s of CPU, the command line's 0.3 s, an agent's 0.03 s,
a fork 0.01 s. A server imports once and forks for each start. What comes out is a process of its
own all the same, with the words, folder, variables, descriptors and end of the real one; there are
tests of each module that start it from nothing. (multiprocessing's own forkserver is one a process,
takes no descriptors and ends its children otherwise than an interpreter ends.)
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ForkServer:
    """``imports`` are the statements to run once, with ``variables`` as the whole environment and
    ``flags`` as the interpreter's own."""

    def __init__(self, imports: str, variables: Mapping[str, str], *flags: str) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, *flags, __file__, str(theirs.fileno()), imports],
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(
        self,
        module: str,
        words: Sequence[str],
        *,
        cwd: Path,
        variables: Mapping[str, str],
        stdout: int,
        stderr: int,
        stdin: int | None = None,
    ) -> Forked:
        """``python -m module words``, or ``python -c word`` where the module is ``-c``; without
        ``stdin`` nothing comes from its standard input."""
        request = {"module": module, "words": words, "cwd": str(cwd), "variables": dict(variables)}
        status, theirs = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            descriptors = [nothing if stdin is None else stdin, stdout, stderr, theirs]
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
        finally:
            os.close(nothing)
            os.close(theirs)
        return Forked(status)

    def run(
        self,
        module: str,
        words: Sequence[str],
        *,
        cwd: Path,
        variables: Mapping[str, str],
        limit_s: float,
    ) -> subprocess.CompletedProcess[str]:
        """To the end of the process and of everybody who holds its output."""
        pipes = [os.pipe() for _ in range(2)]
        (_, stdout), (_, stderr) = pipes
        process = self.start(
            module, words, cwd=cwd, variables=variables, stdout=stdout, stderr=stderr
        )
        os.close(stdout)
        os.close(stderr)
        out, err = _read_all([mine for mine, _ in pipes], process, limit_s)
        return subprocess.CompletedProcess([module, *words], process.wait(limit_s), out, err)


class Forked:
    """A child of the server. ``status`` brings its pid, and then its exit code."""

    def __init__(self, status: int) -> None:
        self._status = open(status, encoding="ascii")  # noqa: SIM115
        self.pid = int(self._status.readline())
        self._code: int | None = None

    def wait(self, limit_s: float = 60.0) -> int:
        """The exit code, a signal's negative. Killed when the time is over."""
        if not self._ends_within(limit_s):
            self.kill()
            raise subprocess.TimeoutExpired(str(self.pid), limit_s)
        if self._code is None:
            with self._status:
                self._code = int(self._status.readline())
        return self._code

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.wait() if self._ends_within(0) else None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ends_within(self, limit_s: float) -> bool:
        if self._code is not None:
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(self._status, selectors.EVENT_READ)
            return bool(selector.select(limit_s))

    @property
    def ended(self) -> bool:
        return self._code is not None


def _read_all(sources: list[int], process: Forked, limit_s: float) -> list[str]:
    """What each brings until its end, as ``subprocess`` decodes it."""
    pieces: dict[int, list[bytes]] = {source: [] for source in sources}
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(process.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(str(process.pid), limit_s)
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                pieces[key.fd].append(piece)
                if not piece:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    return [b"".join(pieces[s]).decode().replace("\r\n", "\n") for s in sources]


# -- The server --------------------------------------------------------------------------------


def serve(channel: socket.socket) -> dict[str, Any]:
    """Returns in each process to be, with what it was asked for; ends with whoever asks."""
    # Children that hand a status on are nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 4)
        if not message:
            sys.exit()
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, status = descriptors
    child = os.fork()
    if child:
        for stream in streams:
            os.close(stream)
        os.write(status, b"%d\n" % child)
        _, code = os.waitpid(child, 0)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(code))
        os._exit(0)
    os.close(status)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    request: dict[str, Any] = json.loads(message)
    return request


def become(request: dict[str, Any]) -> None:
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["variables"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        stream = open(  # noqa: SIM115
            number,
            "w" if number else "r",
            buffering=1 if number == 2 else -1,
            encoding=old.encoding,
            errors=old.errors,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if request["module"] == "-c":
        sys.argv = ["-c"]
        exec(request["words"][0], {"__name__": "__main__"})
        return
    sys.path[0] = request["cwd"]
    sys.argv = [request["module"], *request["words"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    exec(sys.argv[2])
    # A collection in a child would copy what the server holds.
    gc.collect()
    gc.freeze()
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
