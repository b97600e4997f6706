"""A release: what is pushed, an immutable tree named by its content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import snapshot
from orchestrator.digests import DigestCache
from orchestrator.errors import UsageError
from orchestrator.paths import LaptopPaths
from orchestrator.snapshot import Found, GitState, Root

TRAINER = Path(__file__).parents[1] / "trainer"


@dataclass(frozen=True)
class Entry:
    """A line of the manifest and, for a file, where its bytes are."""

    line: list[Any]
    source: Path | None = None

    @property
    def path(self) -> str:
        return str(self.line[1])


@dataclass
class Release:
    """What is pushed."""

    root: Root
    entries: list[Entry]
    git: GitState | None = None
    manifest: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.entries.sort(key=lambda entry: os.fsencode(entry.path))
        self.manifest = b"".join(
            json.dumps(entry.line, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
            for entry in self.entries
        )

    @property
    def id(self) -> str:
        return hashlib.sha256(self.manifest).hexdigest()[:16]

    @property
    def files(self) -> int:
        return sum(entry.line[0] == "f" for entry in self.entries)

    @property
    def bytes(self) -> int:
        return sum(entry.line[3] for entry in self.entries if entry.line[0] == "f")

    def has(self, path: str) -> bool:
        return any(entry.path == path for entry in self.entries)

    def meta(self) -> dict[str, Any]:
        """For the release's and the run's record. No remote URL: it may hold a token."""
        git = self.git
        if git is None:
            return {"folder": self.root.path.name}
        return {
            "folder": self.root.path.name,
            "git": {"commit": git.commit, "branch": git.branch, "dirty": git.dirty},
        }


def build(root: Root, laptop: LaptopPaths, config: Path | None = None) -> Release:
    """Read the folder; with ``config``, take the ``trainer`` package along.

    :raises UsageError: unreadable files, or a user's own top-level ``trainer`` beside ``config``.
    """
    cache = DigestCache(laptop.digests, root.path)
    entries = [_entry(found, cache) for found in snapshot.collect(root, laptop.own)]
    if config is not None:
        _refuse_other_trainer(entries)
        entries = [entry for entry in entries if not entry.path.startswith("trainer/")]
        entries += [_entry(found, cache) for found in _trainer_files()]
        name = config_path(config, root)
        if name not in {entry.path for entry in entries}:
            entries.append(_entry(Found("f", name, config.resolve(), config.stat()), cache))
    cache.save()
    return Release(root, entries, snapshot.git_state(root))


def config_path(config: Path, root: Root) -> str:
    """Where the config lies inside the release."""
    resolved = config.resolve()
    if resolved.is_relative_to(root.path):
        return resolved.relative_to(root.path).as_posix()
    return f".dflashctl/{resolved.name}"


def _entry(found: Found, cache: DigestCache) -> Entry:
    if found.kind == "d":
        return Entry(["d", found.path])
    if found.kind == "l":
        return Entry(["l", found.path, os.fsdecode(found.source.readlink())])
    digest = cache.digest(found.source, found.info)
    executable = int(bool(found.info.st_mode & 0o100))
    return Entry(["f", found.path, digest, found.info.st_size, executable], found.source)


def _trainer_files() -> Iterator[Found]:
    for path in sorted(TRAINER.rglob("*")):
        relative = path.relative_to(TRAINER.parent)
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in relative.parts:
            yield Found("f", relative.as_posix(), path, path.stat())


def _refuse_other_trainer(entries: list[Entry]) -> None:
    for entry in entries:
        top = entry.path.partition("/")[0]
        own = entry.source is not None and entry.source.resolve().is_relative_to(TRAINER)
        if top in {"trainer", "trainer.py"} and not own:
            raise UsageError(
                f"the pushed folder has a top-level {top!r} of its own, which would hide the "
                "trainer that --config runs",
                next_step="rename it, or start your own with: dflashctl launch … -- COMMAND",
            )
