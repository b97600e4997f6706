"""The target's features of each sample, kept after their first use.

For a small target the forward pass costs as much as the drafter's step, and every epoch needs the
same features: they depend on the sample alone, because documents of a row do not see each other.
They lie in one table on the target's device; a batch is one gather from it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trainer.data.batch import Batch
from trainer.errors import ResourceError, first_line
from trainer.pipeline.stages import TargetStage

Recall = Callable[[int], Tensor | None]
"""Sample → its features [L, K·H]."""


class CachedTarget:
    """A ``TargetStage`` that asks ``inner`` only for rows with a sample it has not seen."""

    def __init__(
        self, inner: TargetStage, lengths: np.ndarray, recall: Recall | None = None
    ) -> None:
        """``lengths`` of all samples, as they are cut to a row. ``recall`` gives the features of a
        sample that somebody kept already, or null."""
        self.inner = inner
        self.recall = recall
        self.device = inner.device
        self.dtype = inner.dtype
        self.feature_width = inner.feature_width
        self._lengths = lengths
        self._offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._known = np.zeros(len(lengths), bool)
        self._table = self._allocate(int(self._offsets[-1]) + 1)

    def _allocate(self, rows: int) -> Tensor:
        """The last row stays zero: it is the padding's."""
        size = rows * self.feature_width * self.dtype.itemsize
        try:
            table = torch.empty((rows, self.feature_width), dtype=self.dtype, device=self.device)
        except RuntimeError as error:
            raise ResourceError(
                f"data.cache_features: {size / 1e9:.1f} GB for {rows - 1} tokens do not fit on"
                f" {self.device}: {first_line(error)}",
                next_step="leave cache_features out, or make less data",
            ) from None
        table[-1].zero_()
        return table

    def features(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """As ``TargetStage.features``; padding has zero features."""
        fresh = [
            row
            for row, ids in enumerate(batch.sample_ids)
            if not all(self._knows(sample) for sample in ids)
        ]
        places = self._places(batch)
        if fresh:
            self._learn(batch, fresh, places)
        flat = self._send(places.flatten())
        if out is None:
            shape = (batch.rows, batch.length, self.feature_width)
            return self._table.index_select(0, flat).view(shape)
        if out.device == self.device and out.is_contiguous():
            torch.index_select(self._table, 0, flat, out=out.view(-1, self.feature_width))
        else:
            out.copy_(self._table.index_select(0, flat).view(out.shape))
        return out

    def _places(self, batch: Batch) -> Tensor:
        """The table's row of every token, i64 [b, S] on the CPU."""
        widest = max(len(ids) for ids in batch.sample_ids)
        firsts = np.zeros((batch.rows, widest), np.int64)
        for row, ids in enumerate(batch.sample_ids):
            firsts[row, : len(ids)] = self._offsets[list(ids)]
        document = batch.document.cpu().long()
        first = torch.from_numpy(firsts).gather(1, document.clamp(min=0))
        padding = self._table.shape[0] - 1
        return torch.where(document >= 0, first + batch.position.cpu(), padding)

    def _send(self, index: Tensor) -> Tensor:
        if self.device.type == "cuda":
            index = index.pin_memory()
        return index.to(self.device, non_blocking=True)

    def _knows(self, sample: int) -> bool:
        if not self._known[sample] and self.recall is not None:
            found = self.recall(sample)
            if found is not None:
                start, length = int(self._offsets[sample]), int(self._lengths[sample])
                self._table[start : start + length] = found[:length].to(self.device)
                self._known[sample] = True
        return bool(self._known[sample])

    def _learn(self, batch: Batch, rows: list[int], places: Tensor) -> None:
        part = Batch(
            **{name: value[rows] for name, value in batch.tensors().items()},
            sample_ids=tuple(batch.sample_ids[row] for row in rows),
        )
        found = self.inner.features(part).flatten(0, 1)
        where = self._send(places[rows].flatten())
        # All padding goes to one row, which is zero again afterwards.
        self._table.index_copy_(0, where, found)
        self._table[-1].zero_()
        for ids in part.sample_ids:
            self._known[list(ids)] = True
