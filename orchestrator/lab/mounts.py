"""What is mounted where on this machine, by /proc/self/mountinfo."""

from __future__ import annotations

from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


def mounts_below(root: Path) -> list[Path]:
    points = [Path(line.split()[4]) for line in MOUNTS.read_text().splitlines()]
    return [point for point in points if point.is_relative_to(root)]


def on_overlay(path: Path, mountinfo: str) -> bool:
    """Whether ``path`` lies on an overlay; ``mountinfo`` is the text of /proc/self/mountinfo.

    An overlay's upper layer cannot lie there (a Docker container's own / for example).
    """
    best, kind = Path("/"), ""
    for line in mountinfo.splitlines():
        fields = line.split()
        point = Path(fields[4])
        if path.is_relative_to(point) and point.is_relative_to(best):
            best, kind = point, fields[fields.index("-") + 1]
    return kind == "overlay"
