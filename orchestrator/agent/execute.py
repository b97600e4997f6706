"""``exec``: one command, both outputs as they come, its true end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from orchestrator.agent.files import write_all
from orchestrator.agent.program import of_interpreter
from orchestrator.agent.protocol import AgentError
from orchestrator.agent.serve import Cancelled, Request, from_os_error
from orchestrator.agent.start import variables, words

PIECE = 256 << 10
TERM_GRACE_S = 2.0
LINGER_S = 1.0
"""How long output is waited for after the command's end: a background child may hold the pipe."""


Send = Callable[[dict[str, Any], bytes], None]


def execute(request: Request) -> dict[str, Any]:
    given = variables(request.get("env", dict, {}))
    child = open_child(
        words(request),
        with_input=request.get("stdin", bool, False) or bool(request.fields.get("more")),
        cwd=request.get("cwd", str),
        env={**os.environ, **of_interpreter(request.get("python", str), given), **given},
    )
    timeout = request.get("timeout_s", (int, float))
    timed_out = carry(request, child, request.send, partial(_end, child), timeout)
    return {**ending(child), "timed_out": timed_out}


def open_child(
    command: list[str],
    *,
    with_input: bool,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """In a session of its own, its outputs piped to us."""
    try:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE if with_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and error.filename == command[0]
        raise AgentError(
            "command.not_found" if missing else from_os_error(error).kind,
            f"cannot start {command[0]!r}: {error.strerror}",
            errno=error.errno,
            path=error.filename,
        ) from error


def carry(
    request: Request,
    child: subprocess.Popen[bytes],
    send: Send,
    end: Callable[[], None],
    timeout: float | None = None,
) -> bool:
    """Its streams to and from the laptop until it has ended; True if that took too long.

    :param end: ends it where the laptop wants no more. Its pipes are closed by then.
    """
    try:
        if child.stdin is not None:
            threading.Thread(target=_feed, args=(request, child), daemon=True).start()
        return _copy(request, child, send, timeout)
    except Cancelled:
        _close_outputs(child)
        end()
        raise
    finally:
        _close_outputs(child)


def ending(child: subprocess.Popen[bytes]) -> dict[str, int | None]:
    code = child.wait()
    return {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}


def _close_outputs(child: subprocess.Popen[bytes]) -> None:
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()


def _copy(
    request: Request, child: subprocess.Popen[bytes], send: Send, timeout: float | None
) -> bool:
    """Until the command has ended and its pipes are empty; True if it was too slow for that."""
    assert child.stdout is not None and child.stderr is not None
    names = {child.stdout.fileno(): "stdout", child.stderr.fileno(): "stderr"}
    ended = os.pidfd_open(child.pid)
    wake = request.cancel_event()
    deadline = None if timeout is None else time.monotonic() + timeout
    linger: float | None = None
    try:
        while names:
            limits = [limit for limit in (deadline, linger) if limit is not None]
            patience = max(0.0, min(limits) - time.monotonic()) if limits else None
            waiting = [*names, wake, *([] if linger else [ended])]
            ready, _, _ = select.select(waiting, [], [], patience)
            request.check()
            if ended in ready:
                linger = time.monotonic() + LINGER_S
            for descriptor in [one for one in ready if one in names]:
                data = os.read(descriptor, PIECE)
                if data:
                    send({"stream": names[descriptor]}, data)
                else:
                    del names[descriptor]
            if deadline is not None and linger is None and time.monotonic() >= deadline:
                _end(child)
                return True
            if not ready and linger is not None and time.monotonic() >= linger:
                break
    finally:
        os.close(ended)
    while child.poll() is None:
        if deadline is not None and time.monotonic() >= deadline:
            _end(child)
            return True
        request.sleep(0.002)
    return False


def _feed(request: Request, child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError, Cancelled), child.stdin as stream:
        for piece in request.input():
            # One write of a process that is frozen and thawed under it takes a part.
            write_all(stream.fileno(), piece)


def _end(child: subprocess.Popen[bytes]) -> None:
    """The whole group: TERM, two seconds, KILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        try:
            child.wait(TERM_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
