"""What is worth telling about a run that is polled: changes, stalls, lost throughput. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from orchestrator.run import RunSummary

# Against the run's own recent best: below this share is an alarm.
SLOW_SHARE = 0.5
# Readings that the best is taken from, and that must all be slow: one slow step is no news.
WINDOW = 32
CONFIRM = 3


@dataclass(frozen=True)
class Alert:
    """One thing to tell."""

    kind: str
    """``state``, ``unreachable``, ``reachable``, ``slow``, ``recovered``, ``ended``."""
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


class Watcher:
    """Feed it every reading; it says each thing once."""

    def __init__(self) -> None:
        self._state: str | None = None
        self._reachable = True
        self._slow = False
        self._rates: deque[float] = deque(maxlen=WINDOW)
        self._step: int | None = None

    def unreachable(self, reason: str) -> list[Alert]:
        """No answer: the state is unknown, and that is all that is known."""
        if not self._reachable:
            return []
        self._reachable = False
        return [Alert("unreachable", f"unreachable: {reason}")]

    def reading(self, run: RunSummary) -> list[Alert]:
        """A summary of the run."""
        alerts = []
        if not self._reachable:
            self._reachable = True
            alerts.append(Alert("reachable", "answers again"))
        if run.state != self._state:
            self._state = run.state
            kind = "ended" if run.is_over else "state"
            alerts.append(Alert(kind, run.ending() if run.is_over else run.state))
        return alerts + self._throughput(run)

    def _throughput(self, run: RunSummary) -> list[Alert]:
        # Only new steps of a training run count: compiling and stalls have states of their own.
        if run.state != "training" or not run.tokens_per_s or run.step == self._step:
            return []
        self._step = run.step
        best = statistics.median(sorted(self._rates)[-5:]) if self._rates else 0.0
        self._rates.append(run.tokens_per_s)
        recent = list(self._rates)[-CONFIRM:]
        if len(self._rates) <= CONFIRM:
            return []
        slow = all(rate < SLOW_SHARE * best for rate in recent)
        fast = all(rate >= SLOW_SHARE * best for rate in recent)
        numbers = {"tokens_per_s": run.tokens_per_s, "best_tokens_per_s": best}
        if slow and not self._slow:
            self._slow = True
            share = run.tokens_per_s / best
            text = (
                f"throughput fell to {share:.0%} of this run's best ({run.tokens_per_s:.0f} tok/s)"
            )
            return [Alert("slow", text, numbers)]
        if fast and self._slow:
            self._slow = False
            return [
                Alert("recovered", f"throughput is back at {run.tokens_per_s:.0f} tok/s", numbers)
            ]
        return []
