# mypy: disable-error-code="no-untyped-def"
# (Triton traces the text of a kernel; its arguments are pointers and scalars of its own types.)
"""Softmax, loss, argmax and the logits' gradient in one visit of each row, in place.

A row of 151,936 bf16 logits is 304 KB: too much for one SM's shared memory, but the 132 rows in
flight are 40 MB and stay in the 60 MB of L2, so the second read of a row costs no device memory.
Hence one program of many warps per SM, rather than several small ones.

For an fp8 head the gradient is written as e5m2 instead, without the label's own entry: that one is
near -1 where all others are near 0, and is returned in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8_SCALE = tl.constexpr(32768.0)
"""Of the probabilities in e5m2, whose largest value is 57,344 and smallest 2^-16: the uniform start
of 1/151,936 and what is 4,000 times less likely keep their two bits of mantissa."""

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
    slopes,
    logp,
    best,
    own,
    stride,
    scale,
    cap,
    VOCABULARY: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FP8: tl.constexpr,
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
    wanted_slope = (tl.exp(wanted - normalizer) - 1.0) * scale
    if HAS_CAP:
        wanted_slope = wanted_slope * (1.0 - (wanted / cap) * (wanted / cap))
    to = slopes + row * VOCABULARY
    first = tl.full([GROUPS], 2147483647, tl.int32)
    for start in range(0, VOCABULARY, GROUPS * LANES):
        inside = start + place < VOCABULARY
        raw = tl.load(base + start + place, mask=inside, other=0.0, eviction_policy="evict_first")
        z = _finish(raw, scale, cap, HAS_CAP)
        first = tl.minimum(
            first, tl.min(tl.where(inside & (z == highest), start + place, 2147483647), axis=1)
        )
        slope = tl.exp(z - normalizer) * scale
        if HAS_CAP:
            slope = slope * (1.0 - (z / cap) * (z / cap))
        here = start + place == label
        if FP8:
            slope = tl.where(here, 0.0, slope * FP8_SCALE)
        else:
            slope = tl.where(here, wanted_slope, slope)
        tl.store(to + start + place, slope.to(slopes.dtype.element_ty), mask=inside)
    tl.store(logp + row, wanted - normalizer)
    tl.store(best + row, tl.min(first, axis=0).to(tl.int64))
    if FP8:
        tl.store(own + row, wanted_slope)


def softmax_gradient_(
    logits: Tensor,
    labels: Tensor,
    logits_scale: tuple[float, float | None] = (1.0, None),
    *,
    warps: int = 32,
) -> tuple[Tensor, Tensor]:
    """Replace raw ``logits`` [R, V] by the gradient of -log q(label) with respect to them.

    Returns log q of the labels (f32 [R]) and the argmax (i64 [R], the first of equals).
    ``labels`` i64 [R]; contiguous. Equals ``head_loss.torch_softmax_gradient_``.
    """
    logp, best, _ = _launch(logits, labels, logits, logits_scale, warps)
    return logp, best


def softmax_gradient_fp8(
    logits: Tensor,
    labels: Tensor,
    slopes: Tensor,
    logits_scale: tuple[float, float | None] = (1.0, None),
    *,
    warps: int = 32,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same into ``slopes`` (e5m2 [R, V], times ``FP8_SCALE``), zero at the labels.

    Returns log q, the argmax, and the labels' own gradient, f32 [R].
    """
    return _launch(logits, labels, slopes, logits_scale, warps)


def _launch(
    logits: Tensor,
    labels: Tensor,
    slopes: Tensor,
    logits_scale: tuple[float, float | None],
    warps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocabulary = logits.shape
    assert logits.is_contiguous() and slopes.is_contiguous()
    scale, cap = logits_scale
    logp = torch.empty(rows, dtype=torch.float32, device=logits.device)
    own = torch.empty_like(logp)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _rows_kernel[(rows,)](
        logits, labels, slopes, logp, best, own, logits.stride(0), scale,
        1.0 if cap is None else cap,
        VOCABULARY=vocabulary, HAS_CAP=cap is not None, FP8=slopes.dtype == torch.float8_e5m2,
        GROUPS=32 * warps, LANES=LANES, num_warps=warps,
    )  # fmt: skip
    return logp, best, own
