"""tmux, through libtmux's ``tmux_cmd``: one command sequence a call.

``Server.new_session`` would take three calls (has-session, -V, new-session), needs a UTF-8 locale
for its separator, and leaves no place for ``set-option`` in the same sequence. That place matters:
``new-session`` answers 0 although its command died at once, and without ``remain-on-exit`` the
session, and with it the reason, is gone. tmux runs a sequence to its end before it looks at
children, so setting the option on the new window alone is in time and leaves other people's
sessions as they are (measured: 100 of 100 with a command that ends at once).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from libtmux.common import tmux_cmd
from libtmux.exc import TmuxCommandNotFound

from orchestrator.agent.program import which
from orchestrator.agent.protocol import AgentError

_ENVIRONMENT_BYTES = 8 << 10
"""tmux refuses commands beyond 16 KB (one imsg)."""

_WIDTH, _HEIGHT = 200, 50

# A server whose last session has just ended still answers, and goes.
_ENDING = ("server exited", "lost server", "no server running", "error connecting")
_TRIES = 5


def binary() -> str:
    path = which("tmux")
    if path is None:
        raise AgentError("tmux.missing", "there is no tmux: apt install tmux")
    return path


def run(*arguments: str) -> tmux_cmd:
    try:
        return tmux_cmd(*arguments, tmux_bin=binary())
    except TmuxCommandNotFound as error:
        raise AgentError("tmux.missing", "there is no tmux: apt install tmux") from error


def new_session(name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """A detached session of that name; one that exists already is left alone.

    ``environment`` is given with ``-e``: the server's own may be days old. What would act on the
    pane's own process (LD_…) or is beyond tmux's limit is left out; the command gets it all from
    the supervisor.
    """
    given: list[str] = []
    size = 0
    for key, value in environment.items():
        size += len(key) + len(value) + 4
        if not key.startswith("LD_") and size < _ENVIRONMENT_BYTES:
            given += ["-e", _literal(f"{key}={value}")]
    window = f"={name}:"
    _start_server()
    words = [
        *("-u", "new-session", "-d", "-s", name, "-x", str(_WIDTH), "-y", str(_HEIGHT)),
        *given,
        *("--", *(_literal(word) for word in command), ";"),
        *("set-option", "-w", "-t", window, "remain-on-exit", "on", ";"),
        *("set-option", "-g", "exit-empty", "on"),
    ]
    answer = run(*words)
    for _ in range(_TRIES):
        if answer.returncode == 0 or not any(word in _text(answer) for word in _ENDING):
            break
        time.sleep(0.05)
        _start_server()
        answer = run(*words)
    if answer.returncode != 0 and "duplicate session" not in _text(answer):
        text = _text(answer)
        raise AgentError("tmux.failed", f"tmux could not start the session: {text}", stderr=text)


def _text(answer: tmux_cmd) -> str:
    return "\n".join(answer.stderr)


def _start_server() -> None:
    """The server keeps the words it was started with for as long as it lives, in ``ps`` for all:
    a ``new-session`` would leave the run's variables there."""
    if not os.path.exists(socket_path()):
        run("-u", "start-server", ";", "set-option", "-g", "exit-empty", "off")


def _literal(word: str) -> str:
    """tmux takes a trailing ``;`` of a word as its own separator."""
    return word[:-1] + "\\;" if word.endswith(";") else word


def has_session(name: str) -> bool:
    return which("tmux") is not None and run("has-session", "-t", f"={name}").returncode == 0


def pane_state(name: str) -> tuple[bool, str]:
    """Whether the session's pane is dead (or gone), and what it shows."""
    state = run("list-panes", "-t", f"={name}:", "-F", "#{pane_dead}")
    if state.returncode != 0:
        return True, "\n".join(state.stderr)
    # With some history: tmux's own notice of a pane's death pushes the first line up into it.
    shown = run("capture-pane", "-p", "-J", "-S", "-50", "-t", f"={name}:")
    return state.stdout[:1] == ["1"], "\n".join(line for line in shown.stdout if line.strip())


def socket_path() -> str:
    folder = os.environ.get("TMUX_TMPDIR") or "/tmp"
    return f"{folder}/tmux-{os.getuid()}/default"
