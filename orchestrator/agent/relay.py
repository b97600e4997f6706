"""``relay``: the three streams of one command on this channel: the way to a host's containers.

What is relayed is itself an agent (``pct exec N -- python3 -c LOADER``), which leaves at the end of
its input. So nothing of ours can stay behind: whatever ends this process ends its pipes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from orchestrator.agent import execute, host
from orchestrator.agent.protocol import RELAY_WINDOW, AgentError
from orchestrator.agent.serve import Request
from orchestrator.agent.start import words

AT_ONCE = max(8, min(os.cpu_count() or 8, 16))
"""Commands that start at a time. A `pct` computes for 0.5 to 0.97 s: many more than there are cores
only make each other late, and take the host's memory. Four on two cores, beside other work on them,
were done later than eight."""
PATIENCE_S = 5.0
"""What has said nothing for this long keeps no other from starting: eight on two cores take 4 s."""
FRESH_S = 2.0
"""For that each process of the host is asked for its control group."""
LEAVE_S = 10.0
"""For an agent that was told to leave: it may be ending a commit."""


def relay(request: Request) -> dict[str, Any]:
    command = words(request)
    number = request.get("ct", int)
    with TURNS.turn(request.check) as spoken:
        if number is not None and GROUPS.frozen(number):
            raise AgentError("ct.frozen", f"container {number} is frozen", ct=number)
        child = execute.open_child(command, with_input=True)
        request.send({"pid": child.pid})
        heard = threading.Event()

        def send(head: dict[str, Any], payload: bytes) -> None:
            # pct's own warnings on its error output are no sign of an agent.
            if head["stream"] == "stdout" and not heard.is_set():
                heard.set()
                spoken()
            request.send_paced(head, payload, RELAY_WINDOW)

        execute.carry(request, child, send, lambda: _leave(child, heard.is_set()))
    return execute.ending(child)


def _leave(child: subprocess.Popen[bytes], spoken: bool) -> None:
    """An agent obeys the end of its input; a `pct` that never came through is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(LEAVE_S if spoken else 0.0)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class Turns:
    """So many at a time; a turn ends when its holder says so, or has had it for too long."""

    def __init__(self, limit: int, patience_s: float) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._begun: dict[object, float] = {}
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self, check: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Wait for a turn; what is yielded ends it early.

        :param check: raises where the wait is to be given up.
        """
        key = object()
        with self._changed:
            while (pause := self._full_for()) > 0:
                check()
                self._changed.wait(min(pause, 0.5))
            self._begun[key] = time.monotonic()

        def give() -> None:
            with self._changed:
                if self._begun.pop(key, None) is not None:
                    self._changed.notify()

        try:
            yield give
        finally:
            give()

    def _full_for(self) -> float:
        now = time.monotonic()
        young = [left for t in self._begun.values() if (left := t + self._patience_s - now) > 0]
        return 0.0 if len(young) < self._limit else min(young)


class Groups:
    """Where each container's control groups are: looked for once for all that start together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, list[str]] = {}
        self._looked = -FRESH_S

    def frozen(self, number: int) -> bool:
        """Now: only the place is remembered."""
        with self._lock:
            if time.monotonic() - self._looked > FRESH_S:
                self._found, self._looked = host.running(), time.monotonic()
            groups = self._found.get(number, [])
        return any(host.is_frozen(group) for group in groups)


GROUPS = Groups()
TURNS = Turns(AT_ONCE, PATIENCE_S)
