"""The releases that are there: which are whole, which are in use, which may go."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from orchestrator.agent.blobs import BlobStore, untouched
from orchestrator.agent.files import (
    locked,
    make_private,
    new_name,
    read_record,
    remove_tree,
    taken,
)
from orchestrator.agent.manifest import Entry, parse
from orchestrator.agent.protocol import AgentError
from orchestrator.agent.serve import Request
from orchestrator.paths import ContainerPaths

FRESH_S = 3600.0
"""Blobs younger than this may belong to a push in flight."""


class Examined(NamedTuple):
    intact: bool
    """Every entry of the manifest is there, unchanged."""
    foreign: list[str]
    """Paths that are not of the manifest: what a job wrote into its own code, byte code aside."""


def names(paths: ContainerPaths) -> list[str]:
    """Releases with a record, the last pushed first."""
    return [name for _, name in sorted(_pushed(paths), reverse=True)]


def _pushed(paths: ContainerPaths) -> list[tuple[int, str]]:
    """Each release and when, by the modification time of its record."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(paths.releases):
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            pushed = 0
            with contextlib.suppress(FileNotFoundError):
                pushed = os.stat(paths.release_record(entry.name)).st_mtime_ns
            found.append((pushed, entry.name))
    return found


def make_last(paths: ContainerPaths, name: str) -> None:
    """It counts as pushed after all others, also where the clock was set back since, or the file
    system tells only whole seconds: the pruning that follows would remove what was just pushed."""
    others = (pushed for pushed, other in _pushed(paths) if other != name)
    now = max(time.time_ns(), max(others, default=0) + 1_000_000_000)
    os.utime(paths.release_record(name), ns=(now, now))


def stamps(paths: ContainerPaths) -> dict[int, int]:
    """The modification times that releases gave their files, and when each was settled."""
    records = (read_record(paths.release_record(name)) or {} for name in names(paths))
    return {record["stamp"]: record.get("settled", 0) for record in records if "stamp" in record}


