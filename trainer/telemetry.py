"""The one door between trainer and controller: the lines a run writes, as pydantic models.

The trainer appends ``StepLine`` records to ``metrics.jsonl`` and ``EventLine`` records to
``events.jsonl`` in the run's folder; the controller reads them. This module imports no torch, so
that a laptop can read a run without it.

The run's folder comes from the environment variable ``DFLASH_RUN_DIR``, which the supervisor sets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic import BaseModel, ConfigDict, Field

RUN_DIR_VARIABLE = "DFLASH_RUN_DIR"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"

EventKind = Literal[
    "started",  # the config is accepted; detail: config, data fingerprint
    "data",  # prepared; detail: fingerprint
    "plan",  # devices and roles; detail: the plan as data
    "compiling",  # warm-up of one shape begins; detail: name
    "compiled",  # warm-up of one shape ended; detail: name, seconds
    "training",  # the first step begins
    "validating",  # no step line comes until `checkpoint`; detail: step
    "validated",  # the checkpoint is written next; detail: step, seconds, loss, tau, accuracy
    "checkpoint",  # one was renamed into place; detail: path, step
    "evaluating",  # decoding of prompts begins, after the last step; detail: checkpoint
    "evaluated",  # detail: prompts, tokens, tau
    "recompile",  # after warm-up; detail: name, reason
    "eager_fallback",  # a compiled function ran eagerly; detail: name
    "lock_wait",  # a wait for the compile lock beyond a second; detail: seconds, thread
    "fx_trace",  # opt-in: who set torch's FX-tracing flag; detail: thread, stack
    "nonfinite",  # loss or gradient was not finite and the step was skipped; detail: step, count
    "resumed",  # detail: path, step
    "stopping",  # a signal was received and a checkpoint follows; detail: signal
    "stopped",  # left after a signal; detail: step
    "finished",  # detail: step
    "failed",  # the first cause; detail: stage, error, traceback
]


QUIET_EVENTS = frozenset({"validating", "validated", "evaluating"})
"""Phases in which no line for many minutes is nothing to worry about."""


class _Line(BaseModel):
    # Extra keys are kept: a newer trainer may write more than an older controller knows.
    model_config = ConfigDict(extra="allow")

    time: float = Field(default_factory=time.time)
    """Seconds since the epoch, by the container's clock."""


class StepLine(_Line):
    """One optimizer step."""

    step: int
    """Steps done, this one included (the first is 1)."""
    steps: int
    """Steps in all."""
    loss: float | None
    """Weighted cross-entropy over the global weight sum; null when not finite."""
    accuracy: list[float] = []
    """Share of right first choices at block slots 1..B-1 (slot 0 is the anchor)."""
    tau: float | None = None
    """Estimated acceptance length: 1 + the sum over k of the prefix products, averaged by block."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    """Before clipping."""
    tokens: int = 0
    """Context tokens consumed since the process began or resumed, over all drafters."""
    tokens_per_s: float | None = None
    """Context tokens a second over the last logged interval, over all drafters."""
    eta_s: float | None = None
    """To the last step; null at that one, for what is left then, validation and evaluation, takes
    minutes, and an ETA of 0 s would stand beside it for as long."""
    epoch: int = 0
    target_idle: float | None = None
    """Share of the interval in which target stages waited for a free slot, 0..1."""
    drafter_idle: float | None = None
    """Share of the interval in which drafter stages waited for features, 0..1."""
    queue_depth: float | None = None
    """Mean number of filled feature slots."""
    target_capacity: float | None = None
    """Context tokens a second if the targets never waited."""
    drafter_capacity: float | None = None
    target_ms: float | None = None
    """Milliseconds that a target was busy with a microbatch, the mean over the last steps; for
    ``pipeline.stage_ms``."""
    drafter_ms: float | None = None
    recommended_targets: int | None = None
    """Of the present devices: the split with the shortest period by these capacities."""
    recommended_drafters: int | None = None
    target_memory_gb: float | None = None
    """Peak device memory of a target's device, the mean over them; null on a CPU."""
    drafter_memory_gb: float | None = None
    transfer_s: float | None = None
    """Copies of features between devices over the last steps, in seconds; null in processes, where
    a send is not told apart from its wait for the receiver."""
    sum_wait_s: float | None = None
    """Seconds a step, over the last steps, that a drafter waited after its last backward pass for
    the sum of all drafters' gradients; null with one drafter."""
    memory_gb: float | None = None
    """Peak device memory (resident set on a CPU), in 1e9 bytes, of the fullest device."""
    recompiles: int = 0
    """Since warm-up, in all."""
    lock_waits: int = 0
    """Contended takes of the compile lock, in all."""
    lock_wait_s: float = 0.0

    def human(self) -> str:
        """The greppable line of the log.

        ``step     10/400 | loss 8.0315 | acc 0.040 | tau 1.11 | lr 2.06e-04 | 15.5k tok/s |
        37.3 GB``, then ``eta``, idle shares and queue depth where they are known.
        """
        width = max(6, len(str(self.steps)))
        parts = [
            f"step {self.step:>{width}}/{self.steps}",
            f"loss {self.loss:.4f}" if self.loss is not None else "loss nan",
        ]
        if self.accuracy:
            parts.append(f"acc {sum(self.accuracy) / len(self.accuracy):.3f}")
        if self.tau is not None:
            parts.append(f"tau {self.tau:.2f}")
        if self.learning_rate is not None:
            parts.append(f"lr {self.learning_rate:.2e}")
        if self.tokens_per_s is not None:
            parts.append(f"{compact(self.tokens_per_s)} tok/s")
        if self.memory_gb is not None:
            parts.append(f"{self.memory_gb:.1f} GB")
        if self.eta_s is not None:
            parts.append(f"eta {duration(self.eta_s)}")
        if self.target_idle is not None and self.drafter_idle is not None:
            parts.append(f"idle t {self.target_idle:.0%} d {self.drafter_idle:.0%}")
        if self.queue_depth is not None:
            parts.append(f"queue {self.queue_depth:.1f}")
        return " | ".join(parts)


