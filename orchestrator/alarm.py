"""From what a run says of itself to what a person should hear. Pure: no clock, no network.

A :class:`Watched` is fed one answer (or one failure to get one) after the other and returns the
notices that each gives rise to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from orchestrator.errors import DflashctlError
from orchestrator.run import ENDED, RunSummary
from trainer.telemetry import StepLine, compact, duration

# Five logged intervals: a checkpoint, an evaluation or a recompile slows one or two of them.
WINDOW = 5
# "Recent" best: a run whose rows grow longer is not measured by its first hour for ever.
RECENT = 400
DROP = 0.3
# Half of the drop must be made good before the alarm is over, so that it does not flutter.
BACK = 0.5

Kind = Literal[
    "state", "slow", "slower", "recovered", "stalled", "unreachable", "reachable", "restarted"
]
ALARMS = frozenset({"slow", "slower", "stalled", "unreachable", "restarted"})


@dataclass(frozen=True)
class Notice:
    """One thing to tell."""

    kind: Kind
    text: str

    @property
    def is_alarm(self) -> bool:
        return self.kind in ALARMS


@dataclass
class Throughput:
    """Tokens a second, judged by medians of ``WINDOW`` samples.

    :ivar drop: the share by which it must fall, 0..1.
    :ivar predecessor: the best of the run before, if there was one.
    """

    drop: float = DROP
    predecessor: float | None = None
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _medians: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _fell_from: float | None = None
    """The best when the alarm was raised; None while there is none. Kept, because the recent best
    of a run that stays slow comes down to meet it."""
    _compared: bool = False

    @property
    def now(self) -> float | None:
        """The median of the last samples; None until there are enough."""
        return median(self._last) if len(self._last) == WINDOW else None

    @property
    def best(self) -> float | None:
        """The highest median of the recent past."""
        return max(self._medians, default=None)

    @property
    def is_slow(self) -> bool:
        return self._fell_from is not None

    def standing(self) -> list[Notice]:
        """What holds now, for someone who comes late."""
        if self.now is None or self._fell_from is None:
            return []
        return [_slow(self.now, self._fell_from)]

    def feed(self, value: float) -> list[Notice]:
        """One more sample."""
        if not value > 0:
            return []
        self._last.append(value)
        now = self.now
        if now is None:
            return []
        self._medians.append(now)
        return [*self._own(now), *self._other(now)]

    def _own(self, now: float) -> list[Notice]:
        if self._fell_from is not None:
            if now < self._fell_from * (1 - self.drop * BACK):
                return []
            self._fell_from = None
            return [Notice("recovered", f"throughput is back at {compact(now)} tok/s")]
        best = self.best or now
        if now >= best * (1 - self.drop):
            return []
        self._fell_from = best
        return [_slow(now, best)]

    def _other(self, now: float) -> list[Notice]:
        """Told once: a run that is slower than the one before stays so."""
        before = self.predecessor
        # Of its own speed it has shown enough only after twice the window.
        if before is None or self._compared or len(self._medians) < WINDOW:
            return []
        self._compared = True
        if now >= before * (1 - self.drop):
            return []
        return [Notice("slower", f"{_fall(now, before)} the run before it ({compact(before)})")]


def _slow(now: float, best: float) -> Notice:
    return Notice("slow", f"{_fall(now, best)} its recent best of {compact(best)} tok/s")


def _fall(now: float, best: float) -> str:
    return f"throughput is {compact(now)} tok/s, {1 - now / best:.0%} below"


def best_of(steps: Sequence[StepLine]) -> float | None:
    """The highest median of ``WINDOW`` samples in a run's lines."""
    judged = Throughput()
    for line in steps:
        judged.feed(line.tokens_per_s or 0.0)
    return judged.best


