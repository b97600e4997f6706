"""Stands where ``tee`` stood: runs the command, copies its output, always knows how it ended.

``tee`` in a pipe fails in both directions: when it dies (pane closed, tmux killed, disk full) the
trainer dies of SIGPIPE, and the exit code is the wrong one. So the pane's process (``pane.py``)
only starts the supervisor in a session of its own, where neither the terminal's signals nor its end
reach it, and then waits to hand its exit code on to tmux.

Its tree: tmux pane (waits) · supervisor (own session, subreaper) · the command (own session) · …
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from typing import Any

from orchestrator.agent import process
from orchestrator.agent.checkpoints import newest
from orchestrator.agent.files import read_record, write_record
from orchestrator.agent.launch_child import Child, spawn, why_not
from orchestrator.agent.program import boot_id, plain
from orchestrator.agent.records import ExitRecord, Heartbeat, describe_end
from orchestrator.agent.runlog import Pane, RunLog
from orchestrator.paths import RunPaths

TICK_S = 1.0
LOOK_S = 0.2
"""How often /proc is read while a tree is ending: 2–20 ms a look."""
STRAGGLER_GRACE_S = 10.0
"""After a failure, what the command left behind has this long before TERM: it may hold a GPU."""
_PR_SET_CHILD_SUBREAPER = 36
_F_SETPIPE_SZ = 1031


def supervise(paths: RunPaths, tmux: int) -> int:
    """The supervisor's whole life, in a process of its own whose output is the pane.

    :param tmux: PID of the tmux server.
    """
    lock = os.open(f"{paths.root}/.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    if os.path.exists(paths.supervisor):
        # This run was started before; a retry after a lost answer must not start it twice.
        return 0
    program = os.open(plain(sys.argv[0]), os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(program, fcntl.LOCK_SH)
    # Our own files are private; the command gets the umask of whoever started the run.
    os.umask(0o077)
    pane = Pane(1)
    words = os.open(paths.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open("/dev/null", os.O_RDONLY)
    for target, source in ((0, null), (1, words), (2, words)):
        os.dup2(source, target)
    os.chdir("/")
    Supervisor(paths, pane, tmux).run()
    return 0


class Supervisor:
    """One run from its first attempt to its exit record."""

    def __init__(self, paths: RunPaths, pane: Pane, tmux: int) -> None:
        start = read_record(paths.start)
        if start is None:
            raise FileNotFoundError(f"{paths.start} is missing or does not parse")
        self.paths = paths
        self.pane = pane
        self.command: list[str] = start["command"]
        self.cwd: str = start["cwd"]
        self.umask: int = start["umask"]
        self.restart: dict[str, float] = start["restart"]
        self.grace: float = start["grace_s"]
        self.environment: dict[str, str] = start["environment"] | self._secrets()
        self.log = RunLog(paths, start["log_bytes"], start["log_files"])
        self.attempts: list[dict[str, Any]] = []
        self.killed: list[int] = []
        self.identity = {
            "pid": os.getpid(),
            "start": (process.read(os.getpid()) or _absent()).start,
            "boot_id": boot_id(),
            "session": start["session"],
            "tmux_pid": tmux,
            "started": time.time(),
        }
        self.stop: dict[str, Any] | None = None
        self._asked = False
        self._ending: process.Ending | None = None
        self._tick_at = 0.0
        self.heartbeat = Heartbeat(paths)
        self.end = ExitRecord(paths)
        self._wake = self._take_signals()
        # Before the first fork: a script that puts itself into the background ends within 2 ms.
        _become_subreaper()

    def run(self) -> None:
        while True:
            attempt = self._attempt()
            if self.stop is not None or self._succeeded(attempt):
                break
            if len(self.attempts) > self.restart["max"] or attempt.get("error"):
                break
            if not self._back_off():
                break
        self._record_end()

    # One attempt

    def _attempt(self) -> dict[str, Any]:
        number = len(self.attempts) + 1
        resume = newest(self.paths.checkpoints) if number > 1 else None
        environment = dict(self.environment)
        if resume is not None:
            environment["DFLASH_RESUME"] = resume
        environment["DFLASH_ATTEMPT"] = str(number)
        attempt: dict[str, Any] = {
            "attempt": number,
            "started": time.time(),
            "ended": None,
            "exit_code": None,
            "signal": None,
            "resume": resume,
        }
        self.attempts.append(attempt)
        try:
            child = spawn(self.command, self.cwd, environment, self.umask)
        except OSError as error:
            # The shell's habit: 127 not found, 126 found but not to be run.
            attempt["exit_code"] = 127 if isinstance(error, FileNotFoundError) else 126
            why = why_not(self.command[0], self.cwd, error)
            attempt["error"] = f"cannot start {self.command[0]!r} in {self.cwd}: {why}"
            attempt["ended"] = time.time()
            self._say(attempt["error"])
            self._write_identity(None)
            return attempt
        with contextlib.suppress(OSError):
            # 1 MiB: at 100,000 lines a second the command never waits for us.
            fcntl.fcntl(child.output, _F_SETPIPE_SZ, 1 << 20)
        self._write_identity(child)
        self._watch(child)
        os.close(child.output)
        attempt["ended"] = time.time()
        attempt["exit_code"], attempt["signal"] = child.exit_code, child.signal
        if not child.ended:
            attempt["error"] = f"process {child.pid} could not be killed: it hangs in the kernel"
        return attempt

    def _watch(self, child: Child) -> None:
        """Copy output until the command, and whatever else writes to its pipe, has ended."""
        tree = process.Tree(self.paths.run_id, os.getpid(), {os.getppid()})
        look_at = 0.0
        while True:
            self._copy(child, LOOK_S if self._ending or child.ended else TICK_S)
            news = child.reap()
            self._tick()
            self._consider_stop(tree)
            now = time.monotonic()
            if self._ending is None and not child.ended:
                continue
            if now < look_at and not news:
                continue
            look_at = now + LOOK_S
            if self._look(child, tree):
                return

    def _look(self, child: Child, tree: process.Tree) -> bool:
        """What is left of a tree that ends; True if the attempt is over."""
        over = self._ending is not None and self._ending.step()
        if over and self._ending is not None:
            self.killed += self._ending.killed
        if not over and self._ending is None and child.ended:
            if not tree.members():
                over = True
            elif child.succeeded:
                # As with tee: whoever holds the pipe is still the run; daemons that do not are not.
                over = child.hung_up
            else:
                # A crashed rank's siblings would hold their GPUs for ever.
                self._ending = process.Ending(tree, STRAGGLER_GRACE_S, self._tell)
        if over:
            self._drain(child)
            child.reap()
            self._ending = None
        return over

    def _copy(self, child: Child, patience: float) -> None:
        """Wait for output, for a signal or for room in the pane; copy what is there."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if not child.hung_up:
            poll.register(child.output, select.POLLIN)
        waiting = self.pane.waiting
        if waiting >= 0:
            poll.register(waiting, select.POLLOUT)
        for descriptor, _ in poll.poll(patience * 1000):
            if descriptor == self._wake:
                self._drain_wake()
            elif descriptor == child.output:
                data = os.read(child.output, 1 << 18)
                child.hung_up = not data
                self.log.write(data)
                self.pane.write(data)
            else:
                self.pane.flush()

    def _drain(self, child: Child) -> None:
        """What is still in the pipe; a stranger that holds its other end is not waited for."""
        os.set_blocking(child.output, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(child.output, 1 << 18):
                self.log.write(data)
                self.pane.write(data)

    # Stopping

    def _take_signals(self) -> int:
        waking, wake = os.pipe()
        os.set_blocking(waking, False)
        os.set_blocking(wake, False)

        def asked(number: int, frame: object) -> None:
            self._asked = True

        for ignored in (signal.SIGHUP, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTSTP):
            signal.signal(ignored, signal.SIG_IGN)
        for wanted in (signal.SIGINT, signal.SIGTERM):
            signal.signal(wanted, asked)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        return waking

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def _consider_stop(self, tree: process.Tree) -> None:
        if self.stop is not None or not self._asked:
            return
        # The file may be absent: a full disk, or a signal from a person or a container's shutdown.
        self.stop = read_record(self.paths.stop) or {"who": "a signal", "time": time.time()}
        grace = self.stop.get("grace_s")
        self._say(f"stop asked for by {self.stop.get('who')}")
        self._ending = process.Ending(tree, self.grace if grace is None else grace, self._tell)

    def _tell(self, name: str, left: int) -> None:
        self._say(f"SIG{name} to {left} processes")

    # Between attempts and at the end

    @staticmethod
    def _succeeded(attempt: dict[str, Any]) -> bool:
        return attempt["exit_code"] == 0

    def _back_off(self) -> bool:
        """Wait before the next attempt; False if a stop came meanwhile."""
        done = len(self.attempts)
        seconds = min(self.restart["backoff_s"] * 2 ** (done - 1), self.restart["backoff_max_s"])
        last = self.attempts[-1]
        how = describe_end({"reason": f"attempt {done} failed", **_code(last)})
        at = newest(self.paths.checkpoints)
        origin = f"from {at}" if at else "from the start"
        self.log.note(f"{how}; attempt {done + 1} begins in {seconds:g} s {origin}")
        self._say(f"{how}; back-off {seconds:g} s")
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._asked:
                self.stop = read_record(self.paths.stop) or {"who": "a signal"}
                return False
            self._tick()
            if select.select([self._wake], [], [], min(left, TICK_S))[0]:
                self._drain_wake()
        return True

    def _record_end(self) -> None:
        last = self.attempts[-1]
        if self.stop is not None:
            reason = "stopped"
        else:
            reason = "finished" if self._succeeded(last) else "failed"
        if reason != "finished":
            how = describe_end({"reason": reason, **_code(last)})
            self.log.note(last.get("error") or how)
        self.log.close()
        record = {
            **_code(last),
            "reason": reason,
            "error": last.get("error"),
            "started": self.identity["started"],
            "ended": time.time(),
            "boot_id": self.identity["boot_id"],
            "attempts": self.attempts,
            "stop": self.stop,
            "killed": self.killed,
            "log_bytes": self.log.written,
            "lost_bytes": self.log.lost,
            "pane_lost_bytes": self.pane.lost,
        }
        while not self.end.write(record):
            self._say("the exit record has to wait: the disk is full")
            time.sleep(TICK_S)

    # Records on the way

    def _write_identity(self, child: Child | None) -> None:
        record = {**self.identity, "attempt": len(self.attempts), "child": None}
        if child is not None:
            found = process.read(child.pid)
            record["child"] = {"pid": child.pid, "start": found.start if found else None}
            record["attempt_started"] = self.attempts[-1]["started"]
        try:
            write_record(self.paths.supervisor, record, durable=False)
        except OSError as error:
            self._say(f"supervisor.json could not be written: {error}")

    def _tick(self) -> None:
        now = time.monotonic()
        if now < self._tick_at:
            return
        self._tick_at = now + TICK_S
        self.log.retry()
        # The signal that comes with a request may be lost on a supervisor that is just starting.
        self._asked = self._asked or os.path.exists(self.paths.stop)
        self.heartbeat.beat(
            attempt=len(self.attempts),
            log_bytes=self.log.written,
            lost_bytes=self.log.lost,
            pane_lost_bytes=self.pane.lost,
        )

    def _say(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode("utf-8", "backslashreplace"))

    def _secrets(self) -> dict[str, str]:
        record = read_record(self.paths.secrets) or {}
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.paths.secrets)
        return record


def _code(attempt: dict[str, Any]) -> dict[str, Any]:
    return {"exit_code": attempt["exit_code"], "signal": attempt["signal"]}


def _absent() -> process.Process:
    raise ProcessLookupError("/proc does not show this very process: is it mounted?")


def _become_subreaper() -> None:
    """Orphans of the run come to us instead of to init, so none escapes a stop."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
