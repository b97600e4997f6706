"""Upper layers prepared by hand, before they are mounted over the machine's own /.

A whiteout (a 0:0 character device) or an opaque folder in the upper layer hides what lies below
without costing a mount per container; the formats are those of the kernel's overlayfs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path


def folder(upper: Path, path: Path) -> Path:
    """``path`` as a folder in ``upper``, its parents too, with the modes that they have below.

    ``path`` is resolved first: a folder in the upper layer where the lower one has a symbolic
    link (/lib, /sbin) would hide the link.
    """
    current, below = upper, Path("/")
    for part in path.resolve().parts[1:]:
        current, below = current / part, below / part
        if current.is_dir():
            continue
        current.mkdir()
        if below.is_dir():
            status = below.stat()
            current.chmod(stat.S_IMODE(status.st_mode))
            os.chown(current, status.st_uid, status.st_gid)
    return current


def empty(upper: Path, path: Path) -> Path:
    """``path`` exists and shows nothing of the lower layer."""
    target = folder(upper, path)
    os.setxattr(target, "trusted.overlay.opaque", b"y")
    return target


def hide(upper: Path, path: Path) -> None:
    """``path`` does not exist, as if it had been removed."""
    if not os.path.lexists(path):
        return
    target = folder(upper, path.parent) / path.name
    os.mknod(target, stat.S_IFCHR, os.makedev(0, 0))


def write(upper: Path, path: Path, text: str, mode: int = 0o644) -> None:
    target = folder(upper, path.parent) / path.name
    target.write_text(text)
    target.chmod(mode)


def outermost(paths: Iterable[Path]) -> list[Path]:
    """``paths`` without those that lie below another one of them: hiding the outer is enough."""
    kept: list[Path] = []
    for path in sorted({path.resolve() for path in paths}):
        if not any(path.is_relative_to(outer) for outer in kept):
            kept.append(path)
    return kept
