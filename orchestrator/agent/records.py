"""A run's records: read with the types they are promised to have, written on a full disk too.

Everyone with access to the container can write there. One damaged record may cost its own fields,
never the answer about all the other runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any

from orchestrator.agent.files import read_record
from orchestrator.paths import RunPaths

HEARTBEAT_BYTES = 512
EXIT_RESERVE = 64 << 10
"""Bytes set aside at the start for exit.json: on a full disk overwriting is all that works."""


ENDED = ("finished", "failed", "stopped")

Kinds = dict[str, type | tuple[type, ...]]
_NUMBER = (int, float)
_RUN: Kinds = {
    **dict.fromkeys(("name", "release", "who", "predecessor", "session", "boot_id"), str),
    **dict.fromkeys(("hostname", "cwd", "config", "container", "log_link", "folder"), str),
    **dict.fromkeys(("command", "gpus", "env_names", "secret_names"), list),
    **dict.fromkeys(("git", "nodes", "meta", "restart"), dict),
    **dict.fromkeys(("created", "grace_s"), _NUMBER),
}
_SUPERVISOR: Kinds = {
    **dict.fromkeys(("pid", "start", "tmux_pid", "attempt"), int),
    **dict.fromkeys(("boot_id", "session"), str),
    **dict.fromkeys(("started", "attempt_started"), _NUMBER),
    "child": dict,
}
_CHILD: Kinds = {"pid": int, "start": int}
_EXIT: Kinds = {
    **dict.fromkeys(("exit_code", "signal", "lost_bytes", "log_bytes"), int),
    **dict.fromkeys(("reason", "error", "boot_id"), str),
    **dict.fromkeys(("started", "ended"), _NUMBER),
    **dict.fromkeys(("attempts", "killed"), list),
    "stop": dict,
}
_BEAT: Kinds = {"time": _NUMBER, "lost_bytes": int}


def run_record(paths: RunPaths) -> dict[str, Any]:
    """run.json; empty where there is none."""
    return _shaped(read_record(paths.record) or {}, _RUN)


def supervisor_record(paths: RunPaths) -> dict[str, Any] | None:
    """supervisor.json; None unless it says which process it is."""
    found = _shaped(read_record(paths.supervisor) or {}, _SUPERVISOR)
    child = _shaped(found.get("child") or {}, _CHILD)
    found["child"] = {"start": None, **child} if "pid" in child else None
    return found if {"pid", "start", "boot_id"} <= found.keys() else None


def exit_record(paths: RunPaths) -> dict[str, Any] | None:
    """exit.json; None unless it says how the run ended."""
    found = _shaped(read_record(paths.exit) or {}, _EXIT)
    return found if found.get("reason") in ENDED else None


def describe_end(record: dict[str, Any]) -> str:
    """``failed, exit code 3`` or ``stopped, signal SIGTERM``."""
    if record.get("signal"):
        how = f"signal {signal.Signals(record['signal']).name}"
    else:
        how = f"exit code {record.get('exit_code')}"
    return f"{record['reason']}, {how}"


def heartbeat(paths: RunPaths) -> dict[str, Any]:
    """Empty where there is none."""
    return _shaped(read_record(paths.heartbeat) or {}, _BEAT)


def _shaped(record: dict[str, Any], kinds: Kinds) -> dict[str, Any]:
    """Without the fields that are not of their kind; null is of every kind."""

    def fits(key: str, value: Any) -> bool:
        kind = kinds.get(key)
        # No field of these records is a truth value, which to Python is a number.
        good = kind is None or (isinstance(value, kind) and not isinstance(value, bool))
        return good or value is None

    return {key: value for key, value in record.items() if fits(key, value)}


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
