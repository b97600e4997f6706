"""Muon for the drafter's matrices: torch's own, on flat fp32 masters, never waiting for the device.

torch's step takes the learning rate from the host and moves the weights at once. Here it moves a
scratch copy that starts at zero, with a rate of 1, and what it moved by is applied at the step's
own rate: so a step that is not finite changes nothing, and a CUDA graph may hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.flat_group import FlatGroup, Now


class MuonGroup(FlatGroup):
    """The momentum is ``average``. Learning rates mean what they mean to AdamW: updates are scaled
    to the same root mean square."""

    kinds = ("master", "average")

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        weight_decay: float,
        dtype: torch.dtype,
        momentum: float,
    ) -> None:
        super().__init__(named, weight_decay, dtype)
        self._moved = torch.zeros_like(self.master)
        self._parts = [nn.Parameter(part) for part in self.split(self._moved)]
        self._optimizer = torch.optim.Muon(
            self._parts,
            lr=1.0,
            weight_decay=0.0,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        for part, average in zip(self._parts, self.split(self.average), strict=True):
            self._optimizer.state[part]["momentum_buffer"] = average

    def prepare(self, now: Now) -> None:
        self.keep_factors(torch.tensor([now.rate, 1 - now.rate * self.weight_decay]))

    @torch.no_grad()
    def apply(self, coefficient: Tensor) -> None:
        """One step. ``coefficient`` scales the gradient; not finite: nothing may change."""
        assert self.factors is not None, "prepare first"
        fine = coefficient.isfinite()
        before = self.average.clone()
        gradient = torch.where(fine, self.gradient.float() * coefficient, 0.0)
        self._moved.zero_()
        for part, share in zip(self._parts, self.split(gradient), strict=True):
            part.grad = share
        self._optimizer.step()
        self.average.copy_(torch.where(fine, self.average, before))
        self.master.mul_(torch.where(fine, self.factors[1], 1.0))
        self.master.add_(self._moved * torch.where(fine, self.factors[0], 0.0))
        if self.weight is not self.master:
            self.weight.copy_(self.master)


def hidden_matrices(module: nn.Module) -> set[str]:
    """Names of what Muon is for; codebooks are embeddings, which it is not for."""
    codebooks = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    return {n for n, p in module.named_parameters() if p.ndim == 2 and id(p) not in codebooks}
