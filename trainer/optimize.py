"""AdamW on fp32 masters, over flat buffers, without waiting for the device.

All parameters of a drafter are views into one buffer of the computation's type, their gradients
into another, so that clipping is one norm, reducing across drafters is one tensor, and a step is
one kernel a group. In fp32 computation the weights are the masters; otherwise masters are apart
(norm weights kept in bfloat16 never move: their updates are smaller than its spacing at 1.0).

A step whose gradient or loss is not finite changes nothing, by arithmetic on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint import KINDS, fitting
from trainer.config import OptimizationConfig
from trainer.flat_group import FlatGroup, Now
from trainer.muon import MuonGroup, hidden_matrices
from trainer.pipeline.stages import WEIGHT_SUM


def learning_rate(config: OptimizationConfig, step: int, steps: int) -> float:
    """Of the 0-based ``step``: linear warm-up, then a cosine to ``final``, or flat and then linear
    to zero over the last ``decay`` of the steps (wsd)."""
    warm = max(1, round(config.warmup * steps)) if config.warmup else 0
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    if config.schedule == "wsd":
        start = steps - max(1, round(config.decay * steps))
        left = 1.0 if step < start else (steps - step) / (steps - start)
        return config.learning_rate * left
    share = (step - warm) / max(1, steps - warm)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return config.learning_rate * (config.final + (1 - config.final) * cosine)


def clipped(norm: Tensor, sums: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(norm, factor) of a step's gradient: ``norm`` of the gradient of the summed loss, divided by
    the weight sum in ``sums``; what the gradient is multiplied by, not finite where the step must
    change nothing. All on the device."""
    weight = sums[WEIGHT_SUM].clamp(min=torch.finfo(torch.float32).tiny)
    norm = norm / weight
    # sums[0], the loss, joins so that a NaN in it alone stops the step too.
    factor = (clip / (norm + 1e-6)).clamp(max=1.0) / weight + 0 * sums[0]
    # An infinite norm gives a factor of zero, which is finite; it must stop the step as well.
    return norm, torch.where(norm.isfinite(), factor, torch.nan)


def decays(parameter: Tensor) -> bool:
    """Whether weight decay is for it: for matrices. Norm weights and DFlash2's base kernels are
    gains, the latter of three axes, and would be drawn from 1 towards silence."""
    return parameter.ndim == 2