@dataclass
class Watched:
    """One run, as far as it was heard of."""

    throughput: Throughput = field(default_factory=Throughput)
    summary: RunSummary | None = None
    unreachable: DflashctlError | None = None
    _told: tuple[float | None, int | None] = (None, None)
    """Time and step of the last step line that was counted."""
    _rates: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def state(self) -> str:
        if self.unreachable is not None:
            return "unreachable"
        return self.summary.state if self.summary else "unknown"

    @property
    def is_over(self) -> bool:
        """Unreachable is never over: nothing is known then."""
        return self.unreachable is None and self.summary is not None and self.summary.is_over

    def seed(self, steps: Sequence[StepLine], before: Sequence[StepLine] = ()) -> list[Notice]:
        """The run's own past, and its predecessor's; tells only what still holds."""
        for line in steps:
            self.throughput.feed(line.tokens_per_s or 0.0)
            self._rates.append((line.time, line.step))
        if steps:
            self._told = (steps[-1].time, steps[-1].step)
        self.throughput.predecessor = best_of(before)
        return self.throughput.standing()

    def feed(self, summary: RunSummary) -> list[Notice]:
        """The agent's answer."""
        before, self.summary = self.summary, summary
        notices: list[Notice] = []
        if self.unreachable is not None:
            self.unreachable = None
            notices.append(Notice("reachable", f"it answers again: {summary.state}"))
        notices += _changes(before, summary)
        if summary.is_over:
            return notices
        return notices + self._count(summary)

    def miss(self, error: DflashctlError) -> list[Notice]:
        """No answer: the state is unknown, which is told once."""
        first = self.unreachable is None
        self.unreachable = error
        if not first:
            return []
        known = f"; it was {self.summary.state}" if self.summary else ""
        return [Notice("unreachable", f"{error.what}{known}")]

    @property
    def eta_s(self) -> float | None:
        """The trainer's own reckoning, else from the pace of the steps that were seen."""
        summary = self.summary
        if summary is None or summary.is_over:
            return None
        if summary.eta_s is not None:
            return summary.eta_s
        if summary.step is None or summary.steps is None or summary.step >= summary.steps:
            return None
        pace = seconds_per_step(self._rates)
        return pace * (summary.steps - summary.step) if pace is not None else None

    def _count(self, summary: RunSummary) -> list[Notice]:
        extra = summary.model_extra or {}
        mark = (extra.get("metrics_time"), summary.step)
        if summary.step is None or mark == self._told:
            return []
        self._told = mark
        self._rates.append((mark[0] or 0.0, summary.step))
        return self.throughput.feed(summary.tokens_per_s or 0.0)


def seconds_per_step(marks: Sequence[tuple[float, int]]) -> float | None:
    """The median pace between neighbouring (time, step) marks; pauses do not count for much."""
    paces = [
        (t2 - t1) / (s2 - s1)
        for (t1, s1), (t2, s2) in zip(list(marks)[:-1], list(marks)[1:], strict=True)
        if s2 > s1 and t2 > t1
    ]
    return median(paces) if paces else None


def _changes(before: RunSummary | None, now: RunSummary) -> list[Notice]:
    attempt, earlier = (_attempt(s) for s in (now, before))
    notices = []
    if earlier is not None and attempt is not None and attempt > earlier:
        notices.append(Notice("restarted", f"it was started again (attempt {attempt})"))
    if before is not None and before.state == now.state:
        return notices
    if now.state == "stalled":
        notices.append(Notice("stalled", _stall(now)))
    elif now.state in ENDED:
        notices.append(Notice("state", now.ending()))
    else:
        notices.append(Notice("state", f"{before.state} → {now.state}" if before else now.state))
    return notices


def _attempt(summary: RunSummary | None) -> int | None:
    value: Any = (summary.model_extra or {}).get("attempt") if summary else None
    return value if isinstance(value, int) else None


def _stall(now: RunSummary) -> str:
    extra = now.model_extra or {}
    silent = duration(now.idle_s) if now.idle_s is not None else "a long time"
    phase = f" (last: {extra['phase']})" if extra.get("phase") else ""
    limit = extra.get("stall_after_s")
    usual = f"; in this phase {duration(limit)} is the limit" if limit else ""
    return f"stalled: no line for {silent}{phase}{usual}"


def state_words(watched: Watched) -> str:
    """Its state for a person: before the first answer it has none."""
    asked = watched.unreachable is None and watched.summary is None
    return "no answer yet" if asked else watched.state


def status_line(watched: Watched) -> str:
    """``training · step 120/400 · 15.5k tok/s · eta 3m20s``"""
    summary = watched.summary
    parts = [state_words(watched)]
    if summary is not None:
        if summary.progress:
            parts.append(f"step {summary.progress}")
        if summary.tokens_per_s is not None and not summary.is_over:
            parts.append(f"{compact(summary.tokens_per_s)} tok/s")
        if summary.loss is not None:
            parts.append(f"loss {summary.loss:.4f}")
        eta = watched.eta_s
        if eta is not None:
            parts.append(f"eta {duration(eta)}")
    return " · ".join(parts)


def verdict(all_watched: Sequence[Watched]) -> int:
    """The exit code: 1 if a run failed, 3 if one was never heard of again, else 0."""
    if any(w.unreachable is None and w.state == "failed" for w in all_watched):
        return 1
    return 3 if any(w.unreachable is not None for w in all_watched) else 0
