"""The one mount that a lab may make outside its own namespaces: a tmpfs for its upper layers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from orchestrator.errors import RefusedError
from orchestrator.lab.requirements import CLEAN_ENV

MOUNTS = Path("/proc/self/mountinfo")


def mount(*args: str, program: str = "mount") -> None:
    done = subprocess.run(
        [program, *args], env=CLEAN_ENV, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RefusedError(f"{program} failed: {done.stderr.strip()}")


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
