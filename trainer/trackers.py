"""TensorBoard and Weights & Biases, fed with the same lines as ``metrics.jsonl``, where wanted.

``report_to: [tensorboard, wandb]``. A tracker that fails while the run goes on is left out from
then on, with a line in the log: it must not cost a training run.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import ConfigError
from trainer.telemetry import EventLine, StepLine

TOLD_EVENTS = ("resumed", "checkpoint", "evaluated", "recompile", "nonfinite", "finished", "failed")
"""Of the events: what one wants to see beside a curve."""


class Tracker(Protocol):
    def step(self, line: StepLine) -> None: ...

    def event(self, line: EventLine) -> None: ...

    def close(self) -> None: ...


def check_trackers(names: Sequence[str]) -> None:
    """Raise ``ConfigError`` for one whose package, of the same name, is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"report_to names {', '.join(missing)}, which this interpreter does not have",
            next_step=f"pip install {' '.join(missing)}, or leave it out",
        )


def make_trackers(names: Sequence[str], folder: Path, config: dict[str, Any]) -> list[Tracker]:
    """For the rank that writes, in the run's folder."""
    check_trackers(names)
    found: list[Tracker] = []
    for name in dict.fromkeys(names):
        tracker = TensorBoard(folder) if name == "tensorboard" else WeightsAndBiases(folder, config)
        found.append(Guarded(name, tracker))
    return found


def numbers(line: StepLine) -> Iterator[tuple[str, float]]:
    """Every measure of a step by name; a list's by ``name/1``, ``name/2``, …"""
    for name, value in line.model_dump(exclude={"time", "step", "steps"}).items():
        if isinstance(value, list):
            yield from ((f"{name}/{i}", float(v)) for i, v in enumerate(value, start=1))
        elif isinstance(value, (int, float)):
            yield name, float(value)


class Guarded:
    """A tracker whose failure is told once and ends nothing but itself."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.tracker: Tracker | None = tracker

    def step(self, line: StepLine) -> None:
        self._try("step", line)

    def event(self, line: EventLine) -> None:
        self._try("event", line)

    def close(self) -> None:
        self._try("close")
        self.tracker = None

    def _try(self, method: str, *arguments: Any) -> None:
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - others' code, and a run is worth more
            self.tracker = None
            what = f"{type(error).__name__}: {error}"
            print(f"{self.name} is left out from here on: {what}", flush=True)


class TensorBoard:
    """Event files in ``tensorboard/`` of the run's folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._folder = folder / "tensorboard"
        self._writer: Any = None
        self._step = 0

    def step(self, line: StepLine) -> None:
        if self._writer is None:
            # What a killed run wrote after its last checkpoint is hidden.
            self._writer = self._make(str(self._folder), purge_step=line.step)
        self._step = line.step
        for name, value in numbers(line):
            self._writer.add_scalar(name, value, line.step, walltime=line.time)
        self._writer.flush()

    def event(self, line: EventLine) -> None:
        if self._writer is None or line.event not in TOLD_EVENTS:
            return
        text = json.dumps(line.detail, default=str)
        self._writer.add_text(line.event, text, self._step, walltime=line.time)
        for name, value in line.detail.items():
            if line.event == "evaluated" and isinstance(value, (int, float)):
                self._writer.add_scalar(f"evaluation/{name}", value, self._step, line.time)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """One wandb run a run's folder, resumed with it. ``WANDB_PROJECT``, ``WANDB_MODE`` and the key
    are wandb's own variables; without a key it stays offline, in the run's folder."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import wandb

        keyed = os.environ.get("WANDB_API_KEY") or (Path.home() / ".netrc").is_file()
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if keyed else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dflash"),
            name=folder.name,
            id=folder.name,
            resume="allow",
            dir=str(folder),
            config=config,
            mode=mode,
        )

    def step(self, line: StepLine) -> None:
        self._run.log(dict(numbers(line)), step=line.step)

    def event(self, line: EventLine) -> None:
        if line.event == "evaluated":
            self._run.summary.update({f"evaluation/{k}": v for k, v in line.detail.items()})

    def close(self) -> None:
        self._run.finish()
