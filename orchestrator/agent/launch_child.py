"""Fork and exec of a run's command, without ``subprocess``: its import alone takes 6 ms of a start.

``subprocess`` would also leave SIGHUP ignored in the command, as the supervisor has it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence


class Child:
    """``output`` is the reading end of the one pipe that holds its stdout and stderr."""

    def __init__(self, pid: int, output: int) -> None:
        self.pid = pid
        self.output = output
        self.hung_up = False
        """Nobody holds the writing end any more."""
        self.ended = False
        self.exit_code: int | None = None
        self.signal: int | None = None

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    def reap(self) -> bool:
        """Collect the dead, orphans that came to us too; True if the command is now among them."""
        before = self.ended
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self.pid:
                self.ended = True
                if os.WIFSIGNALED(status):
                    self.signal = os.WTERMSIG(status)
                else:
                    self.exit_code = os.WEXITSTATUS(status)
        return self.ended and not before


def spawn(command: Sequence[str], cwd: str, environment: Mapping[str, str], umask: int) -> Child:
    """Start it in a session of its own. ``OSError`` (of chdir or exec) if it never ran."""
    output, into = os.pipe()
    trouble, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.umask(umask)
            _become(command, cwd, environment, into)
        except OSError as error:
            os.write(report, b"%d" % (error.errno or 1))
        finally:
            os._exit(127)
    os.close(into)
    os.close(report)
    # Closed by a good exec: then there is nothing to read.
    told = os.read(trouble, 16)
    os.close(trouble)
    if told:
        os.waitpid(pid, 0)
        os.close(output)
        raise OSError(int(told), os.strerror(int(told)), command[0])
    return Child(pid, output)


def why_not(name: str, cwd: str, error: OSError) -> str:
    """What the error of an exec leaves open: it says "no such file" of a script that is there."""
    said = error.strerror or str(error)
    if not os.path.isdir(cwd):
        return f"{said}; there is no folder {cwd}"
    path = os.path.join(cwd, name)
    if "/" not in name or not os.path.isfile(path):
        return said
    if not os.access(path, os.X_OK):
        return f"{said}; it is not executable: chmod +x"
    try:
        with open(path, "rb") as stream:
            first, end, _ = stream.read(256).partition(b"\n")
    except OSError:
        return said
    if not first.startswith(b"#!"):
        return f"{said}; its first line names no program (#!/bin/bash)"
    if end and first.endswith(b"\r"):
        return f"{said}; its lines end in CRLF, so that {_words(first)!r} is sought"
    return f"{said}; its first line names {_words(first).strip()}"


def _words(first: bytes) -> str:
    return first[2:].decode(errors="replace")


def _become(command: Sequence[str], cwd: str, environment: Mapping[str, str], output: int) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    null = os.open("/dev/null", os.O_RDONLY)
    for target, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, target)
    os.chdir(cwd)
    os.execvpe(command[0], list(command), dict(environment))
