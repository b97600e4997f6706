"""The lab's control groups: where they are, who lives in them, how they end.

Everything that a lab starts is a child of its sshd or of a container and so lies below one group
of the lab's own, in every hierarchy. That is how ``down`` ends it all, after a crash too, without
remembered process numbers (they may belong to others by then) and without names.

The host gets a cgroup namespace whose root is that group, so there a container's processes are in
``/lxc/200/ns``, as on Proxmox, and those of other labs are outside (``/../…``).

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
PATIENCE_S = 10.0


@dataclass(frozen=True)
class Hierarchies:
    """``names`` below /sys/fs/cgroup (none: version 2) and the lab's own group in each."""

    names: tuple[str, ...]
    groups: tuple[Path, ...]

    @property
    def version(self) -> int:
        return 1 if self.names else 2

    @property
    def seen_by_host(self) -> tuple[Path, ...]:
        """The same groups by the paths that the lab's host knows them by."""
        return tuple(SYS / name for name in self.names) or (SYS,)

    @property
    def of_host(self) -> tuple[Path, ...]:
        """Where the host's own processes are: sshd, sessions, what the tester runs there."""
        return self.groups if self.names else tuple(group / "host" for group in self.groups)


def find(name: str, own: str | None = None, root: Path = SYS) -> Hierarchies:
    """``name`` below the caller's groups; ``own`` is the text of /proc/self/cgroup."""
    if (root / "cgroup.controllers").exists():
        return Hierarchies((), (root / name,))
    text = Path("/proc/self/cgroup").read_text() if own is None else own
    found = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        mount = controllers or "unified"
        if mount in (*USED, "unified") and (root / mount).is_dir():
            found.append((mount, root / mount / path.lstrip("/") / name))
    return Hierarchies(tuple(mount for mount, _ in found), tuple(group for _, group in found))


def make(hierarchies: Hierarchies) -> None:
    for group in hierarchies.groups:
        group.mkdir(exist_ok=True)
        if hierarchies.version == 1:
            # Containers that start at once race for these in LXC ("Numerical result out of range").
            for name in ("lxc", "lxc.monitor"):
                (group / name).mkdir(exist_ok=True)
            continue
        for controller in ("memory", "pids"):
            try:
                (group.parent / "cgroup.subtree_control").write_text(f"+{controller}")
            except OSError:
                # Not there, or, inside another container, the root is not the true one and may
                # hold processes itself. ``can_limit`` tells.
                continue


def can_limit(hierarchies: Hierarchies) -> bool:
    """Whether a container's memory can be limited; asked when the host is up."""
    names = ("memory.limit_in_bytes", "memory.max")
    return any((group / "lxc" / name).exists() for group in hierarchies.groups for name in names)


def memory_keys(hierarchies: Hierarchies, limit: int) -> dict[str, str]:
    """The limit as LXC configuration."""
    if not limit:
        return {}
    if hierarchies.version == 2:
        return {"lxc.cgroup2.memory.max": str(limit)}
    return {"lxc.cgroup.memory.limit_in_bytes": str(limit)}


def leftovers(name: str) -> list[Path]:
    """Groups called ``name`` anywhere: for a lab whose state file is lost."""
    found = []
    for folder, children, _ in os.walk(SYS):
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
    """Kill every member and remove the groups; returns those that would not go within 10 s.

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
