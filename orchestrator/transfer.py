"""Files out of a container: resumed after a cut, verified, never outside the destination."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator.agent.checkpoints import BEST
from orchestrator.agent_failure import kind_of
from orchestrator.channel import AgentChannel
from orchestrator.errors import ConnectionLost, HostUnreachable, NotFoundError, TransferError
from orchestrator.fleet import Fleet, Notice
from orchestrator.follow import BACKOFF_S
from orchestrator.laptop_path import writing
from orchestrator.paths import RunPaths
from orchestrator.request import Request
from orchestrator.target import Target

PARTS = ".dflashctl-pull"
"""Unfinished files lie here, below the destination; gone when all is done."""
# Small files are asked for ahead of their turn. Far below a request's backlog: a channel that waits
# for the reader of one request cannot serve another.
AHEAD_BYTES = 8 << 20
AHEAD_FILES = 32
IGNORE_FILE = ".gitignore"
IGNORED = "# Pulled out of a container by dflashctl: no part of the code.\n*\n"
GROWING = (".log", ".jsonl", ".index")
"""Names of what a run appends to."""
CHANGES = 3
"""How often a file that is rewritten under the reading is read again."""
# The values of environment variables stand in start.json: it is never part of a pull.
PRIVATE = frozenset({RunPaths("").start, RunPaths("").secrets})
CHECKPOINTS = RunPaths("").checkpoints
KEPT_FEATURES = ("data/features.bin", "data/features.json")
"""The target's features, which the trainer keeps so as not to make them again: 60 % of the demo's
run, at Qwen3-8B's shape 41 kB a token. Nothing at home reads them. Both or neither: a description
alone promises what is not there."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Listed:
    """A line of ``pull.list``: kind f, l or d."""

    kind: str
    path: str
    """Below the destination."""
    remote: str
    """The same in the container."""
    size: int = 0
    mtime_ns: int = 0
    mode: int = 0o644
    target: str = ""

    @classmethod
    def parse(cls, line: list[Any], root: str) -> Listed:
        kind, path, *rest = line
        # A root that is a file itself keeps its name.
        here, there = (path, f"{root}/{path}") if path else (PurePosixPath(root).name, root)
        if kind == "f":
            return cls(kind, here, there, *rest)
        return cls(kind, here, there, target=rest[0] if kind == "l" else "")


@dataclass
class Pulled:
    """What was done."""

    destination: Path
    files: int = 0
    bytes: int = 0
    unchanged: int = 0
    skipped: int = 0
    """Links that point outside what was pulled."""


class Wanted:
    """Which paths of a run's folder are fetched: everything public but kept features, and of the
    checkpoints some.

    :param every: all checkpoints, kept features too.
    :param checkpoints: names below ``checkpoints``.
    """

    def __init__(self, *, every: bool = False, checkpoints: Collection[str] = ()) -> None:
        self._every = every
        self._checkpoints = checkpoints

    def __call__(self, path: str) -> bool:
        if path in PRIVATE:
            return False
        if self._every:
            return True
        if not path.startswith(f"{CHECKPOINTS}/"):
            return path not in KEPT_FEATURES
        return path.split("/")[1] in self._checkpoints


def newest_and_best(channel: AgentChannel, run_id: str) -> Wanted:
    """The checkpoint to go on from, and the one to serve with the link that says so."""
    found = channel.call("pull.last_checkpoint", run_id=run_id)
    names = {PurePosixPath(path).name for path in (found["path"], found["best"]) if path}
    return Wanted(checkpoints={*names, BEST} if found["best"] else names)


def check_path(path: str) -> tuple[str, ...]:
    """The parts of a relative path that stays below its root.

    :raises TransferError: an absolute path, ``..``, or a name that no file can have.
    """
    pure = PurePosixPath(path)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\0" in path:
        raise TransferError(
            f"the container lists {path!r}, which would be written outside the destination",
            next_step="nothing of it was written; look at that folder in the container",
        )
    return pure.parts


def place(destination: Path, path: str) -> Path:
    """Where a listed path goes; its folders are made. No part on the way may be a link.

    :raises TransferError: it would leave the destination.
    """
    *folders, name = check_path(path)
    here = destination
    for folder in folders:
        here = _real_folder(here / folder)
    return here / name