class MasterAdamW:
    """The optimizer of one replica; AdamW, and Muon for hidden matrices if the config says so.
    ``module`` is on its device already."""

    def __init__(
        self,
        module: nn.Module,
        config: OptimizationConfig,
        steps: int,
        dtype: torch.dtype,
        order: Sequence[str] | None = None,
    ) -> None:
        """``order``: names in the order in which they lie in the buffers (default: the module's).
        Where that is the backward pass's, the buffers fill from the front (``buckets.py``)."""
        self.config = config
        self.steps = steps
        found = {n: p for n, p in module.named_parameters() if p.requires_grad}
        named = [(n, found[n]) for n in (order or found)]
        muon = hidden_matrices(module) if config.optimizer == "muon" else set()
        matrices = [(n, p) for n, p in named if decays(p) and n not in muon]
        others = [(n, p) for n, p in named if not decays(p)]
        self.groups = [
            FlatGroup(part, decay, dtype)
            for part, decay in ((matrices, config.weight_decay), (others, 0.0))
            if part
        ]
        if muon:
            hidden = [(n, p) for n, p in named if n in muon]
            self.groups.append(MuonGroup(hidden, config.weight_decay, dtype, config.momentum))
        self.device = self.groups[0].weight.device
        self._apply = _fused_kernel() if self.device.type == "cuda" else _plain
        self.skipped = torch.zeros((), device=self.device)
        self._now = Now(1, 0.0)

    def gradients(self) -> list[Tensor]:
        return [group.gradient for group in self.groups]

    def weights(self) -> list[Tensor]:
        """The masters: equal masters give equal weights."""
        return [group.master for group in self.groups]

    def step(self, step: int, sums: Tensor) -> Tensor:
        """Divide the gradients by the weight sum, clip, update, zero; the norm before clipping.

        Everything stays on the device. ``sums`` is the vector of ``Sums`` over all replicas.
        """
        self.prepare(step)
        return self.apply(sums)

    def prepare(self, step: int) -> None:
        """The numbers that the host alone knows, where ``apply`` finds them."""
        self._now = Now(step + 1, learning_rate(self.config, step, self.steps))
        for group in self.groups:
            if isinstance(group, MuonGroup):
                group.prepare(self._now)
            elif self.device.type == "cuda":
                _send_factors(group, self._now, self.config)

    def rehearse(self) -> None:
        """An update that changes nothing but the gradients, which it zeroes: what it needs is
        compiled afterwards."""
        kept = self.skipped.clone()
        self.prepare(0)
        self.apply(torch.full((WEIGHT_SUM + 1,), math.nan, device=self.device))
        self.skipped.copy_(kept)

    @torch.no_grad()
    def apply(self, sums: Tensor) -> Tensor:
        """The device's part of a step: always the same launches."""
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in self.gradients()]
        whole = torch.linalg.vector_norm(torch.stack(norms))
        norm, coefficient = clipped(whole, sums, self.config.clip)
        self.skipped += (~coefficient.isfinite()).float()
        for group in self.groups:
            if isinstance(group, MuonGroup):
                group.apply(coefficient)
            else:
                self._apply(group, coefficient, self._now, self.config)
        self.zero()
        return norm

    @torch.no_grad()
    def zero(self) -> None:
        for gradient in self.gradients():
            gradient.zero_()

    def state(self) -> dict[str, Any]:
        """``{"master": {name: f32}, "average": …, "square": …, "skipped": n}`` on the CPU."""
        state: dict[str, Any] = {"skipped": int(self.skipped)}
        for kind in KINDS:
            state[kind] = {
                name: part.detach().cpu().clone()
                for group in self.groups
                if kind in group.kinds
                for name, part in zip(group.names, group.split(getattr(group, kind)), strict=True)
            }
        return state

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        for kind in KINDS:
            for group in self.groups:
                if kind not in group.kinds:
                    continue
                parts = group.split(getattr(group, kind))
                for name, part in zip(group.names, parts, strict=True):
                    part.copy_(fitting(state, kind, name, part.shape))
        for group in self.groups:
            if group.weight is not group.master:
                group.weight.copy_(group.master)
        self.skipped.fill_(state["skipped"])
        self.zero()

    @torch.no_grad()
    def share(self, broadcast: Callable[[Tensor], None]) -> None:
        """See ``DrafterStage.share``."""
        for group in self.groups:
            for kind in group.kinds:
                broadcast(getattr(group, kind))
            if group.weight is not group.master:
                group.weight.copy_(group.master)
        broadcast(self.skipped)


Apply = Callable[[FlatGroup, Tensor, Now, OptimizationConfig], None]
"""(group, coefficient on the gradient, now, config): one AdamW step."""


def _plain(group: FlatGroup, coefficient: Tensor, now: Now, config: OptimizationConfig) -> None:
    """The formula of ``torch.optim.AdamW``, in place, for fp32 on a CPU (where waiting is free)."""
    if not coefficient.isfinite():
        return
    step, rate = now
    gradient = group.gradient.float() * coefficient
    group.average.lerp_(gradient, 1 - config.beta1)
    group.square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    root = group.square.sqrt().div_((1 - config.beta2**step) ** 0.5).add_(config.epsilon)
    group.master.mul_(1 - rate * group.weight_decay)
    group.master.addcdiv_(group.average, root, value=-rate / (1 - config.beta1**step))
    if group.weight is not group.master:
        group.weight.copy_(group.master)


def _send_factors(group: FlatGroup, now: Now, config: OptimizationConfig) -> None:
    """The learning rate and the like, into a tensor that stays where it is."""
    from trainer.kernels.adamw import schedule_factors

    fresh = schedule_factors(
        step=now.step,
        learning_rate=now.rate,
        weight_decay=group.weight_decay,
        beta1=config.beta1,
        beta2=config.beta2,
    )
    group.keep_factors(fresh)


def _fused_kernel() -> Apply:
    from trainer.kernels.adamw import adamw_

    def apply(group: FlatGroup, coefficient: Tensor, now: Now, config: OptimizationConfig) -> None:
        assert group.factors is not None, "prepare first"
        adamw_(
            group.weight,
            group.gradient,
            group.master,
            group.average,
            group.square,
            torch.cat((coefficient.float().reshape(1), group.factors)),
            beta1=config.beta1,
            beta2=config.beta2,
            epsilon=config.epsilon,
        )

    return apply
