"""``stacks``: where every process of a run stands, by py-spy where it is, by /proc always.

A container may forbid ptrace (a seccomp profile, a dropped capability, yama): py-spy then sees
nothing from inside. The host's agent looks at the same processes from outside, with the host's own
py-spy: one that lies in the container is never run as the host's root.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from orchestrator.agent import process
from orchestrator.agent.files import write_bytes
from orchestrator.agent.looking import Failed, Look, at_once, command, text_of
from orchestrator.agent.program import which
from orchestrator.agent.protocol import AgentError
from orchestrator.agent.records import supervisor_record
from orchestrator.agent.serve import Request

AT_ONCE = 8
"""py-spy reads a whole process; of hundreds, not all at the same time."""
THREADS = 400
"""More threads of one process than this are not listed: they wait in a pool."""
IN_ALL = 2 << 20
"""Characters of all processes together: an answer has 8 MiB, and JSON may need three bytes for
one. Ranks with their loader workers can be hundreds of processes."""


def stacks(request: Request) -> dict[str, Any]:
    if request.get("side", str, "container") == "host":
        return _from_host(request)
    from orchestrator.agent.status import find

    paths = find(request)
    limit = request.get("timeout_s", (int, float), 10.0)
    supervisor = supervisor_record(paths) or {}
    members = process.Tree(paths.run_id, supervisor.get("pid")).members()
    found = _look([one.pid for one in members], _spy(request, supervisor), limit)
    path = f"{paths.stacks}/{time.strftime('%Y%m%d-%H%M%S')}.txt"
    blocks = [f"== {one['pid']} {one['command']}\n{one['text']}\n" for one in found]
    write_bytes(path, "\n".join(blocks).encode("utf-8", "backslashreplace"), durable=False)
    return {"stacks": found, "path": path}


def _from_host(request: Request) -> dict[str, Any]:
    """The run's processes by the mark in their environment and by their control group: a mark
    alone could be set by a process of another container."""
    from orchestrator.agent.host import container_of

    run_id, number = request.need("run_id", str), request.need("ct", int)
    limit = request.get("timeout_s", (int, float), 10.0)
    members = process.Tree(run_id, None).members()
    pids = [one.pid for one in members if container_of(one.pid) == number]
    spy = which("py-spy")
    if spy is None:
        raise AgentError("request.invalid", "py-spy is not on the host's PATH", field="side")
    return {"stacks": _look(pids, spy, limit), "path": None}


def _look(pids: list[int], spy: str | None, limit: float) -> list[dict[str, Any]]:
    looks = {str(pid): partial(_dump, pid, spy, limit) for pid in pids}
    found: list[dict[str, Any]] = []
    room = IN_ALL // max(1, len(pids))

    def tell(name: str, look: Look) -> None:
        pid = int(name)
        text = (look.value if look.ok else _kernel_side(pid))[:room]
        one = {"pid": _inner_pid(pid), "command": process.command(pid)[:300], "text": text}
        rank = _rank(pid)
        one |= {} if rank is None else {"rank": rank}
        found.append(one if look.ok else {**one, "error": look.error})

    rounds = -(-len(looks) // AT_ONCE)
    at_once(looks, limit * rounds, tell, width=AT_ONCE)
    return sorted(found, key=lambda one: int(one["pid"]))


def _inner_pid(pid: int) -> int:
    """As its container numbers it: what a person sees there, and in the log."""
    try:
        for line in text_of(f"/proc/{pid}/status").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except Failed:
        pass
    return pid


def _rank(pid: int) -> int | None:
    """torchrun's RANK."""
    try:
        pairs = text_of(f"/proc/{pid}/environ").split("\0")
    except Failed:
        return None
    found = next((pair[5:] for pair in pairs if pair.startswith("RANK=")), "")
    return int(found) if found.isdigit() else None


def _spy(request: Request, supervisor: dict[str, Any]) -> str | None:
    """py-spy beside the run's own interpreter, else on the PATH."""
    child = supervisor.get("child") or {}
    places = []
    try:
        places.append(os.path.dirname(os.readlink(f"/proc/{child.get('pid')}/exe")))
    except OSError:
        pass
    python = request.get("python", str, "")
    if "/" in python:
        places.append(os.path.dirname(python))
    for place in places:
        if os.access(f"{place}/py-spy", os.X_OK):
            return f"{place}/py-spy"
    return which("py-spy")


def _dump(pid: int, spy: str | None, limit_s: float) -> str:
    exe = os.readlink(f"/proc/{pid}/exe")
    if spy is None or "python" not in os.path.basename(exe):
        return _kernel_side(pid)
    text = command([spy, "dump", "--pid", str(pid)], limit_s, check=True)
    # Its head tells the process once more, from the host by another number.
    lines = [line for line in text.splitlines() if not line.startswith(f"Process {pid}:")]
    return "\n".join([*lines, "", _kernel_side(pid)])


def _kernel_side(pid: int) -> str:
    """Each thread's name, state and what it waits for in the kernel."""
    lines = []
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:THREADS]
    except OSError:
        return "(gone)"
    for thread in threads:
        folder = f"/proc/{pid}/task/{thread}"
        try:
            name = text_of(f"{folder}/comm")
            state = text_of(f"{folder}/stat").rpartition(")")[2].split()[0]
            waits = text_of(f"{folder}/wchan")
        except Failed:
            continue
        lines.append(f"thread {thread} {name}: {state} {waits if waits != '0' else ''}".rstrip())
    return "\n".join(lines)
