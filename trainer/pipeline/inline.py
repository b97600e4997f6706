"""One device, one thread, one stage after the other: the reference that other executors equal."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from trainer.data.batch import Batch
from trainer.pipeline.held_out import HeldOut
from trainer.pipeline.stages import (
    DrafterStage,
    Job,
    ReadCheckpoint,
    StepResult,
    Sums,
    TargetStage,
    resume_alone,
)


class InlineExecutor:
    """Both parts on ``device``, or the target on a device of its own."""

    def __init__(
        self, job: Job, device: torch.device, target_device: torch.device | None = None
    ) -> None:
        self.job = job
        self.device = device
        self.target_device = target_device or device
        self.target: TargetStage
        self.drafter: DrafterStage
        self._held_out = HeldOut(job.held_out)
        self._thread = ExitStack()

    def start(self) -> None:
        self._thread.enter_context(self.job.compile_lock.thread())
        self.target = self.job.make_target(self.target_device)
        self.drafter = self.job.make_drafter(self.device)
        self.job.event("compiling", name="step")
        began = time.perf_counter()
        batch = self.job.batches(0, 0)
        self.drafter.accumulate(batch, self._features(batch))
        self.drafter.discard()
        for index in range(len(self.job.held_out)):
            self._held_out.make(self.target, index)
        if self.job.held_out:
            self._held_out.measure(self.drafter, 0)
        self.job.event("compiled", name="step", seconds=round(time.perf_counter() - began, 3))
        self.job.compile_lock.end_warm_up()

    def step(self, index: int) -> StepResult:
        total: torch.Tensor | None = None
        tokens = 0
        for slot in range(self.job.batches.slots):
            batch = self.job.batches(index, slot)
            tokens += batch.context_tokens()
            sums = self.drafter.accumulate(batch, self._features(batch))
            total = sums if total is None else total + sums
        assert total is not None
        norm = self.drafter.update(index, total)
        telemetry = self.job.compile_lock.stats().telemetry()
        return StepResult(index, total, norm, tokens, telemetry)

    def _features(self, batch: Batch) -> torch.Tensor:
        return self.target.features(batch).to(self.device)

    def agreed_stop(self, received: int | None) -> int | None:
        return received

    def measure(self) -> Sums | None:
        return self._held_out.total(lambda index: self._held_out.measure(self.drafter, index))

    def state(self) -> dict[str, Any]:
        return self.drafter.state()

    def load(self, state: dict[str, Any]) -> None:
        self.drafter.load(state)

    def resume(self, read: ReadCheckpoint) -> tuple[int, float | None]:
        return resume_alone(read, self.load)

    def close(self) -> None:
        self._thread.close()
