"""Batches of fixed shape as a pure function of (step, slot): nothing to save, nothing to resume.

Samples are packed into rows once; each epoch visits the rows in an order of its own and draws new
anchors. Rows flow on from one epoch to the next inside a step, so no row is dropped and none is
repeated to fill up.
"""

from __future__ import annotations

import bisect
import itertools

import numpy as np
import torch

from trainer.config import TrainConfig
from trainer.data.batch import Batch
from trainer.data.store import Samples
from trainer.errors import DataError
from trainer.objective import anchor_candidates, sample_anchors, share_anchors

OPEN_ROWS = 64
"""Rows that are still being filled while packing: best fit among these."""


def pack_rows(lengths: np.ndarray, row: int, seed: int) -> list[list[int]]:
    """Sample indices of each row; no row's lengths (each cut to ``row``) add up to more than it.

    Best fit over a window of open rows, in shuffled order: within 3 % of full on chat lengths,
    and linear in the number of samples.
    """
    order = np.random.Generator(np.random.Philox(key=(seed, 1))).permutation(len(lengths))
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row index), sorted by room
    for sample in order.tolist():
        length = min(int(lengths[sample]), row)
        place = bisect.bisect_left(open_rows, (length, -1))
        if place == len(open_rows):
            rows.append([])
            room, index = row, len(rows) - 1
        else:
            room, index = open_rows.pop(place)
        rows[index].append(sample)
        bisect.insort(open_rows, (room - length, index))
        if len(open_rows) > OPEN_ROWS:
            open_rows.pop(0)
    return rows


class PackedBatches:
    """``Batches`` over tokenized samples (``pipeline/stages.py``)."""

    def __init__(self, samples: Samples, config: TrainConfig, pad_token: int) -> None:
        optimization, data = config.optimization, config.data
        self.samples = samples
        self.relabelled = config.objective.labels == "target"
        self.seed = config.seed
        self.length = data.sequence_length
        self.anchors = data.anchors
        self.rows = optimization.rows
        self.slots = optimization.microbatches
        self.pad_token = pad_token
        self.shape = (self.rows, self.length, self.anchors)
        self.packed = pack_rows(samples.lengths, self.length, config.seed)
        if not self.packed:
            raise DataError(
                "there is no sample to train on", next_step="give more by data.files or data.make"
            )
        per_step = self.rows * self.slots
        if optimization.steps is not None:
            self.steps = optimization.steps
        else:
            assert optimization.epochs is not None
            self.steps = max(1, round(optimization.epochs * len(self.packed) / per_step))
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def epoch(self, step: int) -> int:
        return step * self.rows * self.slots // len(self.packed)

    def __call__(self, step: int, slot: int) -> Batch:
        first = (step * self.slots + slot) * self.rows
        built = [self._row(index) for index in range(first, first + self.rows)]
        stacked = {
            name: torch.from_numpy(np.stack([row[name] for row, _ in built]))
            for name in built[0][0]
        }
        return Batch(**stacked, sample_ids=tuple(ids for _, ids in built))

    def _row(self, index: int) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
        """The ``index``-th row of the whole run."""
        epoch, place = divmod(index, len(self.packed))
        ids = tuple(self.packed[self._epoch_order(epoch)[place]])
        row: dict[str, np.ndarray] = {
            "tokens": np.full(self.length, self.pad_token, np.int64),
            "document": np.full(self.length, -1, np.int32),
            "position": np.zeros(self.length, np.int64),
            "supervised": np.zeros(self.length, bool),
            "anchors": np.full(self.anchors, self.length - 1, np.int64),
            "anchor_valid": np.zeros(self.anchors, bool),
        }
        if self.relabelled:
            row["labels"] = row["tokens"].copy()
        starts, end = [], 0
        for document, sample_id in enumerate(ids):
            sample = self.samples[sample_id]
            size = min(len(sample.tokens), self.length)
            span = slice(end, end + size)
            row["tokens"][span] = sample.tokens[:size]
            row["document"][span] = document
            if self.relabelled:
                first = int(self.samples.offsets[sample_id])
                row["labels"][span] = self.samples.labels[first : first + size]
            row["position"][span] = np.arange(size)
            row["supervised"][span] = sample.supervised[:size]
            starts.append(end)
            end += size
        row["position"][end:] = np.arange(self.length - end)
        anchors = self._anchors(row["supervised"], [*starts, end], ids, epoch)
        row["anchors"][: len(anchors)] = anchors
        row["anchor_valid"][: len(anchors)] = True
        return row, ids

    def _anchors(
        self, supervised: np.ndarray, bounds: list[int], ids: tuple[int, ...], epoch: int
    ) -> np.ndarray:
        """Positions in the row, sorted, each document with its share."""
        spans = list(itertools.pairwise(bounds))
        candidates = [anchor_candidates(supervised[a:b]).size for a, b in spans]
        shares = share_anchors(candidates, self.anchors)
        parts = [
            a + sample_anchors(supervised[a:b], n, seed=self.seed, epoch=epoch, sample_id=sample)
            for (a, b), n, sample in zip(spans, shares, ids, strict=True)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        known, order = self._order
        if known != epoch:
            generator = np.random.Generator(np.random.Philox(key=(self.seed, (2 << 40) + epoch)))
            order = generator.permutation(len(self.packed))
            # One assignment of a pair: threads that race here compute the same value.
            self._order = (epoch, order)
        return order
