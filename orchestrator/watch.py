"""Polling many runs until they end: one thread a run asks, one place judges and tells."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.alarm import Notice, Throughput, Watched
from orchestrator.channel import AgentChannel
from orchestrator.errors import ContainerNotRunning, DflashctlError, UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.run import RunRef, RunSummary
from orchestrator.run_files import EVENT_LINES, SEED_LINES, comparable, read_lines, read_metrics
from orchestrator.target import Target
from trainer.telemetry import EVENTS_FILE, StepLine

EVERY_S = 10.0
# While nobody answers: quick at first, then once a minute.
BACKOFF_S = (2.0, 5.0, 10.0, 20.0, 40.0, 60.0)


@dataclass
class Report:
    """Something happened to a run: what to tell, and how it stands now."""

    ref: RunRef
    watched: Watched
    notices: list[Notice] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"{self.ref.target.name} {self.ref.run_id or ''}".rstrip()

    def as_dict(self, notice: Notice) -> dict[str, Any]:
        """One notice with the stable keys of ``--json``; also the webhook's body."""
        summary = self.watched.summary
        stable: dict[str, Any] = dict.fromkeys(
            ("exit_code", "signal", "step", "steps", "tokens_per_s", "loss")
        )
        if summary is not None:
            stable = {key: getattr(summary, key) for key in stable}
        return {
            "event": notice.kind,
            "alarm": notice.is_alarm,
            # Chat services (Slack, Mattermost) show the field of this name as it is.
            "text": f"{self.where}: {notice.text}",
            **self.ref.place,
            "state": self.watched.state,
            "eta_s": self.watched.eta_s,
            **stable,
        }


@dataclass(frozen=True)
class _Answer:
    index: int
    value: RunSummary | DflashctlError | tuple[list[StepLine], list[StepLine]] | None
    """None: the thread left before the run was over, which only a fault of ours brings about."""


class Watch:
    """Asks about ``refs`` every ``every_s`` seconds until all have ended."""

    def __init__(
        self,
        fleet: Fleet,
        refs: Sequence[RunRef],
        *,
        drop: float,
        every_s: float = EVERY_S,
        stall_s: float | None = None,
    ) -> None:
        """
        :param drop: the fall in throughput, 0..1, that raises the alarm.
        :param stall_s: silence that counts as a stall in place of the run's own limit.
        """
        self.reports = [Report(ref, Watched(Throughput(drop=drop))) for ref in refs]
        self._fleet = fleet
        self._every_s = every_s
        self._stall = {"stall_s": stall_s} if stall_s is not None else {}
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._over = threading.Event()
        self._crowd = Counter(ref.target.host for ref in refs)
        fleet.expect([ref.target for ref in refs])

    def run(self) -> Iterator[Report]:
        """Each run after each answer, with what that answer gave rise to.

        :raises DflashctlError: a run that is not there, or the only one cannot be reached at all.
        """
        for index in range(len(self.reports)):
            threading.Thread(
                target=self._work, args=(index,), daemon=True, name=f"watch {index}"
            ).start()
        try:
            while not all(report.watched.is_over for report in self.reports):
                answer = self._answers.get()
                if answer.value is not None or not self.reports[answer.index].watched.is_over:
                    yield self._judge(answer)
        finally:
            self._over.set()

    def _judge(self, answer: _Answer) -> Report:
        report = self.reports[answer.index]
        if isinstance(answer.value, RunSummary):
            # "The newest" is fixed once: a later launch is another run.
            report.ref = RunRef(report.ref.target, answer.value.run_id)
            report.notices = report.watched.feed(answer.value)
        elif isinstance(answer.value, DflashctlError):
            if not self._may_mend(report, answer.value):
                raise answer.value
            report.notices = report.watched.miss(answer.value)
        elif answer.value is None:
            raise RuntimeError(f"the thread that asked about {report.where} is gone")
        else:
            report.notices = report.watched.seed(*answer.value)
        return report

    def _may_mend(self, report: Report, error: DflashctlError) -> bool:
        if not isinstance(error, (UnreachableError, ContainerNotRunning)):
            return False
        return report.watched.summary is not None or len(self.reports) > 1

    # In the threads

    def _work(self, index: int) -> None:
        try:
            self._ask_on(index)
        finally:
            self._answers.put(_Answer(index, None))

    def _ask_on(self, index: int) -> None:
        """Until the run is over."""
        ref = self.reports[index].ref
        seeded = False

        def ask(channel: AgentChannel) -> bool:
            nonlocal ref, seeded
            answer = channel.call("run.status", lines=3, **ref.fields, **self._stall)
            summary = RunSummary.model_validate(answer)
            # Not before the first step: until then nothing tells what the run works on.
            if not seeded and summary.step is not None:
                self._answers.put(_Answer(index, _past(channel, answer)))
                seeded = True
            ref = RunRef(ref.target, summary.run_id)
            self._answers.put(_Answer(index, summary))
            return summary.is_over

        keep_asking(
            self._fleet,
            ref.target,
            ask,
            lambda error: self._answers.put(_Answer(index, error)),
            every_s=self._every_s,
            crowd=self._crowd[ref.target.host],
            over=self._over,
        )


def _past(
    channel: AgentChannel, status: Mapping[str, Any]
) -> tuple[list[StepLine], list[StepLine]]:
    """The run's own steps, and those of a run before it that did the same work."""
    run_id = str(status["run_id"])
    own = read_metrics(channel, run_id, SEED_LINES)
    found = comparable(channel, status, read_lines(channel, run_id, EVENTS_FILE, EVENT_LINES))
    return own, found.steps if found and not found.unlike else []


def keep_asking(
    fleet: Fleet,
    target: Target,
    ask: Callable[[AgentChannel], bool],
    missed: Callable[[DflashctlError], None],
    *,
    every_s: float,
    crowd: int,
    over: threading.Event,
) -> None:
    """``ask`` a container every ``every_s`` seconds, until it returns True or ``over`` is set.

    Its channel is closed then, or after each question where there is no room for all: others wait
    for it.

    :param missed: told why nobody answered; then the pauses grow.
    :param crowd: how many ask containers of this host.
    """
    channel: AgentChannel | None = None
    misses = 0
    while not over.is_set():
        pause = every_s
        try:
            channel = channel or fleet.container(target)
            is_last = ask(channel)
            misses = 0
            if is_last or crowd > fleet.room(target.host):
                channel.close()
                channel = None
            if is_last:
                return
        except DflashctlError as error:
            missed(error)
            if channel is not None:
                fleet.drop(channel)
                channel = None
            pause = BACKOFF_S[min(misses, len(BACKOFF_S) - 1)]
            misses += 1
        over.wait(pause)