class EventLine(_Line):
    """Something that happened to the run, outside the rhythm of its steps."""

    event: EventKind | str
    detail: dict[str, Any] = {}


class RunWriter:
    """Appends lines to a run folder, whole and at once, and prints the human line.

    Each record is one ``write`` of one line and is flushed, so a reader never meets half a record
    except the last of a machine that died.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.trackers: list[Any] = []
        """Told of every line too (``trackers.py``)."""
        self._metrics = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._events = (folder / EVENTS_FILE).open("a", encoding="utf-8")

    def step(self, line: StepLine) -> None:
        self._append(self._metrics, line)
        print(line.human(), flush=True)
        for tracker in self.trackers:
            tracker.step(line)

    def event(self, event: EventKind, **detail: Any) -> None:
        line = EventLine(event=event, detail=detail)
        self._append(self._events, line)
        for tracker in self.trackers:
            tracker.event(line)

    def claim(self) -> None:
        """Raise ``ConfigError`` where another process has claimed the folder: two runs in one tear
        each other's checkpoints down. The claim ends with the process, however that ends."""
        from trainer.errors import ConfigError

        if claimed_elsewhere(self._events):
            raise ConfigError(
                f"another run is writing into {self.folder}",
                next_step=f"stop it (`fuser {self.folder / EVENTS_FILE}` names its process), or"
                " give this one another folder",
            )

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
        self._metrics.close()
        self._events.close()

    @staticmethod
    def _append(stream: TextIO, line: BaseModel) -> None:
        stream.write(line.model_dump_json() + "\n")
        stream.flush()


def claimed_elsewhere(stream: TextIO) -> bool:
    """Whether another process has claimed an open file; if none has, this one does, until it closes
    the file (under any descriptor) or ends, however it ends."""
    # Here: a laptop that only reads may have none.
    import fcntl

    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (PermissionError, BlockingIOError):
        return True
    except OSError:
        # A file system without locks.
        pass
    return False


def read_steps(text: str) -> Iterator[StepLine]:
    """The step lines of a ``metrics.jsonl`` (or a piece of one); torn lines are passed over."""
    yield from _read(text, StepLine)


def read_events(text: str) -> Iterator[EventLine]:
    """The event lines of an ``events.jsonl`` (or a piece of one); torn lines are passed over."""
    yield from _read(text, EventLine)


def _read(text: str, model: type[Any]) -> Iterator[Any]:
    # Not ``splitlines``: a string may hold U+2028 and the like, which JSON leaves as they are.
    for line in text.split("\n"):
        try:
            yield model.model_validate(json.loads(line))
        except (ValueError, RecursionError):
            # pydantic's errors are of the first kind.
            continue


def say(text: str) -> None:
    """A line of the run's log."""
    print(text, flush=True)


def compact(value: float) -> str:
    """``15500`` as ``15.5k``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """``3725`` as ``1h02m``; days beyond two."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 172_800:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"
