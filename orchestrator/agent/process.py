"""Processes as /proc tells of them: who lives, who belongs to a run, and how a whole tree ends.

A PID means nothing without the start time beside it, and neither without the boot id
(``program.boot_id``): numbers are used again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

MARKER = "DFLASH_RUN_ID"
"""In the environment of a run's command, and so of all that it starts, however often it forks."""


class Process(NamedTuple):
    pid: int
    ppid: int
    state: str
    start: int
    """Clock ticks since boot."""
    rss_pages: int
    name: str
    terminal: str
    """``pts/3``, or ``?``."""
    cpu_ticks: int
    """User and system time."""
    threads: int

    @property
    def gone(self) -> bool:
        """It holds no memory, no GPU, no file: a zombie without threads. One whose first thread
        alone has ended is a zombie too, while the others free gigabytes; nobody can reap it yet."""
        return self.state in "ZX" and self.threads < 2


def read(pid: int) -> Process | None:
    """None if there is no such process (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name may hold blanks and brackets: cut at the last one.
    opening, closing = text.index(b"("), text.rindex(b")")
    rest = text[closing + 2 :].split()
    return Process(
        pid=pid,
        ppid=int(rest[1]),
        state=rest[0].decode(),
        start=int(rest[19]),
        rss_pages=int(rest[21]),
        name=text[opening + 1 : closing].decode("utf-8", "replace"),
        terminal=_terminal(int(rest[4])),
        cpu_ticks=int(rest[11]) + int(rest[12]),
        threads=int(rest[17]),
    )


def _terminal(device: int) -> str:
    major, minor = os.major(device), os.minor(device)
    if 136 <= major <= 143:
        return f"pts/{minor + 256 * (major - 136)}"
    return f"tty{minor}" if major == 4 else "?"


def alive(pid: int, start: int) -> bool:
    """Whether this very process runs: a zombie does not."""
    process = read(pid)
    return process is not None and process.start == start and not process.gone


def table() -> dict[int, Process]:
    found = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def command(pid: int) -> str:
    """Its command line for a person, or ``[name]`` where it has none."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read(4096).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""
    if text:
        return text
    process = read(pid)
    return f"[{process.name}]" if process else ""


def run_of(pid: int) -> str | None:
    """The run that it belongs to, in whichever container; None if it is nobody's or has ended."""
    prefix = f"{MARKER}=".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = file.read()
    except OSError:
        return None
    at = 0 if text.startswith(prefix) else text.find(b"\0" + prefix) + 1
    if not text.startswith(prefix, at):
        return None
    return text[at + len(prefix) :].split(b"\0", 1)[0].decode("utf-8", "replace")


def marked(run_id: str, processes: Iterable[int]) -> set[int]:
    """Those whose environment says that they belong to the run."""
    return {pid for pid in processes if run_of(pid) == run_id}


def descendants(processes: Mapping[int, Process], roots: Collection[int]) -> set[int]:
    """All below the roots, the roots themselves left out."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found


class Tree:
    """All processes of one run, wherever their parents went.

    ``root`` is the supervisor: a subreaper, so that orphans stay below it. The marker finds the
    rest (and everything once the supervisor is gone). ``spare`` is never part of it.
    """

    def __init__(self, run_id: str, root: int | None, spare: Collection[int] = ()) -> None:
        self.run_id = run_id
        self.root = root
        self.spare = {os.getpid(), *spare}

    def members(self) -> list[Process]:
        """The living ones."""
        processes = table()
        roots = marked(self.run_id, processes)
        found = roots | descendants(processes, roots)
        if self.root is not None:
            found |= descendants(processes, {self.root})
            found.discard(self.root)
        found -= self.spare
        return [processes[pid] for pid in sorted(found) if not processes[pid].gone]

    def signal(self, number: int) -> list[int]:
        """Send to each; the PIDs that got it."""
        reached = []
        for process in self.members():
            # Between look and kill a PID could in principle be another's; ask once more.
            if alive(process.pid, process.start):
                try:
                    os.kill(process.pid, number)
                except ProcessLookupError:
                    continue
                reached.append(process.pid)
        return reached


TERM_GRACE_S = 10.0
KILL_GRACE_S = 5.0


class Ending:
    """INT, after the grace TERM, then KILL, without ever blocking: ``step`` is called often.

    Whoever has a loop of its own (the supervisor copies output meanwhile) and whoever just sleeps
    in between (the agent, when the supervisor is gone) end a tree in the same way.
    """

    def __init__(
        self, tree: Tree, grace_s: float, tell: Callable[[str, int], None] = lambda name, left: None
    ) -> None:
        self.tree = tree
        self.killed: list[int] = []
        self._tell = tell
        self._stages = [
            (signal.SIGINT, grace_s),
            (signal.SIGTERM, TERM_GRACE_S),
            (signal.SIGKILL, KILL_GRACE_S),
        ]
        self._until = 0.0

    def step(self) -> bool:
        """True once nothing is left, or what is left cannot be killed (state D)."""
        members = self.tree.members()
        if not members:
            return True
        now = time.monotonic()
        if now < self._until:
            if not self._stages:
                # New children of what is being killed: again, they were not there before.
                self.killed += self.tree.signal(signal.SIGKILL)
            return False
        if not self._stages:
            return True
        number, patience = self._stages.pop(0)
        self._until = now + patience
        reached = self.tree.signal(number)
        if number == signal.SIGKILL:
            self.killed += reached
        self._tell(signal.Signals(number).name[3:], len(members))
        return False


def describe(processes: Iterable[Process]) -> list[dict[str, Any]]:
    """For an answer: pid, parent, command, state, resident memory in MB (1e6 bytes)."""
    page = os.sysconf("SC_PAGE_SIZE")
    return [
        {
            "pid": process.pid,
            "ppid": process.ppid,
            "state": process.state,
            "rss_mb": round(process.rss_pages * page / 1e6, 1),
            "command": command(process.pid)[:500],
        }
        for process in processes
    ]
