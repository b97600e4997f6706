"""Files of a run's folder as they stand, and the earlier run that it can be compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.alarm import best_of
from orchestrator.channel import AgentChannel
from orchestrator.errors import DflashctlError
from trainer.telemetry import METRICS_FILE, StepLine, read_steps

# Enough for `alarm.RECENT` medians; a line has some 400 bytes.
SEED_LINES = 400
EARLIER_RUNS = 5
"""So far back a run is looked for that the present one can be compared with, or go on from."""


def first_before(
    channel: AgentChannel, run_id: str, good: Callable[[AgentChannel, str], bool]
) -> str | None:
    """The nearest run before this one that is ``good``."""
    for _ in range(EARLIER_RUNS):
        try:
            before = channel.call("run.status", run_id=run_id, lines=0).get("predecessor")
            if not before or good(channel, str(before)):
                return before
        except DflashctlError:
            # Removed since.
            return None
        run_id = str(before)
    return None


def last_that_trained(channel: AgentChannel, run_id: str) -> tuple[str, list[StepLine]] | None:
    """This run or the nearest before it that has a rate to compare with, and its last step lines.
    Attempts that died at once often lie between two real runs."""
    for _ in range(EARLIER_RUNS):
        try:
            lines = read_metrics(channel, run_id, SEED_LINES)
            if best_of(lines) is not None:
                return run_id, lines
            before = channel.call("run.status", run_id=run_id, lines=0).get("predecessor")
        except DflashctlError:
            # Removed since, or of another container: nothing to compare with.
            return None
        if not before:
            return None
        run_id = str(before)
    return None


def read_metrics(channel: AgentChannel, run_id: str, lines: int | None) -> list[StepLine]:
    """The last step lines of a run (None: all)."""
    return list(read_steps(read_lines(channel, run_id, METRICS_FILE, lines)))


def read_lines(channel: AgentChannel, run_id: str, file: str, lines: int | None) -> str:
    """The last ``lines`` lines of a file in the run's folder (None: all); empty if it is absent."""
    fields: dict[str, Any] = {} if lines is None else {"lines": lines}
    request = channel.request("tail", run_id=run_id, files=[file], follow=False, **fields)
    pieces = [payload for _, payload in request.frames()]
    return b"".join(pieces).decode("utf-8", errors="replace")
