"""GPUs claimed on the host for a run's whole life, and the refusal of those that are in use.

Only the host can tell: inside a container the driver shows no PIDs, and another container's lease
is not to be seen. A run without a GPU asks the host nothing.
"""

from __future__ import annotations

from typing import Any

from orchestrator.channel import AgentChannel
from orchestrator.errors import RefusedError
from orchestrator.target import Target


def wanted(checks: dict[str, Any], target: Target) -> list[str]:
    """UUIDs of the GPUs that the run will use, by the agent's ``preflight``.

    The inventory names them by index (the container's) or UUID; none named means every visible one.
    """
    value = (checks.get("gpu") or {}).get("value") or {}
    visible = value.get("visible") or []
    named = {str(gpu) for gpu in target.settings.gpus}
    return [
        str(card["uuid"])
        for card in visible
        if not named or str(card["index"]) in named or card["uuid"] in named
    ]


def claim(
    host: AgentChannel,
    target: Target,
    run_id: str,
    gpus: list[str],
    owner: dict[str, Any],
    *,
    force: bool,
) -> None:
    """Lease all of ``gpus`` or none; stale leases are taken over.

    :raises RefusedError: leased by a run that lives, or used by a process; not under ``force``.
    """
    using = host.request("gpu.processes")
    leasing = host.request(
        "lease.acquire", gpus=gpus, run_id=run_id, ct=target.ct, owner=owner, force=force
    )
    leasing.result()
    found = using.result()
    if found.get("error"):
        # Without a driver on the host nothing can be told of its processes; the leases still hold.
        return
    busy = [
        one
        for one in found["processes"]
        # Asked again after a lost answer, the run itself may be at work by now.
        if one["gpu_uuid"] in gpus and one.get("run_id") != run_id
    ]
    if busy and not force:
        release(host, run_id)
        raise RefusedError(
            f"GPUs are in use: {'; '.join(_words(one, found['gpus']) for one in busy[:8])}",
            next_step="end that process, choose other GPUs, or launch beside it with --force",
            **target.place,
            run_id=run_id,
        )


def confirm(
    host: AgentChannel, target: Target, run_id: str, gpus: list[str], owner: dict[str, Any]
) -> None:
    """Say that the run has begun: from now on its leases are stale once its processes are gone.

    Before, they are kept for two minutes without any, in which a start takes place.
    """
    host.call("lease.acquire", gpus=gpus, run_id=run_id, ct=target.ct, owner=owner, started=True)


def release(host: AgentChannel, run_id: str) -> None:
    """Give back whatever the run has leased."""
    host.call("lease.release", run_id=run_id)


def _words(process: dict[str, Any], cards: list[dict[str, Any]]) -> str:
    """``GPU 3 by PID 4711 (python3 train.py, 31190 MiB) in container 204``."""
    index = next((c["index"] for c in cards if c["uuid"] == process["gpu_uuid"]), None)
    card = f"GPU {index if index is not None else process['gpu_uuid']}"
    place = (
        f"container {process['ct']}" if process.get("ct") else "no container: on the host itself"
    )
    command = str(process.get("command") or "?")[:60]
    memory = f", {process['memory_mb']} MiB" if process.get("memory_mb") is not None else ""
    return f"{card} by PID {process['pid']} ({command}{memory}) in {place}"
