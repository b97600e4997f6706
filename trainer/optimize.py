"""AdamW on fp32 masters, over flat buffers, without waiting for the device.

All parameters of a drafter are views into one buffer of the computation's type, their gradients
into another, so that clipping is one norm, reducing across drafters is one tensor, and a step is
one kernel a group. In fp32 computation the weights are the masters; otherwise masters are apart
(norm weights kept in bfloat16 never move: their updates are smaller than its spacing at 1.0).

A step whose gradient or loss is not finite changes nothing, by arithmetic on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import OptimizationConfig
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


class FlatGroup:
    """Parameters that are updated alike, in flat buffers of equal layout."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], weight_decay: float, dtype: torch.dtype
    ) -> None:
        self.names = [name for name, _ in named]
        self.shapes = [p.shape for _, p in named]
        self.weight_decay = weight_decay
        self.master = torch.cat([p.detach().float().flatten() for _, p in named])
        self.weight = self.master if dtype == torch.float32 else self.master.to(dtype)
        self.gradient = torch.zeros_like(self.weight)
        self.average = torch.zeros_like(self.master)
        self.square = torch.zeros_like(self.master)
        for (_, parameter), weight, gradient in zip(
            named, self.split(self.weight), self.split(self.gradient), strict=True
        ):
            parameter.data = weight
            parameter.grad = gradient

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of a buffer by parameter."""
        parts = flat.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class MasterAdamW:
    """The optimizer of one replica. ``module`` is on its device already."""

    def __init__(
        self, module: nn.Module, config: OptimizationConfig, steps: int, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.steps = steps
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        matrices = [(n, p) for n, p in named if p.ndim >= 2]
        others = [(n, p) for n, p in named if p.ndim < 2]
        self.groups = [
            FlatGroup(part, decay, dtype)
            for part, decay in ((matrices, config.weight_decay), (others, 0.0))
            if part
        ]
        self.device = self.groups[0].weight.device
        self._apply = _fused_kernel() if self.device.type == "cuda" else _plain
        self.skipped = torch.zeros((), device=self.device)

    def gradients(self) -> list[Tensor]:
        return [group.gradient for group in self.groups]

    def weights(self) -> list[Tensor]:
        """The masters: equal masters give equal weights."""
        return [group.master for group in self.groups]

    @torch.no_grad()
    def step(self, step: int, sums: Tensor) -> Tensor:
        """Divide the gradients by the weight sum, clip, update, zero; the norm before clipping.

        Everything stays on the device. ``sums`` is the vector of ``Sums`` over all replicas.
        """
        weight = sums[WEIGHT_SUM].clamp(min=torch.finfo(torch.float32).tiny)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in self.gradients()]
        norm = torch.linalg.vector_norm(torch.stack(norms)) / weight
        # sums[0], the loss, joins so that a NaN in it alone stops the step too.
        coefficient = (self.config.clip / (norm + 1e-6)).clamp(max=1.0) / weight + 0 * sums[0]
        # An infinite norm gives a factor of zero, which is finite; it must stop the step as well.
        coefficient = torch.where(norm.isfinite(), coefficient, torch.nan)
        self.skipped += (~coefficient.isfinite()).float()
        rate = learning_rate(self.config, step, self.steps)
        for group in self.groups:
            self._apply(group, coefficient, step + 1, rate, self.config)
        self.zero()
        return norm

    @torch.no_grad()
    def zero(self) -> None:
        for gradient in self.gradients():
            gradient.zero_()

    def state(self) -> dict[str, Any]:
        """``{"master": {name: f32}, "average": …, "square": …, "skipped": n}`` on the CPU."""
        state: dict[str, Any] = {"skipped": int(self.skipped)}
        for kind in ("master", "average", "square"):
            state[kind] = {
                name: part.detach().cpu().clone()
                for group in self.groups
                for name, part in zip(group.names, group.split(getattr(group, kind)), strict=True)
            }
        return state

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        for kind in ("master", "average", "square"):
            for group in self.groups:
                parts = group.split(getattr(group, kind))
                for name, part in zip(group.names, parts, strict=True):
                    part.copy_(state[kind][name])
        for group in self.groups:
            if group.weight is not group.master:
                group.weight.copy_(group.master)
        self.skipped.fill_(state["skipped"])
        self.zero()


Apply = Callable[[FlatGroup, Tensor, int, float, OptimizationConfig], None]
"""(group, coefficient on the gradient, step from 1, learning rate, config): one AdamW step."""


def _plain(
    group: FlatGroup, coefficient: Tensor, step: int, rate: float, config: OptimizationConfig
) -> None:
    """The formula of ``torch.optim.AdamW``, in place, for fp32 on a CPU (where waiting is free)."""
    if not coefficient.isfinite():
        return
    gradient = group.gradient.float() * coefficient
    group.average.lerp_(gradient, 1 - config.beta1)
    group.square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    root = group.square.sqrt().div_((1 - config.beta2**step) ** 0.5).add_(config.epsilon)
    group.master.mul_(1 - rate * group.weight_decay)
    group.master.addcdiv_(group.average, root, value=-rate / (1 - config.beta1**step))
    if group.weight is not group.master:
        group.weight.copy_(group.master)


def _fused_kernel() -> Apply:
    from trainer.kernels.adamw import adamw_, adamw_factors

    def apply(
        group: FlatGroup, coefficient: Tensor, step: int, rate: float, config: OptimizationConfig
    ) -> None:
        factors = adamw_factors(
            coefficient,
            step=step,
            learning_rate=rate,
            weight_decay=group.weight_decay,
            beta1=config.beta1,
            beta2=config.beta2,
        )
        adamw_(
            group.weight,
            group.gradient,
            group.master,
            group.average,
            group.square,
            factors,
            beta1=config.beta1,
            beta2=config.beta2,
            epsilon=config.epsilon,
        )

    return apply
