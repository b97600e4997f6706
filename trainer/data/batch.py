"""One microbatch: the unit that a target stage reads and a drafter stage learns from.

Shapes never change within a run (b rows of S tokens, N anchors a row), so that nothing compiled is
compiled again. b = rows, S = sequence length, N = anchors per row.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    """i64 [b, S]; padding holds a valid token id, its document is -1."""
    document: Tensor
    """i32 [b, S]: 0, 1, … by row from the left, -1 for padding."""
    position: Tensor
    """i64 [b, S]: restarts at 0 in each document; 0.. in the padding too."""
    supervised: Tensor
    """bool [b, S]: tokens that the loss may ask for."""
    anchors: Tensor
    """i64 [b, N]: positions in the row, sorted; the unused last ones hold S - 1."""
    anchor_valid: Tensor
    """bool [b, N]"""
    sample_ids: tuple[tuple[int, ...], ...]
    """Of each row's documents, from the left: index of the sample in its data set."""
    labels: Tensor | None = None
    """i64 [b, S]: the token wanted *at* each position where that is not ``tokens``: the target's
    first choice, under ``objective.labels: target``."""

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def context_tokens(self) -> int:
        """Tokens that are no padding (reads the tensor: free on a CPU, a wait on a GPU)."""
        return int((self.document >= 0).sum())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        moved = {k: v.to(device, non_blocking=non_blocking) for k, v in self.tensors().items()}
        return Batch(**moved, sample_ids=self.sample_ids)

    def pin_memory(self) -> Batch:
        pinned = {name: value.pin_memory() for name, value in self.tensors().items()}
        return Batch(**pinned, sample_ids=self.sample_ids)

    def tensors(self) -> dict[str, Tensor]:
        """By field name; the shapes are the same for every batch of a run."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "sample_ids" and getattr(self, field.name) is not None
        }
