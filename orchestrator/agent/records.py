"""The two records that a supervisor must be able to write on a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

from orchestrator.paths import RunPaths

HEARTBEAT_BYTES = 512
EXIT_RESERVE = 64 << 10
"""Bytes set aside at the start for exit.json: on a full disk overwriting is all that works."""


class Heartbeat:
    """Always the same bytes of the same file, overwritten in place: that needs no space."""

    def __init__(self, paths: RunPaths) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(paths.heartbeat, flags, 0o600)

    def beat(self, **fields: Any) -> None:
        text = json.dumps({"time": time.time(), **fields}).encode()
        with contextlib.suppress(OSError):
            os.pwrite(self._file, text.ljust(HEARTBEAT_BYTES), 0)


class ExitRecord:
    """exit.json: written into space set aside at the start, then renamed."""

    def __init__(self, paths: RunPaths) -> None:
        self._path = f"{paths.root}/.exit"
        self._final = paths.exit
        descriptor = self._open()
        with contextlib.suppress(OSError):
            os.posix_fallocate(descriptor, 0, EXIT_RESERVE)
        os.close(descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, record: dict[str, Any]) -> bool:
        """False if there is no room yet; then it is to be tried again.

        True too where the run's folder is gone, and with it whoever would read the record.
        """
        data = (json.dumps(record, indent=1) + "\n").encode()
        try:
            descriptor = self._open()
            try:
                if os.pwrite(descriptor, data, 0) != len(data):
                    return False
                os.ftruncate(descriptor, len(data))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(self._path, self._final)
        except FileNotFoundError:
            # Somebody removed the run's folder: waiting for it would never end.
            return True
        except OSError:
            return False
        return True
