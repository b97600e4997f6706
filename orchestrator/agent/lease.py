"""GPUs claimed for a run's whole life, as files on the host: ``leases/<GPU uuid>.json``.

A lease is stale when no process of its run is left on this host: the host sees every container's
processes, and each of a run's carries the run's id in its environment. Nothing has to be renewed,
and nothing is left claimed for ever by a laptop that was closed.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Any

from orchestrator.agent import process
from orchestrator.agent.files import locked, make_private, read_record, write_record
from orchestrator.agent.program import boot_id
from orchestrator.agent.protocol import AgentError
from orchestrator.agent.serve import Request
from orchestrator.paths import HostPaths

STARTING_S = 120.0
"""Between a lease and the first process of its run lie a push and a start; a lease that was taken
again with ``started`` has that behind it."""

_GPU = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,79}")
# From the start of the command line: a tmux server keeps for ever the words of the first session.
_SUPERVISE = re.compile(rb"[^\0]+\0-I\0-S\0[^\0]+\0supervise\0[^\0]*/runs/([A-Za-z0-9_-]+)\0")


def acquire(request: Request) -> dict[str, Any]:
    """All of the GPUs or none; stale leases are taken over, own ones are had already."""
    gpus = request.need("gpus", list)
    if not all(isinstance(gpu, str) and _GPU.fullmatch(gpu) for gpu in gpus):
        raise AgentError("request.invalid", "gpus is no list of GPU UUIDs", field="gpus")
    run_id = request.need("run_id", str)
    record = {
        "run_id": run_id,
        "ct": request.get("ct", int),
        "owner": request.get("owner", dict, {}),
        "created": time.time(),
        "boot_id": boot_id(),
        "started": request.get("started", bool, False),
    }
    make_private(request.paths.leases)
    with locked(f"{request.paths.leases}/.lock"):
        living = living_runs()
        held: list[dict[str, Any]] = []
        stale: list[dict[str, Any]] = []
        for gpu in gpus:
            found = _read(request.paths, gpu, living)
            if found is None or found["run_id"] == run_id:
                continue
            (stale if found["stale"] or request.get("force", bool, False) else held).append(found)
        if held:
            raise AgentError("lease.held", "GPUs are leased", leases=held)
        for gpu in gpus:
            write_record(request.paths.lease(gpu), {"gpu": gpu, **record})
    return {"leases": [{"gpu": gpu, **record} for gpu in gpus], "taken_over": stale}


def release(request: Request) -> dict[str, Any]:
    run_id = request.need("run_id", str)
    released = []
    make_private(request.paths.leases)
    with locked(f"{request.paths.leases}/.lock"):
        for gpu in _gpus(request.paths):
            if (read_record(request.paths.lease(gpu)) or {}).get("run_id") == run_id:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(request.paths.lease(gpu))
                released.append(gpu)
    return {"released": released}


def listing(request: Request) -> dict[str, Any]:
    living = living_runs()
    found = [_read(request.paths, gpu, living) for gpu in _gpus(request.paths)]
    return {"leases": [one for one in found if one is not None]}


def _gpus(paths: HostPaths) -> list[str]:
    try:
        names = os.listdir(paths.leases)
    except FileNotFoundError:
        return []
    return sorted(name[:-5] for name in names if name.endswith(".json"))


def _read(paths: HostPaths, gpu: str, living: set[str]) -> dict[str, Any] | None:
    record = read_record(paths.lease(gpu))
    if record is None:
        return None
    why = _why_stale(record, living)
    return {"gpu": gpu, **record, "stale": why is not None, "why": why}


def _why_stale(record: dict[str, Any], living: set[str]) -> str | None:
    if record.get("run_id") in living:
        return None
    if record.get("boot_id") != boot_id():
        return "the host was rebooted since"
    age = time.time() - record.get("created", 0.0)
    # A clock that was set back makes ages negative: then wait, do not take over.
    if age < STARTING_S and not record.get("started"):
        return None
    return "no process of its run is left"


def living_runs() -> set[str]:
    """Run ids of all processes of this machine, its containers' included."""
    found: set[str] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        run_id = process.run_of(int(name))
        if run_id:
            found.add(run_id)
        with contextlib.suppress(OSError):
            # Between two attempts of a run only its supervisor lives.
            with open(f"/proc/{name}/cmdline", "rb") as file:
                supervised = _SUPERVISE.match(file.read(8192))
            if supervised:
                found.add(supervised[1].decode())
    return found
