"""The lab's control groups: where they are, who lives in them, how they end.

Everything that a lab starts is a child of its sshd or of a container and so lies below one group
of the lab's own, in every hierarchy. That is how ``down`` ends it all, after a crash too, without
remembered process numbers (they may belong to others by then) and without names.

Version 1 (and hybrid): /sys/fs/cgroup/memory, freezer, pids and unified, each with the caller's
own group as base. Version 2: one hierarchy; the base is its root, because a group there holds
either processes or children with limits, never both, and only the root is free of that rule.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

USED = ("memory", "freezer", "pids")
SYS = Path("/sys/fs/cgroup")
PATIENCE_S = 5.0


@dataclass(frozen=True)
class Hierarchies:
    """``groups``: one folder per hierarchy, the lab's own group in each; not yet made."""

    version: int
    groups: tuple[Path, ...]

    @property
    def host(self) -> tuple[Path, ...]:
        """Groups for the host's own processes (sshd and sessions)."""
        if self.version == 2:
            return tuple(group / "host" for group in self.groups)
        return self.groups


def find(name: str, own: str | None = None, root: Path = SYS) -> Hierarchies:
    """``name`` below the caller's groups; ``own`` is the text of /proc/self/cgroup."""
    if (root / "cgroup.controllers").exists():
        return Hierarchies(2, (root / name,))
    text = Path("/proc/self/cgroup").read_text() if own is None else own
    groups = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        mount = controllers or "unified"
        if mount in (*USED, "unified") and (root / mount).is_dir():
            groups.append(root / mount / path.lstrip("/") / name)
    return Hierarchies(1, tuple(groups))


def make(hierarchies: Hierarchies) -> bool:
    """Make the groups; returns whether a memory limit can be set in them."""
    for group in (*hierarchies.groups, *hierarchies.host):
        group.mkdir(exist_ok=True)
    for group in hierarchies.groups:
        # Two containers that start at once race for these in LXC ("Numerical result out of range").
        for name in ("lxc", "lxc.monitor"):
            (group / name).mkdir(exist_ok=True)
    if hierarchies.version == 1:
        return any((group / "memory.limit_in_bytes").exists() for group in hierarchies.groups)
    group = hierarchies.groups[0]
    wanted = set((group.parent / "cgroup.controllers").read_text().split()) & {"memory", "pids"}
    try:
        for level in (group.parent, group, group / "lxc"):
            for controller in sorted(wanted):
                (level / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError:
        # Inside another container the root group is not the true root and may hold processes.
        return False
    return "memory" in wanted


def memory_keys(hierarchies: Hierarchies, limit: int) -> dict[str, str]:
    """The limit as LXC configuration."""
    if not limit:
        return {}
    if hierarchies.version == 2:
        return {"lxc.cgroup2.memory.max": str(limit)}
    return {"lxc.cgroup.memory.limit_in_bytes": str(limit)}


def leftovers(name: str, root: Path = SYS) -> list[Path]:
    """Groups called ``name`` anywhere: for a lab whose state file is lost."""
    found = []
    for folder, children, _ in os.walk(root):
        if name in children:
            found.append(Path(folder) / name)
            children.remove(name)
    return found


def _tree(group: Path) -> Iterator[Path]:
    """Children before parents."""
    for folder, _, _ in os.walk(group, topdown=False):
        yield Path(folder)


def members(groups: Iterable[Path]) -> set[int]:
    """Processes in ``groups`` and below."""
    result: set[int] = set()
    for group in groups:
        for folder in _tree(group):
            try:
                result.update(map(int, (folder / "cgroup.procs").read_text().split()))
            except OSError:
                continue  # gone meanwhile, or a threaded group
    return result


def thaw(groups: Iterable[Path]) -> None:
    """A frozen process does not die of SIGKILL on version 1."""
    for group in groups:
        for folder in _tree(group):
            for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
                try:
                    if (folder / name).exists():
                        (folder / name).write_text(value)
                except OSError:
                    continue


def end(groups: Iterable[Path]) -> set[int]:
    """Kill every member and remove the groups; returns those that would not go within 5 s.

    Both in one loop: a `pct start` that was under way when its `lab up` was killed may join after
    the first look.
    """
    groups = list(groups)
    until = time.monotonic() + PATIENCE_S
    while True:
        left = members(groups)
        if left:
            thaw(groups)
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for group in groups:
            for folder in _tree(group):
                try:
                    folder.rmdir()
                except OSError:
                    continue  # the kernel needs a moment after the last process has gone
        if not any(group.exists() for group in groups):
            return set()
        if time.monotonic() > until:
            return left
        time.sleep(0.005)
