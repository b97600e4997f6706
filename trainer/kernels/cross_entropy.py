# mypy: disable-error-code="no-untyped-def"
# (Triton traces the text of a kernel; its arguments are pointers and scalars of its own types.)
"""Softmax, loss, argmax and the logits' gradient in one visit of each row, in place.

A row of 151,936 bf16 logits is 304 KB: too much for one SM's shared memory, but the 132 rows in
flight are 40 MB and stay in the 60 MB of L2, so the second read of a row costs no device memory.
Hence one program of many warps per SM, rather than several small ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 8
"""bf16 values a thread loads at once: 16 bytes."""


@triton.jit
def _finish(raw, scale, cap, HAS_CAP: tl.constexpr):
    """Logits from the head's raw products, in fp32."""
    z = raw.to(tl.float32) * scale
    if HAS_CAP:
        # tanh by exp: both ends saturate rightly, since exp overflows to inf.
        z = cap * (1.0 - 2.0 / (tl.exp(2.0 * z / cap) + 1.0))
    return z


@triton.jit
def _rows_kernel(
    logits,
    labels,
    logp,
    best,
    stride,
    scale,
    cap,
    VOCABULARY: tl.constexpr,
    HAS_CAP: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    label = tl.load(labels + row)
    wanted = _finish(tl.load(base + label), scale, cap, HAS_CAP)
    # Two axes, so that the maximum and the sum of LANES values stay inside one thread and the
    # rescaling costs one exp for LANES values.
    place = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    top = tl.full([GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    for start in range(0, VOCABULARY, GROUPS * LANES):
        inside = start + place < VOCABULARY
        raw = tl.load(base + start + place, mask=inside, other=0.0, eviction_policy="evict_last")
        z = tl.where(inside, _finish(raw, scale, cap, HAS_CAP), float("-inf"))
        higher = tl.maximum(top, tl.max(z, axis=1))
        # A group may hold no value at all yet: exp(-inf - -inf) is NaN.
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - anchor) + tl.sum(tl.exp(z - anchor[:, None]), axis=1)
        top = higher
    highest = tl.max(top, axis=0)
    normalizer = highest + tl.log(tl.sum(total * tl.exp(top - highest), axis=0))
    first = tl.full([GROUPS], 2147483647, tl.int32)
    for start in range(0, VOCABULARY, GROUPS * LANES):
        inside = start + place < VOCABULARY
        raw = tl.load(base + start + place, mask=inside, other=0.0, eviction_policy="evict_first")
        z = _finish(raw, scale, cap, HAS_CAP)
        first = tl.minimum(
            first, tl.min(tl.where(inside & (z == highest), start + place, 2147483647), axis=1)
        )
        slope = tl.exp(z - normalizer) - tl.where(start + place == label, 1.0, 0.0)
        slope = slope * scale
        if HAS_CAP:
            slope = slope * (1.0 - (z / cap) * (z / cap))
        tl.store(base + start + place, slope.to(logits.dtype.element_ty), mask=inside)
    tl.store(logp + row, wanted - normalizer)
    tl.store(best + row, tl.min(first, axis=0).to(tl.int64))


def softmax_gradient_(
    logits: Tensor,
    labels: Tensor,
    logits_scale: tuple[float, float | None] = (1.0, None),
    *,
    warps: int = 32,
) -> tuple[Tensor, Tensor]:
    """Replace raw ``logits`` [R, V] by the gradient of -log q(label) with respect to them.

    Returns log q of the labels (f32 [R]) and the argmax (i64 [R], the first of equals).
    ``labels`` i64 [R]; rows must be contiguous. Equals ``head_loss.torch_softmax_gradient_``.
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    scale, cap = logits_scale
    logp = torch.empty(rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _rows_kernel[(rows,)](
        logits,
        labels,
        logp,
        best,
        logits.stride(0),
        scale,
        1.0 if cap is None else cap,
        VOCABULARY=vocabulary,
        HAS_CAP=cap is not None,
        GROUPS=32 * warps,
        LANES=LANES,
        num_warps=warps,
    )
    return logp, best
