"""A few microbatches that nothing is learned from, the same at each checkpoint.

The target makes their features once, before the first step; a drafter stage measures them with the
forward pass it trains with, on its own device and in its own type: at Qwen3-8B's shape 28 TFLOP a
row, a fraction of a second there and minutes on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from trainer.data.batch import Batch
from trainer.feature_cache import CachedTarget
from trainer.pipeline.stages import DrafterStage, Sums, TargetStage


class HeldOut:
    """``batches`` and their features, which lie on the CPU: a device keeps room for training."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self._features: list[Tensor] = []

    def make(self, target: TargetStage, index: int) -> None:
        """The features of one; in order."""
        self.keep(held_out_features(target, self.batches[index]))

    def keep(self, features: Tensor) -> None:
        """A copy; for those of the next microbatch in order."""
        self._features.append(features.to("cpu", copy=True))

    def stand_in(self, features: Tensor) -> None:
        """For all microbatches, where only taking part counts."""
        self._features = [features] * len(self.batches)

    def measure(self, stage: DrafterStage, index: int) -> Tensor:
        """``Sums`` of one as a vector, on the CPU; waits for the device."""
        features = self._features[index].to(stage.device)
        return stage.measure(self.batches[index], features).cpu()

    def total(self, measure: Callable[[int], Tensor]) -> Sums | None:
        """Over all; null where there are none."""
        if not self.batches:
            return None
        total = measure(0)
        for index in range(1, len(self.batches)):
            total = total + measure(index)
        return Sums.read(total)


def held_out_features(target: TargetStage, batch: Batch, out: Tensor | None = None) -> Tensor:
    """Past a cache: it knows training samples by their numbers, and these have numbers too."""
    inner = target.inner if isinstance(target, CachedTarget) else target
    return inner.features(batch, out)
