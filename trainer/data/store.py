"""Tokenized samples on disk: flat arrays, mapped, so that size does not matter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.features import NONE
from trainer.data.template import Encoded
from trainer.errors import DataError

NAMES = ("tokens", "supervised", "offsets", "features", "labels")
MAPPED = ("tokens", "supervised", "labels")


@dataclass(frozen=True)
class Samples:
    tokens: np.ndarray
    """i32 [total]"""
    supervised: np.ndarray
    """bool [total]"""
    offsets: np.ndarray
    """i64 [count + 1]: sample i is ``[offsets[i], offsets[i + 1])``."""
    features: np.ndarray
    """i64 [count]: first row of its features in ``features.bin``, or -1."""
    labels: np.ndarray
    """i32 [total]: the token wanted at each place; the tokens themselves, or the target's own."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Encoded:
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Encoded(self.tokens[span], self.supervised[span])

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @classmethod
    def of(
        cls,
        samples: Iterable[Encoded],
        features: Sequence[int] | None = None,
        labels: Sequence[np.ndarray] | None = None,
    ) -> Samples:
        listed = list(samples)
        wanted = [s.tokens for s in listed] if labels is None else labels
        lengths = [len(sample.tokens) for sample in listed]
        empty_tokens, empty_mask = np.zeros(0, np.int32), np.zeros(0, bool)
        return cls(
            np.concatenate([empty_tokens, *(s.tokens for s in listed)]).astype(np.int32),
            np.concatenate([empty_mask, *(s.supervised for s in listed)]).astype(bool),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([NONE] * len(listed) if features is None else features, np.int64),
            np.concatenate([empty_tokens, *wanted]).astype(np.int32),
        )

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> Samples:
        try:
            arrays = [
                np.load(folder / f"{name}.npy", mmap_mode="r" if name in MAPPED else None)
                for name in NAMES
            ]
        except (OSError, ValueError) as error:
            raise DataError(
                f"the prepared data in {folder} cannot be read: {error}",
                next_step="delete the folder; it is made again",
            ) from None
        samples = cls(*arrays)
        if len(samples.tokens) != len(samples.supervised) or samples.offsets[-1] != len(
            samples.tokens
        ):
            raise DataError(
                f"the prepared data in {folder} is cut short",
                next_step="delete the folder; it is made again",
            )
        return samples

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data: count, tokens, a histogram of lengths, a hash of all."""
        hashed = hashlib.sha256()
        for array in (self.tokens, self.supervised, self.offsets, self.labels):
            hashed.update(np.ascontiguousarray(array).tobytes())
        lengths = self.lengths
        # Powers of two: "≤ 64", "≤ 128", …
        bins = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
        histogram = {f"<= {2**b}": int((bins == b).sum()) for b in sorted(set(bins.tolist()))}
        return {
            "samples": len(self),
            "tokens": int(lengths.sum()),
            "supervised": int(self.supervised.sum()),
            "longest": int(lengths.max(initial=0)),
            "lengths": histogram,
            "sha256": hashed.hexdigest()[:16],
        }
