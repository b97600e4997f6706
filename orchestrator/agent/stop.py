"""``run.stop``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from orchestrator.agent import process
from orchestrator.agent.files import tail_lines, write_record
from orchestrator.agent.program import boot_id
from orchestrator.agent.records import (
    ENDED,
    ExitRecord,
    exit_record,
    run_record,
    supervisor_record,
)
from orchestrator.agent.serve import Request
from orchestrator.agent.status import find, state_of, summary
from orchestrator.paths import RunPaths

LAST_LINES = 20
LOOK_S = 0.05
MARGIN_S = 20.0
"""Beyond grace, TERM and KILL: the supervisor has then failed to do it."""


def stop(request: Request) -> dict[str, Any]:
    paths = find(request)
    grace = request.get("grace_s", (int, float))
    if grace is None:
        grace = run_record(paths).get("grace_s", 60)
    before = summary(paths, lines=0)
    over = before["state"] in ENDED
    already = over and not _left_behind(paths)
    killed: list[int] = []
    if not already:
        record = {"who": request.get("who", str, ""), "time": time.time(), "grace_s": grace}
        # On a full disk the signal alone has to do, with the run's own grace.
        with contextlib.suppress(OSError):
            write_record(paths.stop, record, durable=False)
        supervisor = supervisor_record(paths)
        if supervisor is None or not _supervised_end(request, paths, supervisor, grace):
            killed = _end_without(request, paths, grace, record, before if over else {})
    ending = exit_record(paths) or {}
    return {
        "state": state_of(paths),
        "exit_code": ending.get("exit_code"),
        "signal": ending.get("signal"),
        "already": already,
        "killed": killed or ending.get("killed", []),
        "last_lines": tail_lines(paths.log, LAST_LINES),
    }


def _left_behind(paths: RunPaths) -> bool:
    """Processes that outlived supervisor and command, such as ranks of a launcher that was killed
    too: the run has failed, and they keep its GPUs."""
    return exit_record(paths) is None and bool(process.Tree(paths.run_id, None).members())


def _supervised_end(
    request: Request, paths: RunPaths, supervisor: dict[str, Any], grace: float
) -> bool:
    """Let the supervisor do it; False if it is gone or does not."""
    pid, begun = supervisor["pid"], supervisor["start"]
    if supervisor["boot_id"] != boot_id():
        return False
    tree = process.Tree(paths.run_id, pid)
    until = time.monotonic() + grace + process.TERM_GRACE_S + process.KILL_GRACE_S + MARGIN_S
    stages = [(0.0, "INT"), (grace, "TERM"), (grace + process.TERM_GRACE_S, "KILL")]
    began = time.monotonic()
    woken = False
    while time.monotonic() < until:
        if exit_record(paths) is not None:
            return True
        if not process.alive(pid, begun):
            return exit_record(paths) is not None
        if not woken:
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGINT)
            woken = True
        if stages and time.monotonic() - began >= stages[0][0]:
            request.send({"signal": stages.pop(0)[1], "left": len(tree.members())})
        request.sleep(LOOK_S)
    os.kill(pid, signal.SIGKILL)
    return False


def _end_without(
    request: Request,
    paths: RunPaths,
    grace: float,
    record: dict[str, Any],
    failed: dict[str, Any],
) -> list[int]:
    """The supervisor is gone: the marker in their environment still finds the run's processes.

    :param failed: what was known of a run that had ended before: who ends what is left of it does
        not make it one that a person stopped.
    """

    def tell(name: str, left: int) -> None:
        request.send({"signal": name, "left": left})

    ending = process.Ending(process.Tree(paths.run_id, None), grace, tell)
    while not ending.step():
        request.sleep(LOOK_S)
    end = {
        "exit_code": None,
        "signal": None,
        "reason": failed.get("state", "stopped"),
        "error": failed.get("reason")
        or "the supervisor was gone: how the command ended is not known",
        "ended": time.time(),
        "boot_id": boot_id(),
        "attempts": [],
        "stop": None if failed else record,
        "killed": ending.killed,
    }
    if exit_record(paths) is None:
        ExitRecord(paths).write(end)
    return ending.killed