def _real_folder(path: Path) -> Path:
    """``path``, made. :raises TransferError: it is a link."""
    if path.is_symlink():
        raise TransferError(
            f"{path} is a link: nothing is written through it",
            next_step="remove it, or give another folder: --to FOLDER",
        )
    path.mkdir(exist_ok=True)
    return path


def link_stays_inside(path: str, target: str) -> bool:
    """Whether a link at ``path`` points below the pulled root."""
    if target.startswith("/"):
        return False
    depth = len(PurePosixPath(path).parts) - 1
    for part in PurePosixPath(target).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return False
    return True


def pull(
    fleet: Fleet,
    target: Target,
    source: dict[str, str],
    destination: Path,
    *,
    wanted: Callable[[str], bool] = lambda path: True,
    own_folder: bool = False,
    notice: Notice,
    progress: Progress = lambda count: None,
) -> Pulled:
    """Fetch what ``source`` (fields of ``pull.list``) names; goes on after dropped links.

    A folder that is made for it is kept out of what git and a push take from the one it lies in. A
    ``.gitignore`` at the source's root would undo that, so it stays in the container.

    :param own_folder: the destination is this pull's alone, also where it is there already.
    :raises TransferError: a file that does not verify; the others and its last state stay.
    """
    pulled = Pulled(destination)
    channel: AgentChannel | None = None
    attempt = 0
    ignored = own_folder or not destination.exists() or ignores_itself(destination)
    while True:
        try:
            channel = fleet.container(target)
            with writing(destination):
                if ignored:
                    ignore_itself(destination)
                # Asked again: whoever has rules of their own there keeps them, or pulls them.
                ours = ignores_itself(destination)
                _pull_once(channel, source, pulled, _spared(wanted, ours, notice), notice, progress)
            return pulled
        except (ConnectionLost, HostUnreachable) as error:
            if channel is None:
                raise
            pause = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
            attempt += 1
            notice(f"{target.name}: {error.what}; going on in {pause:g} s")
            fleet.drop(channel)
            time.sleep(pause)


