"""What the NVIDIA driver consists of, where it lies on other mounts than /.

The lab's host and containers are overlays over /, which show none of the mounts on it. Machines
made for GPUs have the driver on one (a read-only image at /usr/local/nvidia), and NVIDIA's
container toolkit binds each of its files alone. A copy elsewhere is no way out: ld.so's cache names
the library by its path, and glibc does not try the next entry when that one is dead.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from orchestrator.lab.mounts import holder, mountinfo, points
from orchestrator.lab.requirements import CLEAN_ENV, which

SYSTEM = tuple(Path(p) for p in ("/usr", "/opt", "/lib", "/lib32", "/lib64", "/bin", "/sbin"))
_LIBRARY = re.compile(r"^\s+lib(?:cuda|cudadebugger|nvidia-[\w-]+)\.so\S* .*=> (/.*)$", re.M)
"""In ``ldconfig -p``; libcudart and its like are no part of the driver."""


def mounts(mountinfo: str, files: Iterable[Path]) -> tuple[Path, ...]:
    """Of the mounts that hold ``files`` those that belong to the system, parents before children.

    ``files`` are resolved paths. Only what lies below one of ``SYSTEM`` is the system's: a mount
    elsewhere, or all of /opt, has the user's own files too.
    """
    mounted = points(mountinfo)
    held = {holder(file, mounted) for file in files}
    below = (point for point in held if any(folder in point.parents for folder in SYSTEM))
    return tuple(sorted(below))


def libraries(cache: str) -> list[Path]:
    """Those of the driver in the text of ``ldconfig -p``."""
    return [Path(path) for path in _LIBRARY.findall(cache)]


def files() -> list[Path]:
    """What programs find here of the driver, each by the path where it really lies."""
    argv = [which("ldconfig") or "ldconfig", "-p"]
    listed = subprocess.run(argv, env=CLEAN_ENV, capture_output=True, text=True, check=False)
    found = [*libraries(listed.stdout), *map(Path, filter(None, [which("nvidia-smi")]))]
    return sorted({path.resolve() for path in found if path.exists()})


def mounts_here(devices: Sequence[Path]) -> tuple[Path, ...]:
    """This machine's, where it passes ``devices`` through."""
    return mounts(mountinfo(), files()) if devices else ()
