"""Small records on disk: whole or absent, never half."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """:raises OSError: with the file's path, which the kernel leaves out: whose disk is full?"""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        raise OSError(error.errno, error.strerror, path) from error


def remove_tree(path: str) -> None:
    """As far as it can be."""
    # 3 ms of every start, for the formats of archives that it knows.
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def new_name(folder: str, prefix: str) -> str:
    """Of a file or a folder that is nobody's yet: ``tempfile`` takes 4 ms of every start."""
    return f"{folder}/{prefix}{os.getpid()}-{time.time_ns():x}"


def space(path: str) -> tuple[int, int]:
    """Bytes that are free for us, and all, of the file system that holds it."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def sync_folder(path: str) -> None:
    """Makes a rename inside it survive a power cut."""
    _sync(path)


_SYNC_ALL_BELOW = 1 << 30
"""Bytes of dirty memory up to which one ``syncfs`` is quicker than an fsync for each file: 0.09 s
against 0.77 s for 2,000 files of 50 KB. Beyond, it would wait for somebody's checkpoint."""


def sync_tree(root: str) -> None:
    """Everything below ``root`` is on the disk when this returns."""
    sync_files(root, _below(root))


def sync_files(folder: str, paths: Iterable[str]) -> None:
    """Whatever lies at ``paths``, in the file system of ``folder``, is on the disk when this
    returns."""
    if _dirty_memory() < _SYNC_ALL_BELOW and _syncfs(folder):
        return
    # Where syncfs failed, each tells whether it was this one that could not be written.
    for path in paths:
        _sync(path)


def _below(root: str) -> Iterator[str]:
    for folder, _, names in os.walk(root):
        paths = (f"{folder}/{name}" for name in names)
        yield from (path for path in paths if not os.path.islink(path))
        yield folder


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dirty_memory() -> int:
    with open("/proc/meminfo") as file:
        lines = [line.split() for line in file if line.startswith(("Dirty:", "Writeback:"))]
    return sum(int(line[1]) << 10 for line in lines)


def _syncfs(path: str) -> bool:
    import ctypes

    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return bool(ctypes.CDLL(None, use_errno=True).syncfs(folder) == 0)
    finally:
        os.close(folder)


def write_record(path: str, record: dict[str, Any], *, durable: bool = True) -> None:
    """JSON by temporary file and rename, mode 0600. ``OSError`` leaves what was there before."""
    write_bytes(path, (json.dumps(record, indent=1) + "\n").encode(), durable=durable)


def write_bytes(path: str, data: bytes, *, durable: bool = True) -> None:
    temporary = f"{path}.tmp{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        write_all(descriptor, data)
        if durable:
            os.fsync(descriptor)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)


def make_private(path: str) -> None:
    """The folder and its missing parents, each 0700: ``os.makedirs`` gives its mode to the last."""
    if os.path.isdir(path):
        return
    make_private(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def read_record(path: str) -> dict[str, Any] | None:
    """None if it is absent or does not parse (a disk that lost its end)."""
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


@contextlib.contextmanager
def locked(path: str, *, shared: bool = False) -> Iterator[None]:
    """An flock on a file of that name; it goes with the process, however that ends."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def taken(descriptor: int) -> bool:
    """Whether somebody else holds an flock on it. Else we do from now on, until it is closed."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


_TAIL_BYTES = 64 << 10


def tail_lines(path: str, count: int) -> list[str]:
    """The last whole or unfinished lines within the last 64 KiB; [] if there are none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            data = file.read(_TAIL_BYTES)
    except OSError:
        return []
    if start and b"\n" in data:
        data = data[data.index(b"\n") + 1 :]
    # A progress bar redraws its line after \r: what a terminal would show is the last drawing.
    lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in data.split(b"\n")]
    if lines and not lines[-1]:
        lines.pop()
    return [line.decode("utf-8", "replace") for line in lines[-count:]] if count > 0 else []
