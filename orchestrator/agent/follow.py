"""One file, read from an exact place onwards, through rotations by rename.

A cursor is (file, device, inode, offset, head): ``head`` is a checksum of the file's first
bytes, because a removed file's inode is soon used again, often for the very next log.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from orchestrator.agent.protocol import TAIL_PIECE
from orchestrator.agent.rotation import INDEX_EVERY_S, Chain, Link

HEAD_BYTES = 256
PIECES = 64
"""At a time: other files have their turn then."""
PATIENCE = 50
"""Tries to find a moment between two rotations."""
_ENDS = (b"\n", b"\r")


class Piece:
    """Bytes to send and the cursor after them; or a notice."""

    def __init__(self, data: bytes = b"", notice: str = "") -> None:
        self.data = data
        self.notice = notice


class Followed:
    """``read`` gives what is there; at the end of a rotated file it goes on in the next."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._chain = Chain(path)
        self._file = -1
        self._inode = (0, 0)
        self._offset = 0
        self._head = b""
        self._rest = bytearray()
        """Read but not yet sent: the beginning of a line."""
        self._told_waiting = False

    # Where to start

    def at_cursor(self, cursor: dict[str, Any]) -> str:
        """Go on from a cursor; a notice (``gap``) if what it points at is gone."""

        def place(links: list[Link]) -> bool:
            for link in links:
                if link[0] == cursor.get("inode") and self._open(link) and self._matches(cursor):
                    self._seek(int(cursor["offset"]))
                    return True
            return False

        if self._steadily(place):
            return ""
        self.at_oldest()
        return "gap"

    def at_oldest(self) -> None:
        self._steadily(lambda links: any(self._open(link) for link in links[:1]))

    def at_last_lines(self, count: int) -> None:
        """Before the last ``count`` lines, in older files too if the newest has fewer."""

        def place(links: list[Link]) -> bool:
            missing = count
            for link in reversed(links):
                if not self._open(link):
                    return False
                found, start = _last_lines(self._file, missing)
                self._seek(start)
                missing -= found
                if missing <= 0:
                    break
            return True

        self._steadily(place)

    def at_time(self, since: float, index: str) -> None:
        """At the first mark of the index behind which something as late as ``since`` may stand."""
        marked, mark = _mark_at(index, since)

        def place(links: list[Link]) -> bool:
            if not links or not self._open(links[-1]):
                return False
            older = marked and mark is None
            if older or os.fstat(self._file).st_mtime < since:
                self._seek(self._size())
                return True
            for link in links:
                if mark and link[0] == mark[0] and self._open(link) and self._size() >= mark[1]:
                    self._seek(mark[1])
                    return True
            return False

        if not self._steadily(place):
            self.at_oldest()

    def _steadily(self, place: Callable[[list[Link]], bool]) -> bool:
        """Let ``place`` choose among files that nobody renamed meanwhile; what it answered."""
        placed = False
        for _ in range(PATIENCE):
            links = self._chain.links()
            placed = place(links)
            if self._chain.links() == links:
                break
        return placed

    # Reading

    def read(self) -> Iterator[Piece]:
        """Whole lines until nothing more is there (or much was); notices in between."""
        for _ in range(PIECES):
            if self._file < 0 and not self._begin():
                if not self._told_waiting:
                    self._told_waiting = True
                    yield Piece(notice="waiting")
                return
            data = os.pread(self._file, TAIL_PIECE, self._offset + len(self._rest))
            if data:
                self._rest += data
                if piece := self._whole_lines():
                    yield piece
                continue
            if self._size() < self._offset:
                self._rest.clear()
                self._seek(0)
                yield Piece(notice="truncated")
                continue
            following = self._successor()
            if following is None:
                return
            file, gap = following
            # The writer may have added its last lines between our look and its rename.
            data = os.pread(self._file, TAIL_PIECE, self._offset + len(self._rest))
            if data:
                os.close(file)
                self._rest += data
                continue
            if self._rest:
                yield self.flush()
            self._adopt(file)
            yield Piece(notice="gap" if gap else "rotated")

    def flush(self) -> Piece:
        """An unfinished last line, when no more of it can come."""
        return self._take(len(self._rest))

    @property
    def cursor(self) -> dict[str, Any] | None:
        """After what was given out last; null before the file was ever there."""
        if self._file < 0:
            return None
        if len(self._head) < HEAD_BYTES:
            self._head = os.pread(self._file, min(HEAD_BYTES, self._offset), 0)
        return {
            "file": self.path,
            "dev": self._inode[0],
            "inode": self._inode[1],
            "offset": self._offset,
            "head": [len(self._head), zlib.crc32(self._head)],
        }

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # Inside

    def _whole_lines(self) -> Piece | None:
        end = max(self._rest.rfind(end) for end in _ENDS) + 1
        if end == 0 and len(self._rest) >= TAIL_PIECE:
            # A line longer than a piece is cut: holding it back would hold all of it in memory.
            end = len(self._rest)
        return self._take(end) if end else None

    def _take(self, count: int) -> Piece:
        data = bytes(self._rest[:count])
        del self._rest[:count]
        self._offset += count
        return Piece(data)

    def _open(self, link: Link) -> bool:
        """False if the name is another file's by now."""
        try:
            file = os.open(link[1], os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        if os.fstat(file).st_ino != link[0]:
            os.close(file)
            return False
        self._adopt(file)
        return True

    def _begin(self) -> bool:
        """The file was not there when we came: its first one may be another's rotated by now."""
        self.at_oldest()
        return self._file >= 0

    def _adopt(self, file: int) -> None:
        self.close()
        self._file = file
        status = os.fstat(file)
        self._inode = (status.st_dev, status.st_ino)
        self._rest.clear()
        self._seek(0)

    def _seek(self, offset: int) -> None:
        self._offset = offset
        self._head = b""

    def _size(self) -> int:
        return os.fstat(self._file).st_size

    def _matches(self, cursor: dict[str, Any]) -> bool:
        if self._inode[1] != cursor.get("inode") or self._size() < int(cursor["offset"]):
            return False
        # Device numbers change with a remount or a reboot; the head decides then.
        length, checksum = cursor.get("head") or (0, 0)
        return zlib.crc32(os.pread(self._file, int(length), 0)) == checksum

    def _successor(self) -> tuple[int, bool] | None:
        """The file that was begun when ours was renamed, and whether some between may be lost;
        None while ours is the current one or is just being renamed."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.path).st_ino == self._inode[1]:
                return None
        ours = os.fstat(self._file)
        gap = ours.st_nlink == 0
        if gap:
            # Ours was removed: on with the oldest that was written to after it.
            link = self._chain.written_since(ours.st_mtime_ns)
        else:
            link = self._chain.after(self._inode[1])
        if link is None:
            return None
        try:
            file = os.open(link[1], os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if os.fstat(file).st_ino != link[0]:
            os.close(file)
            return None
        return file, gap


def _mark_at(index: str, since: float) -> tuple[bool, tuple[int, int] | None]:
    """Whether there are marks; inode and offset of the first that is not too old.

    What stands behind a mark was written less than ``INDEX_EVERY_S`` after it: whatever comes later
    has a mark of its own. None if all are too old.
    """
    marked = False
    found = None
    with contextlib.suppress(OSError, ValueError), open(index, "rb") as file:
        for line in file:
            fields = line.split()
            if len(fields) != 3:
                continue
            marked = True
            if float(fields[0]) <= since - INDEX_EVERY_S:
                # The clock may have been set back: what counts is what follows the last old one.
                found = None
            elif found is None:
                found = (int(fields[1]), int(fields[2]))
    return marked, found


def _last_lines(file: int, count: int) -> tuple[int, int]:
    """How many of the last ``count`` lines the file has, and where they begin."""
    end = os.fstat(file).st_size
    if count <= 0 or end == 0:
        return 0, end
    found = 0
    start = end
    # The end of the last line does not begin another.
    limit = end - 1 if os.pread(file, 1, end - 1) == b"\n" else end
    while start > 0:
        begin = max(0, start - (64 << 10))
        data = os.pread(file, start - begin, begin)
        position = min(len(data), limit - begin)
        while (position := data.rfind(b"\n", 0, position)) >= 0:
            found += 1
            if found == count:
                return found, begin + position + 1
        start = begin
    return found + 1, 0
