"""``pull.list``, ``pull.read`` and ``pull.last_checkpoint``: files out, resumable and verified."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from typing import Any

from orchestrator.agent import checkpoints
from orchestrator.agent.protocol import AgentError
from orchestrator.agent.serve import Request

PIECE = 256 << 10
LINES_BYTES = 64 << 10
TELL_EVERY = 64 << 20


def listing(request: Request) -> dict[str, Any]:
    # What is named is what is meant: `checkpoints/best` is a link. Links below it are told as such.
    root = os.path.realpath(_path(request))
    files = size = 0
    waiting: list[str] = []
    length = 0
    for entry in _walk(root):
        files += entry[0] == "f"
        size += entry[2] if entry[0] == "f" else 0
        waiting.append(json.dumps(entry, separators=(",", ":")) + "\n")
        length += len(waiting[-1])
        if length >= LINES_BYTES:
            request.send({}, "".join(waiting).encode("ascii"))
            waiting, length = [], 0
    if waiting:
        request.send({}, "".join(waiting).encode("ascii"))
    return {"root": root, "files": files, "bytes": size}


def _path(request: Request) -> str:
    path = request.get("path", str, "")
    if "\0" in path:
        raise AgentError("request.invalid", "a path holds NUL", field="path")
    if request.get("run_id", str) is None:
        if not path.startswith("/"):
            raise AgentError("request.invalid", f"not an absolute path: {path!r}", field="path")
        return path
    from orchestrator.agent.status import find

    if path.startswith("/") or ".." in path.split("/"):
        raise AgentError("request.invalid", f"not a path below a run: {path!r}", field="path")
    return os.path.join(find(request).root, path) if path else find(request).root


def _walk(root: str) -> Iterator[list[Any]]:
    """Entries below ``root``, sorted, links never followed; what is neither file, link nor folder
    (sockets, pipes) is left out."""
    status = os.lstat(root)
    if not stat.S_ISDIR(status.st_mode):
        found = _entry(root, "")
        if found is not None:
            yield found
        return
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        names = sorted(os.listdir(os.path.join(root, folder)), reverse=True)
        for name in names:
            relative = os.path.join(folder, name)
            try:
                found = _entry(os.path.join(root, relative), relative)
            except FileNotFoundError:
                continue
            if found is None:
                continue
            yield found
            if found[0] == "d":
                waiting.append(relative)


def _entry(path: str, name: str) -> list[Any] | None:
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return ["l", name, os.readlink(path)]
    if stat.S_ISDIR(status.st_mode):
        return ["d", name]
    if not stat.S_ISREG(status.st_mode):
        return None
    return ["f", name, status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode)]


def _hash(request: Request, file: int, length: int) -> hashlib._Hash:
    """Of the first ``length`` bytes; tells how far it is, so that silence is not taken for a
    dead link."""
    hasher = hashlib.sha256()
    done = 0
    while done < length:
        data = os.pread(file, min(1 << 20, length - done), done)
        if not data:
            break
        hasher.update(data)
        done += len(data)
        request.check()
        if done % TELL_EVERY == 0:
            request.send({"hashed": done})
    return hasher


def read(request: Request) -> dict[str, Any]:
    path = _path(request)
    offset = request.get("offset", int, 0)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        before = os.fstat(file)
        if not stat.S_ISREG(before.st_mode):
            raise AgentError("request.invalid", f"not a plain file: {path}", path=path)
        _expect(request, path, before)
        limit = request.get("limit", int)
        end = before.st_size if limit is None else limit
        if not 0 <= offset <= end <= before.st_size:
            raise AgentError("pull.changed", f"{path} is shorter than it was", path=path)
        hasher = _hash(request, file, offset)
        place = offset
        while place < end:
            data = os.pread(file, min(PIECE, end - place), place)
            if not data:
                break
            hasher.update(data)
            request.send({"offset": place}, data)
            place += len(data)
        after = os.fstat(file)
        if limit is not None:
            # A log that grows is no change of what was asked for.
            changed = after.st_size < end
        else:
            was = (before.st_size, before.st_mtime_ns)
            changed = (after.st_size, after.st_mtime_ns) != was
        if changed:
            raise AgentError("pull.changed", f"{path} changed while it was read", path=path)
    finally:
        os.close(file)
    return {
        "size": end,
        "sha256": hasher.hexdigest(),
        "mtime_ns": before.st_mtime_ns,
        "mode": stat.S_IMODE(before.st_mode),
    }


def _expect(request: Request, path: str, status: os.stat_result) -> None:
    expected = request.get("expect", dict, {})
    found = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    if any(expected.get(key, found[key]) != found[key] for key in found):
        raise AgentError("pull.changed", f"{path} is no longer what it was", path=path, **found)


def last_checkpoint(request: Request) -> dict[str, Any]:
    from orchestrator.agent.status import find

    folder = find(request).checkpoints
    paths = checkpoints.complete(folder)
    newest = paths[-1] if paths else None
    step = checkpoints.number(os.path.basename(newest)) if newest else -1
    return {
        "path": newest,
        "step": step if step >= 0 else None,
        "best": checkpoints.best(folder),
        "checkpoints": paths,
    }
