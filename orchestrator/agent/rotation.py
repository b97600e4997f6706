"""A log and its rotated files, looked at while another process renames them.

A rotation shifts ``log.2`` to ``log.3``, ``log.1`` to ``log.2``, ``log`` to ``log.1`` and begins a
new ``log``: for a moment names are missing, and what was listed is no longer what a name opens. So
files are known by inode, and a look counts only if the next one sees the same.
"""

from __future__ import annotations

import contextlib
import os
import time

LISTINGS = 50
SETTLE_S = 0.001
INDEX_EVERY_S = 1.0
"""The log's index has a mark for the first line after so long."""

Link = tuple[int, str]
"""Inode and name."""


class Chain:
    def __init__(self, path: str) -> None:
        self.path = path
        folder, _, self._base = path.rpartition("/")
        self._folder = folder or "/"

    def links(self) -> list[Link]:
        """The oldest rotated file first, the log itself (if it is there) last."""
        before = self._look()
        for _ in range(LISTINGS):
            found = self._look()
            if found == before:
                break
            time.sleep(SETTLE_S)
            before = found
        return before

    def after(self, inode: int) -> Link | None:
        """The file begun when that one was renamed; None if there is none (yet)."""
        links = self.links()
        numbers = [number for number, _ in links]
        if inode not in numbers[:-1]:
            return None
        return links[numbers.index(inode) + 1]

    def written_since(self, mtime_ns: int) -> Link | None:
        """The oldest whose last write was not before that."""
        for inode, name in self.links():
            with contextlib.suppress(OSError):
                if os.stat(name).st_mtime_ns >= mtime_ns:
                    return inode, name
        return None

    def _look(self) -> list[Link]:
        numbered: list[tuple[int, int]] = []
        current: list[Link] = []
        with contextlib.suppress(OSError):
            current = [(os.stat(self.path).st_ino, self.path)]
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder):
                stem, _, number = entry.name.rpartition(".")
                if stem == self._base and number.isdecimal():
                    numbered.append((int(number), entry.inode()))
        numbered.sort(reverse=True)
        return [*((inode, f"{self.path}.{number}") for number, inode in numbered), *current]
