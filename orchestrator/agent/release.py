"""``release.begin``, ``release.blobs`` and ``release.commit``: code in, as immutable trees.

A tree is built beside and gets its name by one rename after everything in it was verified and
synced: whoever is killed at whatever byte leaves the old releases and a dead working folder, which
the next ``begin`` removes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

from orchestrator.agent.blobs import BlobStore, clean_dead, working_folder
from orchestrator.agent.files import (
    locked,
    make_private,
    remove_tree,
    space,
    sync_folder,
    sync_tree,
    write_bytes,
    write_record,
)
from orchestrator.agent.manifest import DIGEST, Entry, digest_of, parse, release_id
from orchestrator.agent.protocol import AgentError
from orchestrator.agent.release_store import examine, hold, make_last, stamps, versions
from orchestrator.agent.serve import Request
from orchestrator.paths import ContainerPaths

MANIFEST_LIMIT = 256 << 20
"""About two million files."""


class Push:
    """What ``begin`` learned, kept for ``commit`` on the same channel."""

    def __init__(self, manifest: bytes) -> None:
        self.stamp = time.time_ns()
        """The modification time of all its files: what has it was verified, on any channel."""
        self.manifest = manifest
        self.entries = parse(manifest)
        self.digest = digest_of(manifest)
        self.name = release_id(manifest)
        self.bytes = sum(entry.size for entry in self.entries)
        self.files = sum(entry.kind == "f" for entry in self.entries)
        self._held: int | None = None

    def hold(self, paths: ContainerPaths, name: str) -> None:
        """Until the channel ends, or asks for pruning itself."""
        self.let_go()
        self._held = hold(paths, name)

    def let_go(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None


def begin(request: Request) -> dict[str, Any]:
    push = Push(request.read_input(MANIFEST_LIMIT))
    request.server.pushes[request.id] = push
    clean_dead(request.paths.releases, ".staging-")
    clean_dead(request.paths.blobs, ".in-")
    existing = _intact(request.paths, push)
    missing = [] if existing else _missing(BlobStore(request.paths), push)
    return {
        "release": existing or push.name,
        "present": existing is not None,
        "missing": missing,
        "bytes": sum(push.entries[index].size for index in missing),
        "stamp": push.stamp,
    }


def blobs(request: Request) -> dict[str, Any]:
    wanted = []
    for item in request.need("blobs", list):
        match item:
            case [str(digest), int(size)] if DIGEST.fullmatch(digest) and size >= 0:
                wanted.append((digest, size))
            case _:
                raise AgentError("request.invalid", f"not a blob: {item!r}", field="blobs")
    stamp = request.get("stamp", int, None)
    size = BlobStore(request.paths).receive(wanted, request.input(), stamp)
    return {"stored": len(wanted), "bytes": size}


def commit(request: Request) -> dict[str, Any]:
    push = request.server.pushes.get(request.need("begin", int))
    if push is None:
        raise AgentError(
            "request.invalid", "there was no such begin on this channel", field="begin"
        )
    make_private(request.paths.releases)
    # One at a time, so that no blob is linked into two releases; pruning waits as well.
    with locked(f"{request.paths.releases}/.build"), locked(request.paths.lock, shared=True):
        existing = _intact(request.paths, push)
        meta = request.get("meta", dict, {})
        name = existing or _build(request, push, meta)
        make_last(request.paths, name)
        push.hold(request.paths, name)
    return {
        "release": name,
        "path": request.paths.release(name),
        "existing": existing is not None,
        "files": push.files,
        "bytes": push.bytes,
    }


def _intact(paths: ContainerPaths, push: Push) -> str | None:
    """A release of this very content that no job has altered."""
    for name in versions(paths, push.name):
        found = examine(paths, name, push.entries)
        if found.intact and not found.foreign:
            return name
    return None


def _missing(store: BlobStore, push: Push) -> list[int]:
    seen: set[str] = set()
    missing = []
    for index, entry in enumerate(push.entries):
        if entry.kind != "f" or entry.digest in seen:
            continue
        seen.add(entry.digest)
        if not store.has(entry.digest, entry.size):
            missing.append(index)
    return missing


def _build(request: Request, push: Push, meta: dict[str, Any]) -> str:
    paths = request.paths
    free, _ = space(paths.releases)
    if push.bytes > free:
        raise AgentError(
            "disk.full",
            f"the release needs {push.bytes} bytes, {paths.releases} has {free} left",
            path=paths.releases,
        )
    staging, lock = working_folder(paths.releases, ".staging-")
    try:
        tree = f"{staging}/tree"
        # Its own too: what is there twice is copied once.
        store = BlobStore(paths, {push.stamp: sys.maxsize, **stamps(paths)})
        bad = _write_tree(store, push.entries, tree, push.stamp)
        if bad:
            raise AgentError(
                "release.missing",
                f"{len(bad)} of {push.files} files were not sent, or damaged here",
                indices=bad,
            )
        write_bytes(f"{staging}/manifest", push.manifest, durable=False)
        record = {
            "manifest": push.digest,
            "stamp": push.stamp,
            # By the clock of the file system, which need not be ours.
            "settled": os.stat(f"{staging}/manifest").st_ctime_ns,
            "created": time.time(),
            "files": push.files,
            "bytes": push.bytes,
            "meta": meta,
        }
        write_record(f"{staging}/record", record, durable=False)
        sync_tree(staging)
        return _name(paths, push, staging, tree)
    finally:
        remove_tree(staging)
        os.close(lock)


def _name(paths: ContainerPaths, push: Push, staging: str, tree: str) -> str:
    """The rename that makes it a release."""
    number = 1
    name = push.name
    while os.path.lexists(paths.release(name)):
        number += 1
        name = f"{push.name}-{number}"
    # The tree last: a record without a tree is as nothing.
    os.rename(f"{staging}/manifest", paths.release_manifest(name))
    os.rename(f"{staging}/record", paths.release_record(name))
    os.rename(tree, paths.release(name))
    sync_folder(paths.releases)
    return name


def _write_tree(store: BlobStore, entries: list[Entry], tree: str, stamp: int) -> list[int]:
    """All entries below ``tree``; indices of files whose blob is absent or damaged."""
    root = os.fsencode(tree)
    folders = {b""}
    os.mkdir(root, 0o755)
    bad: list[int] = []
    for index, entry in enumerate(entries):
        name = os.fsencode(entry.path)
        _make_folders(root, name if entry.kind == "d" else os.path.dirname(name), folders)
        path = root + b"/" + name
        if entry.kind == "l":
            os.symlink(os.fsencode(entry.target), path)
        elif entry.kind == "f":
            mode = 0o755 if entry.executable else 0o644
            if not store.place(entry.digest, entry.size, path, mode, stamp):
                bad.append(index)
    return bad


def _make_folders(root: bytes, name: bytes, known: set[bytes]) -> None:
    if name in known:
        return
    _make_folders(root, os.path.dirname(name), known)
    with contextlib.suppress(FileExistsError):
        os.mkdir(root + b"/" + name, 0o755)
    known.add(name)
