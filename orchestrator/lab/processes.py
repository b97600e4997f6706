"""Processes by number and start time: a number alone may belong to another by now."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Process:
    pid: int
    start: int
    """Clock ticks since boot."""

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """None if there is no such process, or only a zombie."""
        fields = stat_fields(pid)
        if fields is None or fields[0] in "ZX":
            return None
        return cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        return Process.of(self.pid) == self

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def stat_fields(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on (index 0 = state, 1 = parent, 19 = start time)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = stat_fields(int(entry.name))
            if fields is not None and int(fields[1]) == parent:
                found.append(int(entry.name))
    return sorted(found)


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def boot_id() -> str:
    return BOOT_ID.read_text().strip()


def listener(port: int) -> str | None:
    """Who listens on a TCP port of this machine: ``sshd, pid 12``; None if nobody does."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and sockets(entry) & inodes:
            return f"{name(int(entry.name))}, pid {entry.name}"
    return "a process that is not visible from here"


def sockets(process: Path) -> set[str]:
    """Links of the open files of /proc/PID; those that close meanwhile are left out."""
    found = set()
    try:
        for link in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(link))  # noqa: PTH115  (such a link is no path)
    except OSError:
        return found  # it ended, or is another user's
    return found
