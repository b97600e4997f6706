"""Parameters as views into flat buffers: one kernel, one norm, one reduction for all of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Now(NamedTuple):
    step: int
    """From 1."""
    rate: float


class FlatGroup:
    """Parameters that are updated alike, in flat buffers of equal layout."""

    kinds: tuple[str, ...] = ("master", "average", "square")
    """Of the buffers that a checkpoint holds."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], weight_decay: float, dtype: torch.dtype
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.shapes = [p.shape for _, p in named]
        self.weight_decay = weight_decay
        self.master = torch.cat([p.detach().float().flatten() for _, p in named])
        self.weight = self.master if dtype == torch.float32 else self.master.to(dtype)
        self.gradient = torch.zeros_like(self.weight)
        self.factors: Tensor | None = None
        """Of this step's update, on a GPU (``kernels/adamw.py``)."""
        self.average = torch.zeros_like(self.master)
        self.square = torch.zeros_like(self.master if "square" in self.kinds else self.master[:0])
        for (_, parameter), weight, gradient in zip(
            named, self.split(self.weight), self.split(self.gradient), strict=True
        ):
            parameter.data = weight
            parameter.grad = gradient

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of a buffer by parameter."""
        parts = flat.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def keep_factors(self, fresh: Tensor) -> None:
        """Numbers of the host for the step that follows, in a tensor that stays where it is."""
        if self.factors is None:
            self.factors = torch.empty(fresh.shape, device=self.master.device)
        if self.factors.device.type == "cuda":
            # A new pinned tensor each time: the device may still have to read the last one.
            fresh = fresh.pin_memory()
        self.factors.copy_(fresh, non_blocking=True)
