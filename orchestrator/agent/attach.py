"""``run.attach``: what a terminal needs to show a run's session; a lost socket is made anew."""

from __future__ import annotations

import os
import time
from typing import Any

from orchestrator.agent.records import supervisor_record
from orchestrator.agent.serve import Request
from orchestrator.paths import RunPaths

_TERMINFO = ("/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo", "/usr/lib/terminfo")


def attach(request: Request) -> dict[str, Any]:
    from orchestrator.agent import tmux
    from orchestrator.agent.status import find

    paths = find(request)
    _restore_socket(paths)
    return {
        "session": paths.run_id,
        "socket": tmux.socket_path(),
        "tmux": tmux.binary(),
        "argv": attach_command(paths.run_id),
        "alive": tmux.has_session(paths.run_id),
        "terminal": _known_terminal(request.get("terminals", list, [])),
        "log": paths.log,
    }


def _known_terminal(names: list[Any]) -> str | None:
    """The first that this machine has a description of, without which tmux refuses it."""
    for name in names:
        if not isinstance(name, str) or not name or "/" in name:
            continue
        for folder in _TERMINFO:
            # By the first letter, or on some systems by its number.
            places = (f"{folder}/{first}/{name}" for first in (name[0], f"{ord(name[0]):x}"))
            if any(map(os.path.isfile, places)):
                return name
    return None


def attach_command(run_id: str) -> list[str]:
    return ["tmux", "-u", "attach-session", "-t", f"={run_id}"]


def _restore_socket(paths: RunPaths) -> None:
    """A tmux server makes its socket anew on SIGUSR1 (cleaners of /tmp remove it)."""
    import signal

    from orchestrator.agent import process, tmux

    supervisor = supervisor_record(paths)
    if supervisor is None or os.path.exists(tmux.socket_path()):
        return
    server = process.read(supervisor.get("tmux_pid") or 0)
    if server is None or not server.name.startswith("tmux"):
        return
    os.makedirs(os.path.dirname(tmux.socket_path()), 0o700, exist_ok=True)
    os.kill(server.pid, signal.SIGUSR1)
    for _ in range(50):
        if os.path.exists(tmux.socket_path()):
            return
        time.sleep(0.01)
