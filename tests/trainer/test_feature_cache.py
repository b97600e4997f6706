"""Kept features are the target's, whatever row a sample comes back in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_samples import samples_of
from tiny_target import make_model, run_config
from torch import Tensor

from trainer.config import parse_config
from trainer.data.batch import Batch
from trainer.data.pack import PackedBatches
from trainer.data.template import Encoded
from trainer.feature_cache import CachedTarget
from trainer.taps import TappedTarget

pytestmark = pytest.mark.torch


class Counting(TappedTarget):
    asked = 0

    def features(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        self.asked += batch.rows
        return super().features(batch, out)


def make_batches() -> PackedBatches:
    generator = np.random.default_rng(0)
    lengths = generator.integers(6, 40, 17).tolist()
    samples = [
        Encoded(generator.integers(4, 200, n).astype(np.int32), np.arange(n) >= 3) for n in lengths
    ]
    config = parse_config(run_config(Path("/x")), source="t", base=Path("/"))
    return PackedBatches(samples_of(samples), config, 0)


def test_each_row_is_asked_for_once_and_comes_back_the_same() -> None:
    inner = Counting(make_model("llama"), [1, 3], torch.device("cpu"))
    batches = make_batches()
    cached = CachedTarget(inner, batches.samples.lengths)
    epoch = -(-len(batches.packed) // batches.rows)
    for step in range(3 * epoch):
        batch = batches(step, 0)
        real = batch.document >= 0
        found = cached.features(batch)
        torch.testing.assert_close(found[real], inner.features(batch)[real], rtol=1e-4, atol=1e-5)
        inner.asked -= batch.rows
    assert inner.asked == len(batches.packed)


def test_what_somebody_kept_is_not_asked_for() -> None:
    inner = Counting(make_model("llama"), [1, 3], torch.device("cpu"))
    batches = make_batches()
    kept = torch.ones(64, inner.feature_width)
    lengths = batches.samples.lengths
    cached = CachedTarget(inner, lengths, lambda sample: kept if sample != 4 else None)
    for step in range(len(batches.packed)):
        batch = batches(step, 0)
        found = cached.features(batch)
        for row, ids in enumerate(batch.sample_ids):
            if 4 not in ids:
                real = batch.document[row] >= 0
                assert (found[row][real] == 1).all()
                assert (found[row][~real] == 0).all()
    assert inner.asked == 1
