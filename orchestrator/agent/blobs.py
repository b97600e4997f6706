"""File contents by sha256: what any push brought, so that only what is new has to travel.

No two releases share a file: a job that edits one of its own in place must not change another
release. What a damaged blob says is checked against its name whenever a release is made of it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.agent.files import (
    make_private,
    new_name,
    remove_tree,
    sync_files,
    taken,
    write_all,
)
from orchestrator.agent.protocol import AgentError
from orchestrator.paths import ContainerPaths

_PIECE = 1 << 20
_COPY_PIECE = 1 << 30
_NO_COPYING = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""What a kernel or a file system says that cannot do it."""
_WRITE_EARLY = 32 << 10
"""Bytes of a copied file from which on the disk is told of it at once: of 100 MB, ``syncfs`` then
waits for 0.07 s instead of 0.17 s. Smaller ones are better written many at a time."""
_SYNC_EARLY = 4 << 20
"""Bytes of one request's blobs from which on they are brought to the disk while the next are under
way: of 100 MB the commit then waits for 0.07 s instead of 0.19 s. For less, a flush more costs more
than it saves."""


def untouched(status: os.stat_result, stamps: Mapping[int, int]) -> bool:
    """Whether nothing was done to a file since it was verified: it has the modification time that
    was given it then (a key), and no change after it was settled (the value). A job's `cp -p` of
    one pushed file over another sets the first alone."""
    return status.st_ctime_ns <= stamps.get(status.st_mtime_ns, -1)


