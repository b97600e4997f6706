"""File contents by sha256: what any push brought, so that only what is new has to travel.

No two releases share a file: a job that edits one of its own in place must not change another
release. What a damaged blob says is checked against its name whenever a release is made of it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator

from orchestrator.agent.files import make_private, write_all
from orchestrator.agent.protocol import AgentError
from orchestrator.paths import ContainerPaths

_FICLONE = 0x40049409
_PIECE = 1 << 20


class BlobStore:
    """``verified`` collects the digests that this process itself received and hashed."""

    def __init__(self, paths: ContainerPaths, verified: set[str]) -> None:
        self._paths = paths
        self._verified = verified
        self._cloning = True

    def has(self, digest: str, size: int) -> bool:
        """Cheap: by size. The bytes are verified when they are copied."""
        try:
            return os.stat(self._paths.blob(digest)).st_size == size
        except FileNotFoundError:
            return False

    def receive(self, wanted: Iterable[tuple[str, int]], stream: Iterator[bytes]) -> int:
        """Store the blobs whose bytes follow one another in the stream; the bytes stored.

        ``AgentError`` ``release.corrupt`` at the first that is not what its digest says, or when
        there are too few or too many bytes; those before it stay.
        """
        make_private(self._paths.blobs)
        total = 0
        with _Incoming(self._paths.blobs) as folder:
            # A view: cutting the bytes themselves would copy each piece once for every small file.
            rest = memoryview(b"")
            for number, (digest, size) in enumerate(wanted):
                rest = self._receive_one(f"{folder}/{number}", digest, size, rest, stream)
                total += size
            if rest or any(stream):
                raise AgentError("release.corrupt", "there are more bytes than were announced")
        return total

    def _receive_one(
        self, temporary: str, digest: str, size: int, rest: memoryview, stream: Iterator[bytes]
    ) -> memoryview:
        hasher = hashlib.sha256()
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
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
        finally:
            os.close(file)
        if hasher.hexdigest() != digest:
            raise AgentError("release.corrupt", f"not the bytes of {digest}", digest=digest)
        target = self._paths.blob(digest)
        make_private(os.path.dirname(target))
        os.rename(temporary, target)
        self._verified.add(digest)
        return rest

    def place(self, digest: str, size: int, target: bytes, mode: int, stamp: int) -> bool:
        """Make ``target`` a file with these bytes, verified.

        A blob that no release has yet is linked: that saves writing everything twice. It is from
        then on that release's to damage, so every later release gets a copy, and the copy is
        hashed. False if the blob is absent or no longer what its name says; it is then gone, to be
        sent again.
        """
        source = self._paths.blob(digest)
        try:
            blob = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            unused = os.fstat(blob).st_nlink == 1
            if unused:
                good = digest in self._verified or _digest(blob) == digest
                if good:
                    _dress(blob, mode, stamp)
                    os.link(source, target)
            else:
                good = self._copy(blob, target, mode, stamp) == digest
            if not good:
                os.unlink(source)
            return good and os.fstat(blob).st_size == size
        finally:
            os.close(blob)

    def _copy(self, blob: int, target: bytes, mode: int, stamp: int) -> str:
        """The digest of what was copied."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(target, flags, mode)
        try:
            digest = _digest(blob, -1 if self._clone(blob, file) else file)
            _dress(file, mode, stamp)
            return digest
        finally:
            os.close(file)

    def _clone(self, blob: int, file: int) -> bool:
        if not self._cloning:
            return False
        try:
            fcntl.ioctl(file, _FICLONE, blob)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Not with this file system: do not ask 2,000 times.
            self._cloning = False
            return False
        return True

    def sweep(self, needed: set[str], older_than: float) -> tuple[int, int]:
        """Remove what is not needed and not new; how many, how many bytes."""
        count = size = 0
        for folder in _entries(self._paths.blobs):
            if folder.name.startswith("."):
                continue
            for entry in _entries(folder.path):
                status = entry.stat(follow_symlinks=False)
                if entry.name in needed or status.st_mtime > older_than:
                    continue
                os.unlink(entry.path)
                count += 1
                size += status.st_size
        return count, size


def _digest(source: int, copy_to: int = -1) -> str:
    """sha256 of all that ``source`` holds, written to ``copy_to`` on the way."""
    hasher = hashlib.sha256()
    while data := os.read(source, _PIECE):
        hasher.update(data)
        if copy_to >= 0:
            write_all(copy_to, data)
    return hasher.hexdigest()


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
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def working_folder(beside: str, prefix: str) -> tuple[str, int]:
    """A new folder and the descriptor whose flock says, as long as we live, that it is in use."""
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=beside)
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
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
