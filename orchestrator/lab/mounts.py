"""What is mounted where on this machine, by /proc/self/mountinfo."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


def mountinfo() -> str:
    """Of this process; a mount point's name need not be UTF-8."""
    return MOUNTS.read_text(errors="surrogateescape")


def points(mountinfo: str) -> list[Path]:
    """Where something is mounted."""
    return [_point(line) for line in _lines(mountinfo)]


def _lines(mountinfo: str) -> list[str]:
    return mountinfo.rstrip("\n").split("\n")  # `splitlines` also splits at a form feed in a name


def _point(line: str) -> Path:
    """The kernel writes a space as \\040, a tab, a newline and a backslash likewise."""
    return Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]))


def holder(path: Path, mounted: Iterable[Path]) -> Path:
    """The one of ``mounted`` that ``path`` lies on."""
    above = [point for point in mounted if path.is_relative_to(point)]
    return max(above, key=lambda point: len(point.parts), default=Path("/"))


def mounts_below(root: Path) -> list[Path]:
    return [point for point in points(mountinfo()) if point.is_relative_to(root)]


def on_overlay(path: Path, mountinfo: str) -> bool:
    """Whether ``path`` lies on an overlay; ``mountinfo`` is the text of /proc/self/mountinfo.

    An overlay's upper layer cannot lie there (a Docker container's own / for example).
    """
    kinds = {}  # of several mounts on one point the last is seen
    for line in _lines(mountinfo):
        kinds[_point(line)] = line.partition(" - ")[2].split(" ")[0]
    return kinds.get(holder(path, kinds)) == "overlay"
