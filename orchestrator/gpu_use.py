"""Which GPUs a run holds and how busy they are: by its host, else by its container.

The host sees whose process is on which card, and the leases; where a verb goes through the host's
agent anyway, one look there serves all of its containers. Inside a container the driver shows the
cards without their processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.channel import AgentChannel
from orchestrator.errors import UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.request import Request
from orchestrator.target import HostTarget, Target

if TYPE_CHECKING:
    from orchestrator.run import RunSummary

# A driver that hangs must not hold up the answer that it belongs to.
LIMIT_S = 2.0
# For so long one look at a host serves whoever asks.
FRESH_S = 2.0

Cards = dict[str, list[dict[str, Any]]]
"""Run id → its cards: index, uuid, name, utilization (%), memory_used_mb, memory_total_mb."""

_FIELDS = ("index", "uuid", "name", "utilization", "memory_used_mb", "memory_total_mb")


def by_host(
    runs: Collection[str], answer: Mapping[str, Any], leases: Sequence[Mapping[str, Any]]
) -> Cards:
    """Of the host's ``gpu.processes`` and ``lease.list``: leased, or with a process of the run."""
    holders: dict[str, set[str]] = {}
    for one in answer.get("processes") or []:
        holders.setdefault(one["gpu_uuid"], set()).add(str(one.get("run_id")))
    for one in leases:
        if not one.get("stale"):
            holders.setdefault(one["gpu"], set()).add(str(one.get("run_id")))
    return {
        run_id: [_card(gpu) for gpu in answer["gpus"] if run_id in holders.get(gpu["uuid"], ())]
        for run_id in runs
    }


def by_container(runs: Mapping[str, Collection[object]], answer: Mapping[str, Any]) -> Cards:
    """Of the container's own ``gpu.processes``.

    :param runs: the GPUs that each run was given, as indices of the container or UUIDs; none: all.
    """
    return {
        run_id: [
            _card(gpu)
            for gpu in answer["gpus"]
            if not given or {str(gpu["index"]), gpu["uuid"]} & {str(one) for one in given}
        ]
        for run_id, given in runs.items()
    }


def mean_use(cards: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean utilization; None where there is no GPU, or none that tells."""
    shares = [card.get("utilization") for card in cards]
    known = [float(share) for share in shares if isinstance(share, int | float)]
    return sum(known) / len(known) if known else None


def _card(gpu: Mapping[str, Any]) -> dict[str, Any]:
    return {name: gpu.get(name) for name in _FIELDS}


class Look:
    """One container's GPUs, asked for; :meth:`cards` waits for the answer."""

    def __init__(self, using: Request, leases: Request | None) -> None:
        """:param leases: of a host; None: ``using`` is the container's own."""
        self._using = using
        self._leases = leases
        self.asked = time.monotonic()

    def cards(self, runs: Sequence[RunSummary]) -> Cards:
        """Of the runs that live; without a driver there are none, which is no fault."""
        live = [run for run in runs if not run.is_over]
        if not live:
            return {}
        try:
            answer = self._using.result()
            leases = self._leases.result()["leases"] if self._leases else []
        except UnreachableError:
            # The container's own answer is what counts.
            return {}
        if self._leases is not None:
            return by_host([run.run_id for run in live], answer, leases)
        given = {run.run_id: (run.model_extra or {}).get("gpus") or () for run in live}
        return by_container(given, answer)


class Looks:
    """Asks host or container, whichever is at hand. Thread-safe."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()
        self._hosts: dict[HostTarget, Look] = {}

    def begin(self, target: Target, channel: AgentChannel) -> Look:
        """Ask, beside whatever else is asked on ``channel``."""
        carrier = self._fleet.carrier(target.host)
        if carrier is None:
            return Look(channel.request("gpu.processes", timeout_s=LIMIT_S), None)
        with self._lock:
            look = self._hosts.get(target.host)
            if look is None or time.monotonic() - look.asked > FRESH_S:
                using = carrier.request("gpu.processes", timeout_s=LIMIT_S)
                look = Look(using, carrier.request("lease.list"))
                self._hosts[target.host] = look
            return look
