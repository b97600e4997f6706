"""Shares of busy and idle time over the last steps, from the workers' meters."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.pipeline.device import Meter

WINDOW = 20
"""Steps over which shares and capacities are averaged."""


@dataclass(frozen=True)
class _Reading:
    tokens: int
    queue: float
    busy: tuple[float, float, float]
    idle: tuple[float, float]


class Gauge:
    """Fields of ``telemetry.StepLine`` (and ``target_capacity``, ``drafter_capacity``: context
    tokens a second if that side never waited; ``transfer_s``: copies between devices)."""

    def __init__(
        self,
        targets: Sequence[Meter],
        drafters: Sequence[Meter],
        transfers: Sequence[Meter],
    ) -> None:
        self._meters = (targets, drafters, transfers)
        self._readings: deque[_Reading] = deque(maxlen=WINDOW + 1)
        self._tokens = 0

    def read(self, tokens: int, queue: float) -> dict[str, float]:
        """After a step of so many context tokens, with ``queue`` filled slots a drafter."""
        self._tokens += tokens
        targets, drafters, transfers = (_totals(meters) for meters in self._meters)
        now = _Reading(
            self._tokens,
            queue,
            (targets[0], drafters[0], transfers[0]),
            (targets[1], drafters[1]),
        )
        self._readings.append(now)
        if len(self._readings) < 2:
            return {}
        return self._between(self._readings[0], now)

    def _between(self, old: _Reading, now: _Reading) -> dict[str, float]:
        tokens = now.tokens - old.tokens
        found: dict[str, float] = {}
        for i, name in enumerate(("target", "drafter")):
            busy, idle = now.busy[i] - old.busy[i], now.idle[i] - old.idle[i]
            if busy > 0:
                found[f"{name}_idle"] = round(idle / (busy + idle), 4)
                found[f"{name}_capacity"] = round(tokens * len(self._meters[i]) / busy, 1)
        found["transfer_s"] = round(now.busy[2] - old.busy[2], 4)
        queues = [r.queue for r in list(self._readings)[1:]]
        found["queue_depth"] = round(sum(queues) / len(queues), 2)
        return found


def _totals(meters: Sequence[Meter]) -> tuple[float, float]:
    return sum(m.busy_s for m in meters), sum(m.idle_s for m in meters)
