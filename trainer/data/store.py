"""Tokenized samples on disk: flat arrays, written one sample at a time and mapped to be read, so
that size does not matter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.features import NONE
from trainer.data.template import Encoded
from trainer.errors import DataError

DTYPES = {
    "tokens": np.int32,
    "supervised": np.bool_,
    "offsets": np.int64,
    "features": np.int64,
    "labels": np.int32,
}
MAPPED = ("tokens", "supervised", "labels")
MADE_AGAIN = "delete report.json of the data's folder: samples are made again of what else is there"
SPAN = 1 << 22
"""Values looked at together by what goes through all of them."""


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
    def load(cls, folder: Path) -> Samples:
        try:
            arrays = [
                np.load(folder / f"{name}.npy", mmap_mode="r" if name in MAPPED else None)
                for name in DTYPES
            ]
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"the prepared data in {folder} cannot be read: {error}", next_step=MADE_AGAIN
            ) from None
        for (name, dtype), array in zip(DTYPES.items(), arrays, strict=True):
            if getattr(array, "ndim", None) != 1 or array.dtype != dtype:
                raise DataError(
                    f"the prepared data in {folder} cannot be read: {name}.npy is no flat array of"
                    f" {np.dtype(dtype)}",
                    next_step=MADE_AGAIN,
                )
        samples = cls(*arrays)
        if not samples.is_whole():
            raise DataError(f"the prepared data in {folder} is cut short", next_step=MADE_AGAIN)
        return samples

    def is_whole(self) -> bool:
        """Whether the arrays are as long as each other says."""
        total, offsets = len(self.tokens), self.offsets
        return (
            len(offsets) == len(self.features) + 1
            and (int(offsets[0]), int(offsets[-1])) == (0, total)
            and bool((np.diff(offsets) >= 0).all())
            and total == len(self.supervised) == len(self.labels)
        )

    def answers(self) -> np.ndarray:
        """The distinct tokens that the loss may ask for, rising."""
        found = np.zeros(0, np.int32)
        for span in spans(len(self.labels)):
            found = np.union1d(found, self.labels[span][self.supervised[span]])
        return found

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data: count, tokens, a histogram of lengths, a hash of all."""
        hashed = hashlib.sha256()
        for array in (self.tokens, self.supervised, self.offsets, self.labels):
            for span in spans(len(array)):
                hashed.update(np.ascontiguousarray(array[span]).data)
        described = describe(self.lengths, int(self.supervised.sum()))
        return described | {"sha256": hashed.hexdigest()[:16]}


def spans(total: int) -> Iterator[slice]:
    return (slice(start, start + SPAN) for start in range(0, total, SPAN))


def describe(lengths: Sequence[int] | np.ndarray, supervised: int) -> dict[str, Any]:
    """Of samples of these lengths: how many, how long, how much of them is learned from."""
    lengths = np.asarray(lengths, np.int64)
    # Powers of two: "≤ 64", "≤ 128", …
    bins = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    histogram = {f"<= {2**b}": int((bins == b).sum()) for b in sorted(set(bins.tolist()))}
    return {
        "samples": len(lengths),
        "tokens": int(lengths.sum()),
        "supervised": supervised,
        "longest": int(lengths.max(initial=0)),
        "lengths": histogram,
    }


class SampleWriter:
    """Writes a folder that ``Samples.load`` reads. Each sample's labels are its own tokens, until
    others are written over them (``open_labels``)."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._arrays = {
            name: GrowingArray(folder / f"{name}.npy", dtype) for name, dtype in DTYPES.items()
        }
        self._end = 0
        self._arrays["offsets"].append([0])
        self.samples = 0

    def add(self, sample: Encoded, features: int = NONE) -> None:
        self._end += len(sample.tokens)
        self.samples += 1
        for name, values in (
            ("tokens", sample.tokens),
            ("supervised", sample.supervised),
            ("offsets", [self._end]),
            ("features", [features]),
            ("labels", sample.tokens),
        ):
            self._arrays[name].append(values)

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for array in self._arrays.values():
            array.close()


class GrowingArray:
    """A flat ``.npy`` file whose length is known when it is closed: a header is as long for one
    value as for 10^20 of them."""

    def __init__(self, path: Path, dtype: type) -> None:
        self._stream = path.open("wb")
        self._dtype = np.dtype(dtype)
        self._length = 0
        self._write_header()

    def append(self, values: Sequence[int] | np.ndarray) -> None:
        self._stream.write(np.ascontiguousarray(values, self._dtype).data)
        self._length += len(values)

    def close(self) -> None:
        with self._stream:
            self._stream.seek(0)
            self._write_header()

    def _write_header(self) -> None:
        described = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._length,),
        }
        np.lib.format.write_array_header_1_0(self._stream, described)


def open_labels(folder: Path) -> np.ndarray:
    """The labels of a written folder, to be written over in place."""
    labels: np.ndarray = np.load(folder / "labels.npy", mmap_mode="r+")
    return labels
