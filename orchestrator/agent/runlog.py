"""Where a run's output goes: ``train.log``, which must lose nothing, and the pane, which may.

Neither may ever stop the run: a full disk, a dead pane or a frozen tmux server is noted and counted
while the command goes on writing into the pipe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time

from orchestrator.agent.files import write_all, write_bytes
from orchestrator.agent.rotation import INDEX_EVERY_S
from orchestrator.paths import RunPaths

BACKLOG = 8 << 20
"""Bytes kept in memory while the log cannot be written: about 80,000 lines."""

PANE_BACKLOG = 256 << 10
"""A pane shows a few dozen lines; what it cannot keep up with is left out of it."""

RETRY_S = 0.5


class RunLog:
    """``train.log``, rotated by rename, with an index from times to offsets.

    ``lost`` counts bytes that could not be kept. Rotation happens only between lines, so that every
    file begins with a whole one.
    """

    def __init__(self, paths: RunPaths, limit: int, files: int) -> None:
        self._paths = paths
        self._limit = limit
        self._files = files
        self._backlog = bytearray()
        self._lost_now = 0
        self._reason = ""
        self._retry_at = 0.0
        self._index_at = 0.0
        self._line_start = True
        self.lost = 0
        self.written = 0
        self._open()

    def _open(self, name: str = "") -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(name or self._paths.log, flags, 0o600)
        status = os.fstat(self._file)
        self._size = status.st_size
        self._inode = (status.st_dev, status.st_ino)

    @property
    def troubled(self) -> bool:
        """Something waits for space."""
        return bool(self._backlog) or self._lost_now > 0

    def write(self, data: bytes) -> None:
        if self.troubled:
            self._keep(data)
            if time.monotonic() >= self._retry_at:
                self.retry()
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._put(rest) :]
        except OSError as error:
            self._fail(error)
            self._keep(rest)

    def note(self, text: str) -> None:
        """A line of our own among the run's."""
        start = b"" if self._line_start else b"\n"
        self.write(b"%s[dflashctl] %s\n" % (start, text.encode("utf-8", "backslashreplace")))

    def retry(self) -> None:
        """Write what waits; called every now and then, cheap when nothing does."""
        if not self.troubled:
            self._follow_removal()
            return
        try:
            if self._lost_now:
                text = f"{self._lost_now} bytes of output are lost here: {self._reason}"
                start = b"" if self._line_start else b"\n"
                write_all(self._file, b"%s[dflashctl] %s\n" % (start, text.encode()))
                self._lost_now = 0
                self._line_start = True
                self._size = os.fstat(self._file).st_size
            while self._backlog:
                del self._backlog[: self._put(memoryview(bytes(self._backlog[: 1 << 20])))]
        except OSError as error:
            self._fail(error)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                # ESTALE or EIO of a mount that went and came again: this descriptor stays bad.
                self._reopen()

    def close(self) -> None:
        """What still waits is counted as lost."""
        self.retry()
        self.lost += len(self._backlog)
        os.close(self._file)

    def _put(self, data: memoryview) -> int:
        """Write a piece of it, at most up to where the file is to be rotated."""
        if self._size + len(data) > self._limit:
            data = self._fitting(data)
        if self._line_start:
            self._mark()
        done = os.write(self._file, data)
        self._size += done
        self.written += done
        if done:
            self._line_start = data[done - 1] in b"\n\r"
        return done

    def _fitting(self, data: memoryview) -> memoryview:
        """The lines of it that the file has room for; at least one, after a rotation if need be."""
        room = max(self._limit - self._size, 0)
        end = bytes(data[:room]).rfind(b"\n") + 1
        if not end and self._size and self._line_start:
            self._rotate()
            end = bytes(data[: self._limit]).rfind(b"\n") + 1
        if not end:
            end = bytes(data).find(b"\n") + 1
        return data[:end] if end else data

    def _mark(self) -> None:
        """The index: what stands from here on was written from now on."""
        now = time.time()
        # Also when the clock was set back, else no line would follow until it has caught up.
        if 0 <= now - self._index_at < INDEX_EVERY_S:
            return
        line = b"%.3f %d %d\n" % (now, self._inode[1], self._size)
        with contextlib.suppress(OSError), open(self._paths.log_index, "ab", 0) as index:
            index.write(line)
            self._index_at = now

    def _rotate(self) -> None:
        # The new file is made first: on a full disk the old one simply grows on.
        fresh = f"{self._paths.log}.new"
        old = self._file
        try:
            self._open(fresh)
        except OSError:
            self._limit = self._size + max(self._limit // 8, 1)
            return
        self._remove_oldest()
        for number in range(self._files - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._paths.rotated_log(number), self._paths.rotated_log(number + 1))
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._paths.log, self._paths.rotated_log(1))
        os.rename(fresh, self._paths.log)
        os.close(old)
        self._index_at = 0.0

    def _remove_oldest(self) -> None:
        """With its marks: the inode's number is soon another file's."""
        oldest = self._paths.rotated_log(self._files)
        with contextlib.suppress(FileNotFoundError):
            inode = b"%d" % os.stat(oldest).st_ino
            os.unlink(oldest)
            with open(self._paths.log_index, "rb") as index:
                marks = [line for line in index if line.split()[1:2] != [inode]]
            write_bytes(self._paths.log_index, b"".join(marks), durable=False)

    def _keep(self, data: bytes | memoryview) -> None:
        self._backlog += data
        excess = len(self._backlog) - BACKLOG
        if excess > 0:
            # Whole lines go, the oldest first: the newest tell how a run ended.
            cut = self._backlog.find(b"\n", excess) + 1 or excess
            del self._backlog[:cut]
            self._lost_now += cut
            self.lost += cut

    def _fail(self, error: OSError) -> None:
        self._reason = error.strerror or str(error)
        self._retry_at = time.monotonic() + RETRY_S

    def _follow_removal(self) -> None:
        """Someone removed or replaced ``train.log``: go on in a new one, not in a nameless file."""
        try:
            status = os.stat(self._paths.log)
            if (status.st_dev, status.st_ino) == self._inode:
                return
        except FileNotFoundError:
            pass
        except OSError:
            return
        self._reopen()

    def _reopen(self) -> None:
        old = self._file
        with contextlib.suppress(OSError):
            self._open()
            os.close(old)


class Pane:
    """The terminal of the tmux pane, written without ever waiting for it."""

    def __init__(self, descriptor: int) -> None:
        self.lost = 0
        self._backlog = bytearray()
        self._file = -1
        with contextlib.suppress(OSError):
            # Opened anew: O_NONBLOCK on the inherited one would be shared with the pane's process.
            flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
            self._file = os.open(os.ttyname(descriptor), flags)

    @property
    def waiting(self) -> int:
        """The descriptor to be polled for room; -1 if nothing waits."""
        return self._file if self._backlog else -1

    def write(self, data: bytes) -> None:
        if self._file < 0:
            self.lost += len(data)
            return
        self._backlog += data
        self.flush()
        excess = len(self._backlog) - PANE_BACKLOG
        if excess > 0:
            cut = self._backlog.find(b"\n", excess) + 1 or excess
            note = b"[dflashctl] %d bytes are not shown here; the log has them\n" % cut
            self._backlog[:cut] = note
            self.lost += cut

    def flush(self) -> None:
        try:
            while self._backlog:
                del self._backlog[: os.write(self._file, self._backlog[:4096])]
        except BlockingIOError:
            pass
        except OSError:
            # EIO: the pane or the tmux server is gone. The run goes on.
            self.close()

    def close(self) -> None:
        self.lost += len(self._backlog)
        self._backlog.clear()
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = -1
