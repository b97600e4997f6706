"""sha256 of local files, remembered by path, size, times and inode."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.private_file import read_json, write_private

# A file written again within its file system's time granularity keeps its times: what is this
# young is hashed again next time.
YOUNG_NS = 2_000_000_000
ROOTS = 20

Key = list[int]


class DigestCache:
    """The digests of one root's files. Any change of size, mtime, ctime or inode means: read again.

    Never *newer than*: switching to an older branch sets older times.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        self._root = str(root)
        self._all = read_json(path) or {}
        known = self._all.get(self._root, {}).get("files", {})
        self._known: dict[str, tuple[Key, str]] = {k: (v[0], v[1]) for k, v in known.items()}
        self._used: dict[str, tuple[Key, str]] = {}

    def digest(self, source: Path, info: os.stat_result) -> str:
        """:raises UsageError: the file cannot be read."""
        key = [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
        name = str(source)
        found = self._known.get(name)
        if found is not None and found[0] == key:
            self._used[name] = found
            return found[1]
        try:
            with source.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise UsageError(
                f"{source} cannot be read: {error.strerror}",
                next_step="make it readable, or leave it out: .dflashignore",
            ) from None
        if time.time_ns() - max(info.st_mtime_ns, info.st_ctime_ns) > YOUNG_NS:
            self._used[name] = (key, digest)
        return digest

    def save(self) -> None:
        """Write what was used, if that is anything new. A cache: failing to write is no fault."""
        if self._used == self._known:
            return
        self._all[self._root] = {"used": time.time(), "files": self._used}
        newest = sorted(self._all, key=lambda root: self._all[root].get("used", 0))[-ROOTS:]
        text = json.dumps({root: self._all[root] for root in newest}, separators=(",", ":"))
        try:
            write_private(self._path, text)
        except (OSError, UnicodeEncodeError):
            return
