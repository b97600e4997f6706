"""The drafter on held-out samples, teacher-forced: the same loss on the same anchors each time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainer.config import TrainConfig
from trainer.data.batch import Batch
from trainer.data.pack import PackedBatches
from trainer.data.store import Samples
from trainer.pipeline.stages import Executor, Sums
from trainer.telemetry import say

if TYPE_CHECKING:
    from trainer.run import Run


def held_out_batches(samples: Samples, config: TrainConfig, pad_token: int) -> list[Batch]:
    """As many as ``checkpoint.validate_batches`` says, of training's shape: nothing compiled is
    compiled again for them."""
    asked = config.checkpoint.validate_batches
    if not asked or not len(samples):
        return []
    batches = PackedBatches(samples, config, pad_token)
    count = max(1, min(asked, len(batches.packed) // batches.rows))
    return [batches(*divmod(index, batches.slots)) for index in range(count)]


def validate(run: Run, executor: Executor, step: int) -> Sums | None:
    """By all ranks. Null on those that do not lead, and where there is nothing held out."""
    if run.leads and run.held_out:
        run.writer.event("validating", step=step)
    began = time.perf_counter()
    measured = executor.measure()
    if measured is None:
        return None
    seconds = time.perf_counter() - began
    say(f"validated on {len(run.held_out)} held-out microbatches in {seconds:.1f} s")
    run.writer.event(
        "validated",
        step=step,
        seconds=round(seconds, 3),
        loss=measured.mean_loss,
        tau=measured.mean_tau,
        accuracy=[round(a, 4) for a in measured.accuracy],
        **measured.selector(),
    )
    return measured
