"""The target's features of each sample, kept after their first use.

For a small target on a CPU the target's forward pass costs more than the drafter's step, and every
epoch needs the same features: they depend on the sample alone, because documents of a row do not
see each other.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from trainer.data.batch import Batch
from trainer.pipeline.stages import TargetStage

Recall = Callable[[int], Tensor | None]
"""Sample → its features [L, K·H]."""


class CachedTarget:
    """A ``TargetStage`` that asks ``inner`` only for rows with a sample it has not seen."""

    def __init__(self, inner: TargetStage, recall: Recall | None = None) -> None:
        """``recall`` gives the features of a sample that somebody kept already, or null."""
        self.inner = inner
        self.recall = recall
        self.device = inner.device
        self.dtype = inner.dtype
        self.feature_width = inner.feature_width
        self._kept: dict[int, Tensor] = {}

    def features(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """As ``TargetStage.features``; padding has zero features."""
        if out is None:
            shape = (batch.rows, batch.length, self.feature_width)
            out = torch.zeros(shape, dtype=self.dtype, device=self.device)
        else:
            out.zero_()
        fresh = [
            row
            for row, ids in enumerate(batch.sample_ids)
            if not all(self._knows(sample) for sample in ids)
        ]
        if fresh:
            self._learn(batch, fresh)
        for row, ids in enumerate(batch.sample_ids):
            for sample, (start, end) in zip(ids, _spans(batch, row), strict=True):
                out[row, start:end].copy_(self._kept[sample][: end - start])
        return out

    def _knows(self, sample: int) -> bool:
        if sample not in self._kept and self.recall is not None:
            found = self.recall(sample)
            if found is not None:
                self._kept[sample] = found.to(self.device)
        return sample in self._kept

    def _learn(self, batch: Batch, rows: list[int]) -> None:
        part = Batch(
            **{name: value[rows] for name, value in batch.tensors().items()},
            sample_ids=tuple(batch.sample_ids[row] for row in rows),
        )
        found = self.inner.features(part)
        for row, ids in enumerate(part.sample_ids):
            for sample, (start, end) in zip(ids, _spans(part, row), strict=True):
                self._kept[sample] = found[row, start:end].clone()


def _spans(batch: Batch, row: int) -> list[tuple[int, int]]:
    """Where each document of a row begins and ends."""
    document = batch.document[row]
    counts = torch.bincount(document[document >= 0].long()).tolist()
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return list(pairwise(bounds))
