"""Cross-entropy through the frozen output head, with the gradient made in the forward pass.

The logits of a step are the largest tensor of all (16,384 × 151,936). Because the head is frozen,
the only gradient that leaves it is the hidden states' own, so each chunk of rows is finished at
once: logits, softmax, loss, and ``(softmax - onehot)·w @ head``. Nothing is kept and nothing is
made twice; backward multiplies the saved gradient by the incoming scalar.

Rows whose weight is zero contribute nothing, so they need not be multiplied at all.

R = rows, V = vocabulary, H = width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

WeightOf = Callable[[Tensor | None], Tensor]
"""From the labels' log-probabilities [R] (null where nobody needs them) to weights f32 [R]."""


class HeadResult(NamedTuple):
    loss: Tensor
    """0-d with gradient to the hidden states: Σ w · (-log q)."""
    weight: Tensor
    """f32 [R]"""
    best: Tensor
    """i64 [R]: the argmax of the logits; of rows without weight it may be -1."""


class HeadLoss(Protocol):
    def __call__(
        self,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weight_of: WeightOf,
        *,
        needs_logp: bool,
        logits_scale: tuple[float, float | None],
    ) -> HeadResult:
        """``hidden`` [R, H], ``head`` [V, H], ``labels`` i64 [R]. ``needs_logp``: the weights
        depend on the log-probabilities (D-PACE)."""


def reference_head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weight_of: WeightOf,
    *,
    needs_logp: bool,
    logits_scale: tuple[float, float | None],
) -> HeadResult:
    """All logits at once, in fp32, through autograd: what the fast one is compared with."""
    scale, cap = logits_scale
    logits = F.linear(hidden.float(), head.float()) * scale
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    logp = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    weight = weight_of(logp.detach())
    return HeadResult(-(logp * weight).sum(), weight, logits.detach().argmax(-1))