class BlobStore:
    """``stamps``: see :func:`untouched`."""

    def __init__(self, paths: ContainerPaths, stamps: Mapping[int, int] | None = None) -> None:
        self._paths = paths
        self._stamps = stamps or {}
        self._folders: set[str] = set()

    def has(self, digest: str, size: int) -> bool:
        """Cheap: by size. The bytes are verified when they are copied."""
        try:
            return os.stat(self._paths.blob(digest)).st_size == size
        except FileNotFoundError:
            return False

    def receive(
        self, wanted: Sequence[tuple[str, int]], stream: Iterator[bytes], stamp: int | None
    ) -> int:
        """Store the blobs whose bytes follow one another in the stream; the bytes stored.

        :param stamp: the modification time of those that verify.

        ``AgentError`` ``release.corrupt`` at the first that is not what its digest says, or when
        there are too few or too many bytes; those before it stay.
        """
        make_private(self._paths.blobs)
        total = 0
        with _Incoming(self._paths.blobs) as folder:
            # A view: cutting the bytes themselves would copy each piece once for every small file.
            rest = memoryview(b"")
            for number, (digest, size) in enumerate(wanted):
                rest = self._receive_one(f"{folder}/{number}", digest, size, rest, stream, stamp)
                total += size
            if rest or any(stream):
                raise AgentError("release.corrupt", "there are more bytes than were announced")
        if total >= _SYNC_EARLY:
            sync_files(self._paths.blobs, (self._paths.blob(digest) for digest, _ in wanted))
        return total

    def _receive_one(
        self,
        temporary: str,
        digest: str,
        size: int,
        rest: memoryview,
        stream: Iterator[bytes],
        stamp: int | None,
    ) -> memoryview:
        hasher = hashlib.sha256()
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            missing = size
            while missing:
                if not rest:
                    rest = memoryview(next(stream, b""))
                    if not rest:
                        raise AgentError("release.corrupt", f"{digest} ended early", digest=digest)
                piece, rest = rest[:missing], rest[missing:]
                hasher.update(piece)
                write_all(file, piece)
                missing -= len(piece)
            if hasher.hexdigest() != digest:
                raise AgentError("release.corrupt", f"not the bytes of {digest}", digest=digest)
            if stamp is not None:
                os.utime(file, ns=(stamp, stamp))
        finally:
            os.close(file)
        target = self._paths.blob(digest)
        folder = os.path.dirname(target)
        if folder not in self._folders:
            make_private(folder)
            self._folders.add(folder)
        os.rename(temporary, target)
        return rest

    def place(self, digest: str, size: int, target: bytes, mode: int, stamp: int) -> bool:
        """Make ``target`` a file with these bytes, verified.

        A blob that no release has yet is linked: that saves writing everything twice. It is from
        then on that release's to damage, so every later release gets a copy. False if the blob is
        absent or no longer what its name says; it is then gone, to be sent again.
        """
        source = self._paths.blob(digest)
        try:
            status = os.lstat(source)
        except FileNotFoundError:
            return False
        if status.st_size != size:
            good = False
        elif status.st_nlink == 1:
            os.link(source, target)
            good = _adopt(digest, target, mode, stamp)
        else:
            blob = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                good = self._copy(blob, digest, target, mode, stamp)
            finally:
                os.close(blob)
        if not good:
            os.unlink(source)
        return good

    def _copy(self, blob: int, digest: str, target: bytes, mode: int, stamp: int) -> bool:
        """Whether what was copied is what it should be."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(target, flags, mode)
        try:
            size = _copy_all(blob, file)
            # Looked at afterwards: whoever writes into it meanwhile is seen too.
            good = untouched(os.fstat(blob), self._stamps) or _digest(file) == digest
            if size >= _WRITE_EARLY:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            _dress(file, mode, stamp)
            return good
        finally:
            os.close(file)

    def sweep(self, needed: set[str], older_than: float) -> None:
        """Remove what is not needed and not new."""
        for folder in _entries(self._paths.blobs):
            if folder.name.startswith("."):
                continue
            for entry in _entries(folder.path):
                new = entry.stat(follow_symlinks=False).st_mtime > older_than
                if entry.name not in needed and not new:
                    os.unlink(entry.path)


def _adopt(digest: str, target: bytes, mode: int, stamp: int) -> bool:
    """Whether a blob that was linked is what it should be. It is dressed where it is linked to: at
    the source another push may have put its own meanwhile."""
    status = os.lstat(target)
    if status.st_mtime_ns == stamp:
        if stat.S_IMODE(status.st_mode) != mode:
            os.chmod(target, mode)
        return True
    file = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        good = _digest(file) == digest
        _dress(file, mode, stamp)
        return good
    finally:
        os.close(file)


def _digest(source: int) -> str:
    """sha256 of all that ``source`` holds."""
    hasher = hashlib.sha256()
    os.lseek(source, 0, os.SEEK_SET)
    while data := os.read(source, _PIECE):
        hasher.update(data)
    return hasher.hexdigest()


def _copy_all(source: int, target: int) -> int:
    """By the kernel alone, which shares the blocks where the file system can; the bytes copied."""
    size = 0
    try:
        while count := os.copy_file_range(source, target, _COPY_PIECE):
            size += count
    except OSError as error:
        if size or error.errno not in _NO_COPYING:
            raise
        while data := os.read(source, _PIECE):
            write_all(target, data)
            size += len(data)
    return size


def _dress(file: int, mode: int, stamp: int) -> None:
    os.fchmod(file, mode)
    os.utime(file, ns=(stamp, stamp))


class _Incoming:
    """A folder for what is on its way, held by an flock so that others see who is dead."""

    def __init__(self, beside: str) -> None:
        self.path, self._lock = working_folder(beside, ".in-")

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *exception: object) -> None:
        remove_tree(self.path)
        os.close(self._lock)


def working_folder(beside: str, prefix: str) -> tuple[str, int]:
    """A new folder and the descriptor whose flock says, as long as we live, that it is in use."""
    while True:
        path = new_name(beside, prefix)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        # Until it is locked it looks dead, and whoever begins a push may remove it.
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.isdir(path):
            return path, descriptor
        os.close(descriptor)


def clean_dead(folder: str, prefix: str) -> None:
    """Remove working folders whose owner was killed."""
    for entry in _entries(folder):
        if not entry.name.startswith(prefix):
            continue
        try:
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if not taken(descriptor):
                remove_tree(entry.path)
        finally:
            os.close(descriptor)


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
