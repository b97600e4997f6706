"""Shares of busy and idle time over the last steps, from the workers' meters."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.pipeline.device import Meter
from trainer.pipeline.split import Costs, recommend

WINDOW = 20
"""Steps over which shares and capacities are averaged."""


@dataclass(frozen=True)
class Usage:
    """Of all workers of one kind, since the start."""

    workers: int
    busy_s: float = 0.0
    idle_s: float = 0.0
    memory_gb: float = 0.0
    """Peaks of their devices, summed; 0 on a CPU."""

    @classmethod
    def of(cls, meters: Sequence[Meter]) -> Usage:
        return cls(
            len(meters),
            sum(m.busy_s for m in meters),
            sum(m.idle_s for m in meters),
            sum(m.peak_memory_gb() for m in meters),
        )


@dataclass(frozen=True)
class _Reading:
    tokens: int
    queue: float
    target: Usage
    drafter: Usage
    transfer_s: float | None
    sum_wait_s: float | None


class Gauge:
    """Fields of ``telemetry.StepLine`` that say which side waits for which."""

    def __init__(self, microbatches: int) -> None:
        """``microbatches`` of a step, over all drafters."""
        self._microbatches = microbatches
        self._readings: deque[_Reading] = deque(maxlen=WINDOW + 1)
        self._tokens = 0

    def read(
        self,
        tokens: int,
        queue: float,
        target: Usage,
        drafter: Usage,
        *,
        transfer_s: float | None = None,
        sum_wait_s: float | None = None,
    ) -> dict[str, float]:
        """After a step of so many context tokens, with ``queue`` filled slots a drafter;
        ``sum_wait_s`` since the start, of one drafter, null where it is the only one."""
        self._tokens += tokens
        reading = _Reading(self._tokens, queue, target, drafter, transfer_s, sum_wait_s)
        self._readings.append(reading)
        old, now = self._readings[0], self._readings[-1]
        if old is now:
            return {}
        queue_depth = sum(r.queue for r in self._readings) / len(self._readings)
        found = {"queue_depth": round(queue_depth, 2)}
        if now.transfer_s is not None and old.transfer_s is not None:
            found["transfer_s"] = round(now.transfer_s - old.transfer_s, 4)
        if now.sum_wait_s is not None and old.sum_wait_s is not None:
            waited = now.sum_wait_s - old.sum_wait_s
            found["sum_wait_s"] = round(waited / (len(self._readings) - 1), 6)
        tokens = now.tokens - old.tokens
        for name in ("target", "drafter"):
            before, after = getattr(old, name), getattr(now, name)
            busy, idle = after.busy_s - before.busy_s, after.idle_s - before.idle_s
            if busy > 0:
                found[f"{name}_idle"] = round(idle / (busy + idle), 4)
                found[f"{name}_capacity"] = round(tokens * after.workers / busy, 1)
                passed = (len(self._readings) - 1) * self._microbatches
                found[f"{name}_ms"] = round(busy / passed * 1e3, 3)
            if after.memory_gb:
                found[f"{name}_memory_gb"] = round(after.memory_gb / after.workers, 2)
        return found | _recommended(found, now.target.workers, now.drafter.workers)


def _recommended(found: dict[str, float], targets: int, drafters: int) -> dict[str, float]:
    """The split that the measured capacities ask for."""
    if not (found.get("target_capacity") and found.get("drafter_capacity")):
        return {}
    costs = Costs(targets / found["target_capacity"], drafters / found["drafter_capacity"])
    n, m = recommend(costs, targets + drafters)
    return {"recommended_targets": n, "recommended_drafters": m}