def hold(paths: ContainerPaths, name: str) -> int:
    """Keeps a release from being pruned until the descriptor is closed, or its process has ended:
    a launch has the config checked with it before a run stands in for it."""
    descriptor = os.open(paths.release_record(name), os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _held(paths: ContainerPaths, name: str) -> bool:
    try:
        descriptor = os.open(paths.release_record(name), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return taken(descriptor)
    finally:
        os.close(descriptor)


def versions(paths: ContainerPaths, name: str) -> list[str]:
    """The release of that content and those that were made beside it after a job altered it."""
    found: list[str] = []
    number = 1
    while True:
        version = name if number == 1 else f"{name}-{number}"
        if not os.path.isdir(paths.release(version)):
            return found
        found.append(version)
        number += 1


def examine(paths: ContainerPaths, name: str, entries: list[Entry]) -> Examined:
    """Compare a tree with its manifest; contents are read only where size or times differ."""
    record = read_record(paths.release_record(name))
    if record is None:
        return Examined(False, [])
    root = os.fsencode(paths.release(name))
    expected = {os.fsencode(entry.path) for entry in entries}
    known = {record.get("stamp", 0): record.get("settled", 0)}
    for entry in entries:
        if not _unchanged(root + b"/" + os.fsencode(entry.path), entry, known):
            return Examined(False, _foreign(root, expected))
    return Examined(True, _foreign(root, expected))


def _unchanged(path: bytes, entry: Entry, stamps: Mapping[int, int]) -> bool:
    try:
        status = os.lstat(path)
        if entry.kind == "l":
            return stat.S_ISLNK(status.st_mode) and os.readlink(path) == os.fsencode(entry.target)
        if entry.kind == "d":
            return stat.S_ISDIR(status.st_mode)
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
            return False
        if bool(status.st_mode & 0o100) != entry.executable:
            return False
        if untouched(status, stamps):
            return True
        with open(path, "rb") as file:
            hasher = hashlib.sha256()
            while data := file.read(1 << 20):
                hasher.update(data)
        return hasher.hexdigest() == entry.digest
    except OSError:
        return False


def _foreign(root: bytes, expected: set[bytes]) -> list[str]:
    found: list[str] = []
    parents = {path[:cut] for path in expected for cut in _slashes(path)}
    waiting = [b""]
    while waiting:
        folder = waiting.pop()
        for entry in os.scandir(root + b"/" + folder if folder else root):
            path = folder + b"/" + entry.name if folder else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and (path in parents or path in expected):
                waiting.append(path)
            elif path not in expected and entry.name != b"__pycache__":
                found.append(os.fsdecode(path))
    return found


def _slashes(path: bytes) -> list[int]:
    return [index for index, byte in enumerate(path) if byte == 0x2F]


def _users(request: Request) -> dict[str, list[str]]:
    """Live runs by the release they run from."""
    from orchestrator.agent.status import live_runs

    users: dict[str, list[str]] = {}
    for record in live_runs(request.paths):
        if record.get("release"):
            users.setdefault(record["release"], []).append(record.get("run_id", ""))
    return users


def _manifest(paths: ContainerPaths, name: str) -> bytes:
    try:
        with open(paths.release_manifest(name), "rb") as file:
            return file.read()
    except FileNotFoundError as error:
        raise AgentError(
            "release.not_found", f"there is no release {name}", release=name
        ) from error


def prune(request: Request) -> dict[str, Any]:
    """Old releases, and after the answer their files and the blobs that only they had.

    What a job wrote into stays: whoever put results beside the code must find them again. Such
    releases are told in ``kept``; what cannot be removed, in ``failed``: a release at once, what
    was in it by the next prune.
    """
    paths = request.paths
    keep = request.need("keep", int)
    make_private(paths.releases)
    for push in list(request.server.pushes.values()):
        push.let_go()
    removed: list[str] = []
    kept: list[dict[str, Any]] = []
    with locked(paths.lock):
        failed = _clear(paths)
        old = names(paths)[max(keep, 0) :]
        users = _users(request) if old else {}
        for name in old:
            if name in users:
                kept.append({"release": name, "why": "in use", "runs": users[name]})
                continue
            if _held(paths, name):
                kept.append({"release": name, "why": "just pushed by somebody who is still there"})
                continue
            try:
                if written := _written_by_a_job(paths, name)[:10]:
                    kept.append({"release": name, "why": "holds files of a job", "files": written})
                else:
                    _hide(paths, name)
                    removed.append(name)
            except OSError as error:
                failed.append({"path": paths.release(name), "why": error.strerror})
    if removed:
        # Of 2,000 files it takes 0.2 s, which a push of one changed file would wait for every time.
        request.afterwards = lambda: _remove_hidden(paths)
    return {"removed": removed, "kept": kept, "failed": failed}


def _remove_hidden(paths: ContainerPaths) -> None:
    with locked(paths.lock):
        _clear(paths)
        BlobStore(paths).sweep(_needed(paths), time.time() - FRESH_S)


def _written_by_a_job(paths: ContainerPaths, name: str) -> list[str]:
    try:
        entries = parse(_manifest(paths, name))
    except AgentError:
        return ["(its manifest is gone)"]
    found = examine(paths, name, entries)
    return found.foreign or ([] if found.intact else ["(a file that was pushed is changed)"])


_HIDDEN = ".removed-"


def _hide(paths: ContainerPaths, name: str) -> None:
    """Out of sight by one rename: half a release is never seen."""
    os.rename(paths.release(name), new_name(paths.releases, _HIDDEN))
    for path in (paths.release_record(name), paths.release_manifest(name)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _clear(paths: ContainerPaths) -> list[dict[str, Any]]:
    """Removes what is out of sight; what cannot be removed (something is mounted there, say), and
    why."""
    import shutil

    stays = []
    for entry in list(os.scandir(paths.releases)):
        if not entry.name.startswith(_HIDDEN):
            continue
        remove_tree(entry.path)
        try:
            # Of what is left after that, the first failure is the reason.
            shutil.rmtree(entry.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            stays.append({"path": entry.path, "why": error.strerror})
    return stays


def _needed(paths: ContainerPaths) -> set[str]:
    needed: set[str] = set()
    for name in names(paths):
        with contextlib.suppress(AgentError):
            needed.update(entry.digest for entry in parse(_manifest(paths, name)))
    return needed
