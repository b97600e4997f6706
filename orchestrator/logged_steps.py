"""The steps of a program that writes no metrics.jsonl, as its log tells them: for curves.

What a line may look like is known to ``diag.steps``; here the lines of one run become one series.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from orchestrator.channel import AgentChannel
from orchestrator.diag.steps import BAR, Step, read_step
from orchestrator.diag.text import read_line
from orchestrator.paths import RunPaths
from orchestrator.run import RunSummary
from orchestrator.run_files import read_lines
from trainer.telemetry import StepLine

LOG_LINES = 100_000
"""So much of a log is read for a page: parsing takes some 50 µs a line that names a loss."""
_PERHAPS = re.compile(r"loss|tok|\d/s\b|it/s|s/it", re.IGNORECASE)
# transformers' last word on a run: its mean loss, which is no step's.
_SUMMARY = re.compile(r"train_runtime")


def ask(channel: AgentChannel, run_id: str, lines: int = LOG_LINES) -> list[Step]:
    """The steps among the last ``lines`` lines of a run's log."""
    return parse(read_lines(channel, run_id, RunPaths("").log, lines))


def parse(text: str) -> list[Step]:
    """One series: of the rank or thread that tells most, a step told in several lines once.

    A line without a number (transformers': ``{'loss': 2.3, 'epoch': 0.1}``) has the progress bar's
    before it; where there is none either, lines are counted.
    """
    told: list[Step] = []
    at: tuple[int, int] | None = None
    # A bar draws itself anew after each \r, and each drawing is a step.
    for number, raw in enumerate(re.split(r"[\r\n]+", text), 1):
        if not _PERHAPS.search(raw) or _SUMMARY.search(raw):
            continue
        line = read_line(number, raw)
        if bar := BAR.search(line.text):
            at = int(bar[1]), int(bar[2])
        step = read_step(line)
        if step is not None:
            told.append(step if step.step is not None or at is None else _numbered(step, at))
    return _joined(_of_one_stream(told))


def _numbered(step: Step, at: tuple[int, int]) -> Step:
    return replace(step, step=at[0], total=at[1])


def _of_one_stream(steps: list[Step]) -> list[Step]:
    """Every rank tells the same steps: drawn together they would be a zigzag."""
    streams = Counter(step.line.stream for step in steps)
    chosen = streams.most_common(1)[0][0] if streams else None
    return [step for step in steps if step.line.stream == chosen]


def _joined(steps: Iterable[Step]) -> list[Step]:
    found: list[Step] = []
    for count, step in enumerate(steps, 1):
        now = step if step.step is not None else replace(step, step=count)
        if found and found[-1].step == now.step:
            fresh = {name: value for name, value in _values(now) if value is not None}
            if found[-1].tokens_per_s is not None:
                # Of all devices first, then of each.
                fresh.pop("tokens_per_s", None)
            found[-1] = replace(found[-1], **fresh)
        else:
            found.append(now)
    return found


def _values(step: Step) -> Iterable[tuple[str, Any]]:
    return ((name, getattr(step, name)) for name in Step.__dataclass_fields__)


def as_lines(steps: Iterable[Step]) -> list[StepLine]:
    """In the trainer's own form, as far as the log goes: ``steps`` is 0 where it tells no total."""
    return [
        StepLine(
            time=step.line.time or 0.0,
            step=step.step or 0,
            steps=step.total or 0,
            loss=step.loss if step.loss is not None and math.isfinite(step.loss) else None,
            tokens_per_s=step.tokens_per_s,
        )
        for step in steps
    ]


def filled(run: RunSummary, steps: list[Step]) -> RunSummary:
    """What the agent says of a run, with the last step of its log where it knew of none."""
    if run.step is not None or not steps:
        return run
    last = steps[-1]
    fresh = {"step": last.step, "steps": last.total, "tokens_per_s": last.tokens_per_s}
    return run.model_copy(update=fresh)