def ignore_itself(folder: Path) -> None:
    """As a virtual environment does it. Whoever has another .gitignore there keeps it."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), (folder / IGNORE_FILE).open("x") as stream:
        stream.write(IGNORED)


def ignores_itself(folder: Path) -> bool:
    """Whether a pull made it."""
    try:
        return (folder / IGNORE_FILE).read_bytes() == IGNORED.encode()
    except OSError:
        return False


def _spared(wanted: Callable[[str], bool], ours: bool, notice: Notice) -> Callable[[str], bool]:
    """``wanted``, but for what would replace our own rules."""

    def is_wanted(path: str) -> bool:
        if not ours or path != IGNORE_FILE:
            return wanted(path)
        notice(
            f"left out {IGNORE_FILE}: the one here keeps what is pulled out of the next push; "
            "pull it alone with --path, or into a folder that is there already"
        )
        return False

    return is_wanted


def _pull_once(
    channel: AgentChannel,
    source: dict[str, str],
    pulled: Pulled,
    wanted: Callable[[str], bool],
    notice: Notice,
    progress: Progress,
) -> None:
    kept = [entry for entry in _list(channel, source) if wanted(entry.path)]
    destination = pulled.destination
    destination.mkdir(parents=True, exist_ok=True)
    for entry in kept:
        if entry.kind == "d":
            place(destination, entry.path).mkdir(exist_ok=True)
    parts = destination / PARTS
    for entry, request in _reading(channel, kept, pulled):
        _settle(channel, entry, request, pulled, progress)
    if parts.is_dir() and not any(parts.iterdir()):
        parts.rmdir()
    for entry in kept:
        if entry.kind == "l":
            _link(entry, pulled, notice)


def _list(channel: AgentChannel, source: dict[str, str]) -> list[Listed]:
    request = channel.request("pull.list", **source)
    text = bytearray()
    for _, payload in request.frames():
        text += payload
    root = str(request.result()["root"])
    return [Listed.parse(json.loads(line), root) for line in text.decode("ascii").splitlines()]


def _settle(
    channel: AgentChannel,
    entry: Listed,
    request: Request,
    pulled: Pulled,
    progress: Progress,
) -> None:
    """Receive one file of a run that may live: what changed under the reading is read again."""
    for attempt in range(CHANGES + 1):
        try:
            _receive(entry, request, _part(pulled.destination, entry), pulled, progress)
            return
        except TransferError as error:
            if kind_of(error) != "pull.changed" or attempt == CHANGES:
                raise
        try:
            (now,) = _list(channel, {"path": entry.remote})
        except NotFoundError:
            # Removed meanwhile, as checkpoints and records are.
            return
        entry = replace(now, path=entry.path)
        request = _ask(channel, entry, pulled)


def _ask(channel: AgentChannel, entry: Listed, pulled: Pulled) -> Request:
    """The rest of a file; of one that is only ever appended to, as much as was listed."""
    part = _part(pulled.destination, entry)
    state: dict[str, Any] = {"expect": {"size": entry.size, "mtime_ns": entry.mtime_ns}}
    if entry.path.endswith(GROWING):
        state = {"limit": entry.size}
    offset = part.stat().st_size if part.is_file() else 0
    return channel.request("pull.read", path=entry.remote, offset=offset, **state)


def _reading(
    channel: AgentChannel, entries: Iterable[Listed], pulled: Pulled
) -> Iterator[tuple[Listed, Request]]:
    """Each file that is not there yet with its request, small ones asked for ahead."""
    waiting: deque[tuple[Listed, Request]] = deque()
    ahead = 0
    for entry in entries:
        if entry.kind != "f":
            continue
        final = place(pulled.destination, entry.path)
        if _same(final, entry):
            pulled.unchanged += 1
            continue
        while waiting and (ahead + entry.size > AHEAD_BYTES or len(waiting) >= AHEAD_FILES):
            first = waiting.popleft()
            ahead -= first[0].size
            yield first
        waiting.append((entry, _ask(channel, entry, pulled)))
        ahead += entry.size
    yield from waiting


def _same(path: Path, entry: Listed) -> bool:
    """Pulled before: it was verified then and has the size and time it was given."""
    if not path.is_file() or path.is_symlink():
        return False
    info = path.stat()
    return (info.st_size, info.st_mtime_ns) == (entry.size, entry.mtime_ns)


def _part(destination: Path, entry: Listed) -> Path:
    """Its name holds which state of which file it is part of: another state starts afresh."""
    folder = _real_folder(destination / PARTS)
    name = hashlib.sha256(os.fsencode(entry.path)).hexdigest()[:32]
    return folder / f"{name}-{entry.size}-{entry.mtime_ns}"


def _receive(
    entry: Listed, request: Request, part: Path, pulled: Pulled, progress: Progress
) -> None:
    digest = hashlib.sha256()
    with part.open("a+b") as stream:
        stream.seek(0)
        while piece := stream.read(1 << 20):
            digest.update(piece)
        try:
            for _, payload in request.frames():
                stream.write(payload)
                digest.update(payload)
                pulled.bytes += len(payload)
                progress(len(payload))
            answer = request.result()
        except TransferError as error:
            if kind_of(error) == "pull.changed":
                part.unlink()
            raise
    if digest.hexdigest() != answer["sha256"]:
        part.unlink()
        raise TransferError(
            f"{entry.path} did not arrive as it is in the container",
            next_step="pull again; what was there before is untouched",
        )
    part.chmod(entry.mode & 0o777)
    os.utime(part, ns=(entry.mtime_ns, entry.mtime_ns))
    part.replace(place(pulled.destination, entry.path))
    pulled.files += 1


def _link(entry: Listed, pulled: Pulled, notice: Notice) -> None:
    path = place(pulled.destination, entry.path)
    if not link_stays_inside(entry.path, entry.target):
        pulled.skipped += 1
        notice(f"left out the link {entry.path} -> {entry.target}: it points outside")
        return
    if path.is_symlink() or path.is_file():
        path.unlink()
    path.symlink_to(entry.target)
