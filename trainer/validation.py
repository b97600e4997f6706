"""The drafter on held-out samples, teacher-forced: the same loss on the same anchors each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.data.batch import Batch
from trainer.data.pack import PackedBatches
from trainer.drafter.mask import masks_for
from trainer.drafter.model import Drafter
from trainer.head_loss import fast_head_loss
from trainer.objective import DrafterLoss
from trainer.pipeline.stages import Sums

if TYPE_CHECKING:
    from trainer.run import Run

CPU = torch.device("cpu")


class Validator:
    """Measures masters on a few fixed microbatches, on the CPU. Their features are computed at the
    first use and kept there."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.count = run.config.checkpoint.validate_batches if len(run.data.held_out) else 0
        self._kept: list[tuple[Batch, Tensor]] = []
        self._loss: DrafterLoss | None = None

    @torch.no_grad()
    def measure(self, master: dict[str, Tensor]) -> Sums | None:
        """None when there is nothing held out to measure on."""
        if not self.count:
            return None
        loss = self._loss = self._loss or self._make_loss()
        loss.drafter.load_state_dict(master)
        total: Tensor | None = None
        for batch, features in self._batches():
            sums = Sums.vector(loss(batch, features, batch.labels))
            total = sums if total is None else total + sums
        assert total is not None
        return Sums.read(total)

    def _batches(self) -> list[tuple[Batch, Tensor]]:
        if not self._kept:
            run = self.run
            batches = PackedBatches(run.data.held_out, run.config, run.batches.pad_token)
            count = max(1, min(self.count, len(batches.packed) // batches.rows))
            # Where it lies already: a second copy on the CPU is 32 GB and minutes for an 8B target.
            target = run.tapped_target(run.targets.any_model().device)
            for index in range(count):
                batch = batches(*divmod(index, batches.slots))
                self._kept.append((batch, target.features(batch).to(CPU, torch.float32)))
        return self._kept

    def _make_loss(self) -> DrafterLoss:
        config = self.run.resolved.drafter
        return DrafterLoss(
            Drafter(config),
            self.run.targets.frozen(CPU, torch.float32),
            self.run.config.objective,
            masks_for(config, CPU, None),
            head_loss=fast_head_loss(CPU),
        )
