"""``tail``: several files of a run, or any files, whole lines with exact cursors."""

from __future__ import annotations

import os
from typing import Any

from orchestrator.agent.follow import Followed, Piece
from orchestrator.agent.protocol import AgentError
from orchestrator.agent.serve import Request
from orchestrator.agent.watching import Watch
from orchestrator.paths import RunPaths

STATE_EVERY = 1.0
"""Seconds between looks at the run's state: a dozen small files each."""


def tail(request: Request) -> dict[str, Any]:
    paths, names = _files(request)
    follow = request.get("follow", bool, True)
    followed = [Followed(name) for name in names]
    _place(request, followed, paths)
    watch: Watch | None = None
    if follow:
        watch = Watch({os.path.dirname(name) for name in names}, request.cancel_event())
    try:
        reason = _run(request, followed, paths, watch)
        return {"reason": reason, "cursors": [one.cursor for one in followed]}
    finally:
        for one in followed:
            one.close()
        if watch is not None:
            watch.close()


def _files(request: Request) -> tuple[RunPaths | None, list[str]]:
    files = request.get("files", list, ["train.log"])
    if not files or not all(isinstance(name, str) and name for name in files):
        raise AgentError("request.invalid", "files is no list of names", field="files")
    absolute = [name for name in files if name.startswith("/")]
    if len(absolute) == len(files) and request.get("run_id", str) is None:
        for name in files:
            if not os.path.isdir(os.path.dirname(name)):
                raise AgentError("file.not_found", f"there is no {name}", path=name)
        return None, files
    from orchestrator.agent.status import find

    paths = find(request)
    if any(".." in name.split("/") for name in files):
        raise AgentError("request.invalid", "a file is named with ..", field="files")
    return paths, [os.path.join(paths.root, name) for name in files]


def _place(request: Request, followed: list[Followed], paths: RunPaths | None) -> None:
    cursors = request.get("cursors", list, [])
    lines = request.get("lines", int)
    since = request.get("since", (int, float))
    for number, one in enumerate(followed):
        cursor = cursors[number] if number < len(cursors) else None
        if isinstance(cursor, dict) and isinstance(cursor.get("offset"), int):
            notice = one.at_cursor(cursor)
            if notice:
                request.send({"file": number, "notice": notice, "cursor": one.cursor})
        elif lines is not None:
            one.at_last_lines(lines)
        elif since is not None and paths is not None:
            one.at_time(since, f"{one.path}.index")
        else:
            one.at_oldest()


def _run(
    request: Request, followed: list[Followed], paths: RunPaths | None, watch: Watch | None
) -> str:
    import time

    state: tuple[str, Any] | None = None
    look_at = 0.0
    while True:
        # Asked before reading: what was written before the end is then read after it.
        ended = False
        if paths is not None and watch is not None and time.monotonic() >= look_at:
            look_at = time.monotonic() + STATE_EVERY
            state, ended = _state(request, paths, state)
        busy = False
        for number, one in enumerate(followed):
            for piece in one.read():
                busy = True
                _send(request, number, one, piece)
        if watch is None or ended:
            for number, one in enumerate(followed):
                _send(request, number, one, one.flush())
            return "ended" if ended else "eof"
        request.check()
        if paths is not None and os.path.exists(paths.exit):
            look_at = 0.0
        elif not busy:
            watch.wait()


def _state(
    request: Request, paths: RunPaths, before: tuple[str, Any] | None
) -> tuple[tuple[str, Any], bool]:
    from orchestrator.agent.records import ENDED
    from orchestrator.agent.status import summary

    found = summary(paths, lines=0)
    now = (found["state"], found["attempt"])
    if now != before:
        request.send({"notice": "state", "state": now[0], "attempt": now[1]})
    return now, now[0] in ENDED


def _send(request: Request, number: int, one: Followed, piece: Piece) -> None:
    if piece.notice:
        request.send({"file": number, "notice": piece.notice, "cursor": one.cursor})
    elif piece.data:
        request.send({"file": number, "cursor": one.cursor}, piece.data)
