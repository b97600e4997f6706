"""Cross-entropy through the frozen output head, with the gradient made in the forward pass.

The logits of a step are the largest tensor of all (16,384 × 151,936). The head is frozen, so the
only gradient that leaves it is the hidden states' own, and each chunk of rows can be finished at
once: logits, softmax, loss, ``(softmax - onehot) @ head``. No logits are kept and none are made
twice. The weight of a row is a factor of its gradient, so weights that depend on the loss (D-PACE)
are applied afterwards and need no second pass.

Rows whose weight is zero contribute nothing and are not multiplied at all.

M = slots, R = rows that count, V = vocabulary, H = width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import ResourceError

LogitsScale = tuple[float, float | None]
"""(multiplier, soft cap) between the raw products and the logits."""

WeightOf = Callable[[Tensor], Tensor]
"""From the labels' log-probabilities, f32 [R], detached, to the rows' weights, f32 [R]."""


class HeadResult(NamedTuple):
    loss: Tensor
    """0-d with gradient to ``hidden``: Σ w · (-log q)."""
    weight: Tensor
    """f32 [R]"""
    best: Tensor
    """i64 [R]: the argmax of the logits."""


class HeadLoss(Protocol):
    def __call__(
        self,
        hidden: Tensor,
        head: Tensor,
        rows: Tensor,
        labels: Tensor,
        weight_of: WeightOf,
        logits_scale: LogitsScale,
    ) -> HeadResult:
        """``hidden`` [M, H]; ``rows`` i64 [R], distinct, the ones to reckon; ``labels`` i64 [R];
        ``head`` [V, H], without gradient."""


def reference_head_loss(
    hidden: Tensor,
    head: Tensor,
    rows: Tensor,
    labels: Tensor,
    weight_of: WeightOf,
    logits_scale: LogitsScale,
) -> HeadResult:
    """All logits at once, in fp32, through autograd: what the fast one is compared with."""
    scale, cap = logits_scale
    logits = F.linear(hidden[rows].float(), head.float()) * scale
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    logp = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    weight = weight_of(logp.detach())
    return HeadResult(-(logp * weight).sum(), weight, logits.detach().argmax(-1))


SoftmaxGradient = Callable[[Tensor, Tensor, LogitsScale], tuple[Tensor, Tensor]]


def torch_softmax_gradient_(
    logits: Tensor, labels: Tensor, logits_scale: LogitsScale
) -> tuple[Tensor, Tensor]:
    """Replace raw ``logits`` [R, V] by the gradient of -log q(label) with respect to them.

    Returns log q of the labels (f32 [R]) and the argmax (i64 [R]).
    """
    scale, cap = logits_scale
    z = logits.float() * scale
    if cap is not None:
        z = torch.tanh(z / cap) * cap
    best = z.argmax(-1)
    log_q = z.log_softmax(-1)
    place = labels[:, None]
    logp = log_q.gather(-1, place)[:, 0]
    slope = log_q.exp_().scatter_add_(-1, place, torch.full_like(place, -1, dtype=z.dtype))
    if cap is not None:
        slope *= 1 - (z / cap).square()
    logits.copy_(slope.mul_(scale))
    return logp, best


class Chunk(NamedTuple):
    """What a chunk of rows gives."""

    slope: Tensor
    """[R, H]: the gradient of -log q with respect to the hidden states."""
    logp: Tensor
    """f32 [R]"""
    best: Tensor
    """i64 [R]"""


class ChunkedHeadLoss:
    """The fast one: ``chunk`` rows at a time, in the type of ``hidden``."""

    def __init__(self, softmax_gradient: SoftmaxGradient, chunk: int) -> None:
        self.softmax_gradient = softmax_gradient
        self.chunk = chunk

    def __call__(
        self,
        hidden: Tensor,
        head: Tensor,
        rows: Tensor,
        labels: Tensor,
        weight_of: WeightOf,
        logits_scale: LogitsScale,
    ) -> HeadResult:
        parts = [
            self._finish(hidden.detach().index_select(0, some), head, wanted, logits_scale)
            for some, wanted in zip(rows.split(self.chunk), labels.split(self.chunk), strict=True)
        ]
        slope, logp, best = (torch.cat(kind) for kind in zip(*parts, strict=True))
        weight = weight_of(logp)
        loss = _Weighted.apply(hidden, slope, rows, logp, weight)
        return HeadResult(loss, weight, best)

    def _finish(
        self, hidden: Tensor, head: Tensor, labels: Tensor, logits_scale: LogitsScale
    ) -> Chunk:
        # One chunk of logits at a time: the allocator hands the same memory out again.
        logits = hidden @ head.T
        logp, best = self.softmax_gradient(logits, labels, logits_scale)
        return Chunk(logits @ head, logp, best)


class _Weighted(torch.autograd.Function):
    """Σ w · (-log q), whose gradient to ``hidden`` is already known up to the weights."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, slope: Tensor, rows: Tensor, logp: Tensor, weight: Tensor
    ) -> Tensor:
        ctx.save_for_backward(slope, rows, weight)
        ctx.slots = hidden.shape[0]
        return -(logp * weight).sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        slope, rows, weight = ctx.saved_tensors
        factor = (weight * outer[0])[:, None]
        # ``out`` keeps the product in fp32 until it is stored, without an fp32 copy of it.
        scaled = torch.mul(slope, factor, out=torch.empty_like(slope))
        gradient = slope.new_zeros(ctx.slots, slope.shape[1]).index_copy_(0, rows, scaled)
        return gradient, None, None, None, None


CHUNK_ROWS = 3072
"""24 × 16 tiles of 128 × 256 for the second product: 2.9 rounds of 132 SMs; 0.93 GB of logits at a
vocabulary of 151,936."""


Precision = Literal["bf16", "fp8"]


def fast_head_loss(
    device: torch.device, head: Tensor | None = None, precision: Precision = "bf16"
) -> HeadLoss:
    """The chunked loss with the device's best softmax.

    ``fp8`` multiplies by an fp8 copy of ``head`` (needed then) on a GPU that can; the loss moves by
    about 1e-3 of itself (``benchmarks/README.md``). A CPU stays at full precision.
    """
    if device.type != "cuda":
        return ChunkedHeadLoss(torch_softmax_gradient_, CHUNK_ROWS)
    if precision == "fp8":
        if torch.cuda.get_device_capability(device) < (8, 9):
            raise ResourceError(
                f"{torch.cuda.get_device_name(device)} cannot multiply in fp8",
                next_step="leave fp8 off, or train on Ada, Hopper or newer",
            )
        from trainer.kernels.fp8_head import Fp8HeadLoss

        assert head is not None
        return Fp8HeadLoss(head, CHUNK_ROWS)
    from trainer.kernels.cross_entropy import softmax_gradient_

    return ChunkedHeadLoss(softmax_gradient_, CHUNK_ROWS)
