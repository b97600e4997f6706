"""Files of a run's folder as they stand, and the earlier run that it can be compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.alarm import best_of
from orchestrator.channel import AgentChannel
from orchestrator.errors import DflashctlError
from orchestrator.request import Request
from orchestrator.same_work import differences, is_other_program, work_of
from trainer.telemetry import EVENTS_FILE, METRICS_FILE, StepLine, read_steps

# Enough for `alarm.RECENT` medians; a line has some 400 bytes.
SEED_LINES = 400
EVENT_LINES = 2_000
EARLIER_RUNS = 5
"""So far back a run is looked for that the present one can be compared with, or go on from."""


@dataclass(frozen=True)
class Earlier:
    """A run of the same program that has a rate to compare with."""

    run_id: str
    status: Mapping[str, Any]
    """``run.status``'s answer."""
    steps: list[StepLine]
    """Its last ones."""
    unlike: list[str]
    """Why its rate is no measure of the present run's; empty if it is one."""


def first_before(
    channel: AgentChannel, run_id: str, good: Callable[[AgentChannel, str], bool]
) -> str | None:
    """The nearest run before this one that is ``good``."""
    try:
        status = channel.call("run.status", run_id=run_id, lines=0)
        ids = (str(one["run_id"]) for one in _before(channel, status))
        return next((one for one in ids if good(channel, one)), None)
    except DflashctlError:
        # Removed since.
        return None


def comparable(channel: AgentChannel, status: Mapping[str, Any], events: str) -> Earlier | None:
    """The nearest run before this one that did the same work and has a rate; if there is none, the
    nearest of the same program. Attempts that died at once often lie between two real runs, and
    so do runs of other programs.

    :param status: this run's own ``run.status``.
    :param events: this run's ``events.jsonl``.
    """
    now = work_of(status.get("record") or {}, events)
    second = None
    try:
        for one in _before(channel, status):
            record, run_id = one.get("record") or {}, str(one["run_id"])
            if is_other_program(work_of(record, ""), now):
                continue
            asked = [
                _ask_lines(channel, run_id, file, count)
                for file, count in ((METRICS_FILE, SEED_LINES), (EVENTS_FILE, EVENT_LINES))
            ]
            metrics, told = map(_text, asked)
            steps = list(read_steps(metrics))
            if best_of(steps) is None:
                continue
            found = Earlier(run_id, one, steps, differences(work_of(record, told), now))
            if not found.unlike:
                return found
            second = second or found
    except DflashctlError:
        # Removed since, or of another container: nothing more to compare with.
        pass
    return second


def _before(channel: AgentChannel, status: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """``run.status`` of the runs before this one, the nearest first."""
    for _ in range(EARLIER_RUNS):
        before = status.get("predecessor")
        if not before:
            return
        status = channel.call("run.status", run_id=str(before), lines=0)
        yield dict(status)


def read_metrics(channel: AgentChannel, run_id: str, lines: int | None) -> list[StepLine]:
    """The last step lines of a run (None: all)."""
    return list(read_steps(read_lines(channel, run_id, METRICS_FILE, lines)))


def read_lines(channel: AgentChannel, run_id: str, file: str, lines: int | None) -> str:
    """The last ``lines`` lines of a file in the run's folder (None: all); empty if it is absent."""
    return _text(_ask_lines(channel, run_id, file, lines))


def _ask_lines(channel: AgentChannel, run_id: str, file: str, lines: int | None) -> Request:
    fields: dict[str, Any] = {} if lines is None else {"lines": lines}
    return channel.request("tail", run_id=run_id, files=[file], follow=False, **fields)


def _text(request: Request) -> str:
    pieces = [payload for _, payload in request.frames()]
    return b"".join(pieces).decode("utf-8", errors="replace")
