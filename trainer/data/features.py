"""Features that the target left behind while it wrote: no second forward pass over its own text.

    folder/features.bin     rows of K·H values in the target's type, appended
    folder/features.json    which layers, width and type

A sample of n tokens has n rows from its offset on; the last token's row is zero, because the
target never read it and no block may look at it (an anchor's own feature is invisible).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.errors import DataError

DATA = "features.bin"
DESCRIPTION = "features.json"
NONE = -1


@dataclass(frozen=True)
class FeatureFile:
    """Opened for one set of taps."""

    folder: Path
    layer_ids: tuple[int, ...]
    width: int
    dtype: torch.dtype

    @property
    def _row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def describe(self) -> dict[str, object]:
        return {
            "layer_ids": list(self.layer_ids),
            "width": self.width,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def fits(self) -> bool:
        """Whether the folder holds features of these taps in this type."""
        try:
            found = json.loads((self.folder / DESCRIPTION).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return bool(found == self.describe())

    def begin(self) -> bool:
        """Whether features can be added: none are there yet, or those that are fit. Others stay:
        the journal knows their places, and a run with these taps reads none of them."""
        if not (self.folder / DATA).exists():
            (self.folder / DESCRIPTION).write_text(json.dumps(self.describe()), encoding="utf-8")
        return self.fits()

    def append(self, rows: Tensor) -> int:
        """[n, K·H] and a row of zeros for the last token; returns the first row's offset."""
        padded = torch.cat((rows, rows.new_zeros(1, self.width))).to("cpu", self.dtype)
        raw = padded.contiguous().view(torch.uint8).numpy()
        with (self.folder / DATA).open("ab") as stream:
            # What a kill left of a row is cut off: offsets count whole rows.
            start = stream.tell() // self._row_bytes
            stream.truncate(start * self._row_bytes)
            stream.write(raw.tobytes())
        return start

    def read(self, offset: int, count: int) -> Tensor:
        """[count, K·H]. Raises ``DataError`` for a file that is shorter than what it was."""
        path, end = self.folder / DATA, (offset + count) * self.width
        size = path.stat().st_size // self.dtype.itemsize if path.is_file() else 0
        if size < end:
            raise DataError(
                f"{path} is absent or cut short",
                next_step=f"delete {self.folder / DESCRIPTION}: the target then reads the data in"
                " the first epoch",
            )
        values = torch.from_file(str(path), size=size, dtype=self.dtype)
        return values[offset * self.width : end].view(count, self.width)
