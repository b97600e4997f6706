"""GPUs claimed on the host for a run's whole life, and the refusal of those that are in use.

Only the host can tell: inside a container the driver shows no PIDs, and another container's lease
is not to be seen. A run without a GPU asks the host nothing.
"""

from __future__ import annotations

import time
from typing import Any

from orchestrator.agent.protocol import AgentError
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
) -> list[str]:
    """Lease all of ``gpus`` or none; what was taken over from whom, and why.

    :raises RefusedError: leased by a run that lives, or used by a process; not under ``force``.
    """
    using = host.request("gpu.processes")
    leasing = host.request(
        "lease.acquire", gpus=gpus, run_id=run_id, ct=target.ct, owner=owner, force=force
    )
    found = using.result()
    try:
        taken = leasing.result()["taken_over"]
    except RefusedError as error:
        held: Any = (
            error.__cause__.detail["leases"] if isinstance(error.__cause__, AgentError) else []
        )
        raise RefusedError(
            f"{error.what}: {'; '.join(_lease(one, found['gpus']) for one in held)}",
            next_step=error.next_step,
            **target.place,
            run_id=run_id,
        ) from error.__cause__
    told = [f"{_lease(one, found['gpus'])}: {one['why'] or 'it lives'}" for one in taken]
    if found.get("error"):
        # Without a driver on the host nothing can be told of its processes; the leases still hold.
        return told
    busy = [
        one
        for one in found["processes"]
        # Asked again after a lost answer, the run itself may be at work by now.
        if one["gpu_uuid"] in gpus and one.get("run_id") != run_id
    ]
    if busy and not force:
        release(host, run_id)
        raise RefusedError(
            f"GPUs are in use: {'; '.join(_process(one, found['gpus']) for one in busy[:8])}",
            next_step="end that process, choose other GPUs, or launch beside it with --force",
            **target.place,
            run_id=run_id,
        )
    return told


def held(host: AgentChannel, gpus: list[str]) -> list[str]:
    """What would keep another run off ``gpus``: leases of runs that live, processes of others."""
    using, leasing = host.request("gpu.processes"), host.request("lease.list")
    found = using.result()
    leases = [one for one in leasing.result()["leases"] if one["gpu"] in gpus and not one["stale"]]
    runs = {one["run_id"] for one in leases}
    busy = [
        one
        for one in found["processes"]
        if one["gpu_uuid"] in gpus and one.get("run_id") not in runs
    ]
    cards = found["gpus"]
    return [*(_lease(one, cards) for one in leases), *(_process(one, cards) for one in busy[:8])]


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


def _card(uuid: str, cards: list[dict[str, Any]]) -> str:
    """By its index on the host, where the driver tells one."""
    return f"GPU {next((card['index'] for card in cards if card['uuid'] == uuid), uuid)}"


def _lease(lease: dict[str, Any], cards: list[dict[str, Any]]) -> str:
    """``GPU 3 by anna@laptop for r-0610 in container 204 since 2026-11-30 08:12``."""
    who = (lease.get("owner") or {}).get("user") or "somebody"
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(lease.get("created", 0.0)))
    place = f"container {lease.get('ct')}"
    return f"{_card(lease['gpu'], cards)} by {who} for {lease['run_id']} in {place} since {since}"


def _process(process: dict[str, Any], cards: list[dict[str, Any]]) -> str:
    """``GPU 3 by PID 4711 (python3 train.py, 31190 MiB) in container 204``."""
    card = _card(process["gpu_uuid"], cards)
    place = (
        f"container {process['ct']}" if process.get("ct") else "no container: on the host itself"
    )
    command = str(process.get("command") or "?")[:60]
    memory = f", {process['memory_mb']} MiB" if process.get("memory_mb") is not None else ""
    return f"{card} by PID {process['pid']} ({command}{memory}) in {place}"
