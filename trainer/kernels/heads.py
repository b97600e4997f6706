"""From one fused projection to queries, keys and values: norm, weight, rotation, one visit each.

    fused [M, (NQ + 2·NK)·D]  →  query [M, NQ, D], key [M, NK, D], value [M, NK, D]

Queries and keys are normed by head, weighted and rotated (neox style), values are copied. Backward
writes the fused gradient in place of the three, so no concatenation follows. Left to a compiler the
two half-heads of the rotation become looped reductions at a fifth of the memory's speed.
"""
# mypy: disable-error-code="no-untyped-def"
# (Triton traces the text of a kernel; its arguments are pointers and scalars of its own types.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""(position, head) pairs a program handles at a time."""
ROUNDS = 16
"""… and how many times, in the backward pass of normed heads: one partial sum for all of them."""


@triton.jit
def _norm_kernel(
    fused, weight, cos, sin, out, stride, offset, count, eps,
    HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Heads offset/D … of every position: ``out`` [M·HEADS, D]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    position = row // HEADS
    half = tl.arange(0, D // 2)
    place = position.to(tl.int64) * stride + offset + (row % HEADS) * D
    at = place[:, None] + half[None, :]
    one = tl.load(fused + at, mask=inside[:, None], other=0.0).to(tl.float32)
    two = tl.load(fused + at + D // 2, mask=inside[:, None], other=0.0).to(tl.float32)
    mean = (tl.sum(one * one, axis=1) + tl.sum(two * two, axis=1)) / D
    root = 1.0 / tl.sqrt(mean + eps)
    one = one * root[:, None] * tl.load(weight + half).to(tl.float32)[None, :]
    two = two * root[:, None] * tl.load(weight + D // 2 + half).to(tl.float32)[None, :]
    angle = position[:, None] * (D // 2) + half[None, :]
    c = tl.load(cos + angle, mask=inside[:, None], other=0.0)
    s = tl.load(sin + angle, mask=inside[:, None], other=0.0)
    to = row.to(tl.int64)[:, None] * D + half[None, :]
    kind = out.dtype.element_ty
    tl.store(out + to, (one * c - two * s).to(kind), inside[:, None])
    tl.store(out + to + D // 2, (two * c + one * s).to(kind), inside[:, None])


@triton.jit
def _norm_gradient_kernel(
    fused, weight, cos, sin, d_out, d_fused, d_weight, stride, d_stride, offset, count, eps,
    HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """``d_weight`` f32 [programs, D]: each program's share of the weight's gradient."""
    half = tl.arange(0, D // 2)
    w_one = tl.load(weight + half).to(tl.float32)
    w_two = tl.load(weight + D // 2 + half).to(tl.float32)
    sum_one = tl.zeros([D // 2], tl.float32)
    sum_two = tl.zeros([D // 2], tl.float32)
    for turn in range(0, ROUNDS):
        row = (tl.program_id(0) * ROUNDS + turn) * ROWS + tl.arange(0, ROWS)
        inside = row < count
        position = row // HEADS
        head = offset + (row % HEADS) * D
        at = (position.to(tl.int64) * stride + head)[:, None] + half[None, :]
        one = tl.load(fused + at, mask=inside[:, None], other=0.0).to(tl.float32)
        two = tl.load(fused + at + D // 2, mask=inside[:, None], other=0.0).to(tl.float32)
        mean = (tl.sum(one * one, axis=1) + tl.sum(two * two, axis=1)) / D
        root = 1.0 / tl.sqrt(mean + eps)
        one = one * root[:, None]
        two = two * root[:, None]
        angle = position[:, None] * (D // 2) + half[None, :]
        c = tl.load(cos + angle, mask=inside[:, None], other=0.0)
        s = tl.load(sin + angle, mask=inside[:, None], other=0.0)
        source = row.to(tl.int64)[:, None] * D + half[None, :]
        g_one = tl.load(d_out + source, mask=inside[:, None], other=0.0).to(tl.float32)
        g_two = tl.load(d_out + source + D // 2, mask=inside[:, None], other=0.0).to(tl.float32)
        t_one = g_one * c + g_two * s
        t_two = g_two * c - g_one * s
        sum_one += tl.sum(t_one * one, axis=0)
        sum_two += tl.sum(t_two * two, axis=0)
        t_one = t_one * w_one[None, :]
        t_two = t_two * w_two[None, :]
        along = (tl.sum(t_one * one, axis=1) + tl.sum(t_two * two, axis=1)) / D
        to = (position.to(tl.int64) * d_stride + head)[:, None] + half[None, :]
        kind = d_fused.dtype.element_ty
        d_one = root[:, None] * (t_one - one * along[:, None])
        d_two = root[:, None] * (t_two - two * along[:, None])
        tl.store(d_fused + to, d_one.to(kind), inside[:, None])
        tl.store(d_fused + to + D // 2, d_two.to(kind), inside[:, None])
    share = d_weight + tl.program_id(0) * D
    tl.store(share + half, sum_one)
    tl.store(share + D // 2 + half, sum_two)


def norm_rotate(
    fused: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: int, heads: int
) -> Tensor:
    """``heads`` heads from column ``offset`` of ``fused`` [M, *] (unit column stride), normed,
    weighted and rotated by f32 ``cos``, ``sin`` [M, D/2]: [M, heads, D]."""
    width = weight.numel()
    rows = fused.shape[0] * heads
    out = torch.empty(fused.shape[0], heads, width, dtype=fused.dtype, device=fused.device)
    _norm_kernel[(triton.cdiv(rows, ROWS),)](
        fused, weight, cos, sin, out, fused.stride(0), offset, rows, eps,
        HEADS=heads, D=width, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return out


def norm_rotate_gradient(
    fused: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: int,
    d_out: Tensor,
    d_fused: Tensor,
) -> Tensor:
    """Writes ``norm_rotate``'s gradient into its columns of ``d_fused``; returns the weight's."""
    heads, width = d_out.shape[1:]
    rows = fused.shape[0] * heads
    programs = triton.cdiv(rows, ROWS * ROUNDS)
    shares = torch.empty(programs, width, dtype=torch.float32, device=fused.device)
    _norm_gradient_kernel[(programs,)](
        fused, weight, cos, sin, d_out, d_fused, shares,
        fused.stride(0), d_fused.stride(0), offset, rows, eps,
        HEADS=heads, D=width, ROWS=ROWS, ROUNDS=ROUNDS, num_warps=4,
    )  # fmt: skip
    return shares.sum(0).to(weight.dtype)
