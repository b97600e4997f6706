"""Tokenized samples, written and mapped as ``prepare`` does it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from trainer.data.store import Samples, SampleWriter
from trainer.data.template import Encoded


def samples_of(encoded: Iterable[Encoded]) -> Samples:
    """Mapped files outlive their folder."""
    with tempfile.TemporaryDirectory() as folder:
        return write_samples(Path(folder), encoded)


def write_samples(folder: Path, encoded: Iterable[Encoded]) -> Samples:
    with SampleWriter(folder) as writer:
        for sample in encoded:
            writer.add(sample)
    return Samples.load(folder)
