"""What a release holds, as lines of JSON: pure, and the same on both sides.

A manifest comes from outside, so ``parse`` refuses whatever could write beyond the release's
folder: absolute paths, ``..``, anything below a file or a link, the same path twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from orchestrator.agent.protocol import AgentError

DIGEST = re.compile(r"[0-9a-f]{64}")
PATH_BYTES = 3000
"""PATH_MAX is 4096, and the release's own folder comes before."""
_NAME_BYTES = 255
_decode = json.JSONDecoder().decode
_SIZE_LIMIT = 1 << 50


class Entry(NamedTuple):
    """One line: a file (``f``), a link (``l``) or a folder (``d``)."""

    kind: str
    path: str
    digest: str = ""
    size: int = 0
    executable: bool = False
    target: str = ""

    def line(self) -> list[Any]:
        if self.kind == "f":
            return ["f", self.path, self.digest, self.size, int(self.executable)]
        return ["l", self.path, self.target] if self.kind == "l" else ["d", self.path]


def dump(entries: Iterable[Entry]) -> bytes:
    """The manifest's bytes; entries are put in the order of their paths' bytes."""
    ordered = sorted(entries, key=lambda entry: os.fsencode(entry.path))
    encoder = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))
    return "".join(encoder.encode(entry.line()) + "\n" for entry in ordered).encode("ascii")


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def release_id(data: bytes) -> str:
    """The name of a release with this manifest."""
    return digest_of(data)[:16]


def parse(data: bytes) -> list[Entry]:
    """The entries. ``AgentError`` of kind ``release.manifest`` names the line and the path."""
    entries: list[Entry] = []
    before = b""
    leaves: set[str] = set()
    sizes: dict[str, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        entry = _entry(line, number)
        key = _checked_path(entry.path, number)
        if entries and key <= before:
            raise _refused(number, entry.path, "is out of order or there twice")
        before = key
        if entry.kind != "d":
            leaves.add(entry.path)
        if entry.kind == "f" and sizes.setdefault(entry.digest, entry.size) != entry.size:
            raise _refused(number, entry.path, "has another size than an equal file before it")
        entries.append(entry)
    # Order by bytes puts "a.b" between "a" and "a/c": looked at with all leaves known.
    folders = {""}
    for number, entry in enumerate(entries, 1):
        folder = entry.path.rpartition("/")[0]
        if folder not in folders:
            if not leaves.isdisjoint(_parents(entry.path)):
                raise _refused(number, entry.path, "lies below a file or a link")
            folders.add(folder)
    return entries


def _entry(line: bytes, number: int) -> Entry:
    try:
        fields = _decode(str(line, "ascii"))
    except (ValueError, RecursionError) as error:
        raise _refused(number, "", f"does not parse: {error}") from error
    match fields:
        case ["f", str(path), str(digest), int(size), 0 | 1 as executable]:
            if not DIGEST.fullmatch(digest) or not 0 <= size <= _SIZE_LIMIT:
                raise _refused(number, path, "has no sha256 or no size")
            return Entry("f", path, digest, int(size), bool(executable))
        case ["l", str(path), str(target)]:
            if not target or "\0" in target or len(_bytes(target, number)) > PATH_BYTES:
                raise _refused(number, path, "has an impossible link target")
            return Entry("l", path, target=target)
        case ["d", str(path)]:
            return Entry("d", path)
    raise _refused(number, "", "is no entry")


def _checked_path(path: str, number: int) -> bytes:
    key = _bytes(path, number)
    parts = key.split(b"/")
    if b"\0" in key or len(key) > PATH_BYTES:
        raise _refused(number, path, "is no path")
    if any(part in (b"", b".", b"..") or len(part) > _NAME_BYTES for part in parts):
        raise _refused(number, path, "is not a plain path below the release")
    return key


def _bytes(text: str, number: int) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise _refused(number, text, "holds a code point that no file name has") from error


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _refused(number: int, path: str, why: str) -> AgentError:
    shown = path.encode("unicode_escape").decode("ascii")
    return AgentError(
        "release.manifest", f"manifest line {number}: {shown} {why}", line=number, path=path
    )
