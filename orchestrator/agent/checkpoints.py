"""Which checkpoints of a run are complete.

The trainer writes beside and renames, so whatever has its final name is whole; names that begin
with a dot or end like a temporary file's are not final.
"""

from __future__ import annotations

import os

BEST = "best"
"""The trainer's link to the one with the highest acceptance."""
UNFINISHED = (".tmp", ".part", ".partial", ".incomplete", ".writing")


def complete(folder: str) -> list[str]:
    """Paths, the oldest first: by the number at the name's end, then by time."""
    found: list[tuple[int, float, str]] = []
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    for entry in entries:
        if entry.name.startswith(".") or entry.name.endswith(UNFINISHED) or entry.is_symlink():
            continue
        found.append((number(entry.name), entry.stat().st_mtime, entry.path))
    return [path for _, _, path in sorted(found)]


def newest(folder: str) -> str | None:
    paths = complete(folder)
    return paths[-1] if paths else None


def best(folder: str) -> str | None:
    """The complete checkpoint that the link ``best`` names."""
    try:
        name = os.path.basename(os.readlink(os.path.join(folder, BEST)))
    except OSError:
        return None
    path = os.path.join(folder, name)
    return path if path in complete(folder) else None


def number(name: str) -> int:
    """The step in ``step-000400``; -1 without one."""
    stem = name.split(".")[0]
    digits = stem[len(stem.rstrip("0123456789")) :]
    return int(digits) if digits else -1
