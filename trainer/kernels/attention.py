"""Attention of block slots over a shared context: forward and backward, without atomics.

flex_attention reads a tile of 128 queries of one head; here a tile is 128 rows of (slot, head)
whose heads share their keys, so it spans a quarter of the slots (for groups of four). The gain is
in what is *not* multiplied: the keys past the tile's last anchor, and the 128 slots of other blocks
beside the 32 that matter. Keys and values of context and slots stay in tensors of their own.

    rows   r = slot·G + head in group     (G = query heads per key head, padded to a power of two)
    keys   the tile's part of the context, then the tile's own slots

The intervals of ``drafter.mask.Visible`` decide what is seen; tiles wholly inside every row's
interval skip the comparison. Softmax runs in base 2.

b = rows of the batch, S = context, Q = slots, T = slots a tile, D = head width.
"""
# mypy: disable-error-code="no-untyped-def"
# (Triton traces the text of a kernel; its arguments are pointers and scalars of its own types.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_rows(base, slot, head, inside, HEADS: tl.constexpr, D: tl.constexpr):
    """[rows, D] of a [Q, HEADS, D] tensor."""
    columns = tl.arange(0, D)
    place = (slot * HEADS + head).to(tl.int64) * D
    return tl.load(base + place[:, None] + columns[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _scores(q, k, slope, low, high, first, BN: tl.constexpr, MASKED: tl.constexpr):
    """Base-2 logits [rows, BN] of the keys first..first+BN-1; -inf where a row sees none."""
    s = tl.dot(q, tl.trans(k)) * slope
    if MASKED:
        key = first + tl.arange(0, BN)
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _absorb(s, v, out, top, total):
    """One step of the running softmax."""
    higher = tl.maximum(top, tl.max(s, axis=1))
    # A row may have seen no key yet: -inf - -inf is NaN.
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(s - anchor[:, None])
    shrink = tl.exp2(top - anchor)
    out = out * shrink[:, None]
    out = tl.dot(p.to(v.dtype), v, out)
    return out, higher, total * shrink + tl.sum(p, axis=1)


@triton.jit
def _row_bounds(low, high, slot, inside, BN: tl.constexpr):
    """Per row its interval; for the tile: first and last key, and the part all rows see."""
    row_low = tl.load(low + slot, mask=inside, other=0)
    row_high = tl.load(high + slot, mask=inside, other=0)
    # A row without any key would empty the common part; it is masked by its own bounds anyway.
    begin = tl.min(tl.where(inside, row_low, 2147483647), axis=0) // BN * BN
    end = tl.max(row_high, axis=0)
    common_low = tl.max(row_low, axis=0)
    common_high = tl.min(tl.where(inside, row_high, 2147483647), axis=0)
    full_begin = tl.minimum((common_low + BN - 1) // BN * BN, tl.cdiv(end, BN) * BN)
    full_end = tl.maximum(common_high // BN * BN, full_begin)
    return row_low, row_high, begin, end, full_begin, full_end


@triton.jit
def forward_kernel(
    query, key, value, own_key, own_value, low, high, own_low, own_high, out, lse,
    slope, S, Q,
    HEADS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    D: tl.constexpr, T: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles see most: begin with them
    batch = tl.program_id(1) // KV
    kv = tl.program_id(1) % KV
    rows = tl.arange(0, T * PADDED)
    slot = tile * T + rows // PADDED
    member = rows % PADDED
    inside = (slot < Q) & (member < GROUP)
    head = kv * GROUP + member
    bounds = batch * Q
    row_low, row_high, begin, end, full_begin, full_end = _row_bounds(
        low + bounds, high + bounds, slot, inside, BN
    )
    slots = batch.to(tl.int64) * Q
    context = batch.to(tl.int64) * S * KV * D
    q = _load_rows(query + slots * HEADS * D, slot, head, inside, HEADS, D)
    acc = tl.zeros([T * PADDED, D], tl.float32)
    top = tl.full([T * PADDED], float("-inf"), tl.float32)
    total = tl.zeros([T * PADDED], tl.float32)
    near = tl.arange(0, BN)
    for first in range(full_begin, full_end, BN):
        k = _load_rows(key + context, first + near, kv, near >= 0, KV, D)
        v = _load_rows(value + context, first + near, kv, near >= 0, KV, D)
        s = _scores(q, k, slope, row_low, row_high, first, BN, False)
        acc, top, total = _absorb(s, v, acc, top, total)
    left = tl.cdiv(full_begin - begin, BN)
    right = tl.cdiv(tl.maximum(end - full_end, 0), BN)
    for step in range(0, left + right):
        first = tl.where(step < left, begin + step * BN, full_end + (step - left) * BN)
        k = _load_rows(key + context, first + near, kv, first + near < S, KV, D)
        v = _load_rows(value + context, first + near, kv, first + near < S, KV, D)
        s = _scores(q, k, slope, row_low, row_high, first, BN, True)
        acc, top, total = _absorb(s, v, acc, top, total)
    mine = tile * T + tl.arange(0, T)
    k = _load_rows(own_key + slots * KV * D, mine, kv, mine < Q, KV, D)
    v = _load_rows(own_value + slots * KV * D, mine, kv, mine < Q, KV, D)
    from_ = tl.load(own_low + bounds + slot, mask=inside, other=0) - S
    to = tl.load(own_high + bounds + slot, mask=inside, other=0) - S
    s = _scores(q, k, slope, from_, to, tile * T, T, True)
    acc, top, total = _absorb(s, v, acc, top, total)
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    columns = tl.arange(0, D)
    place = (slots + slot) * HEADS + head
    tl.store(
        out + place[:, None] * D + columns[None, :], acc.to(out.dtype.element_ty), inside[:, None]
    )
    tl.store(lse + place, top + tl.log2(total), inside)


@triton.jit
def query_gradient_kernel(
    query, key, value, own_key, own_value, low, high, own_low, own_high, out, lse, d_out,
    d_query, d_own_key, d_own_value, delta,
    slope, scale, S, Q,
    HEADS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    D: tl.constexpr, T: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dQ, and dK and dV of the slots: a tile holds every query of its slots' keys."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = tl.program_id(1) // KV
    kv = tl.program_id(1) % KV
    rows = tl.arange(0, T * PADDED)
    slot = tile * T + rows // PADDED
    member = rows % PADDED
    inside = (slot < Q) & (member < GROUP)
    head = kv * GROUP + member
    bounds = batch * Q
    row_low, row_high, begin, end, full_begin, full_end = _row_bounds(
        low + bounds, high + bounds, slot, inside, BN
    )
    slots = batch.to(tl.int64) * Q
    context = batch.to(tl.int64) * S * KV * D
    place = (slots + slot) * HEADS + head
    q = _load_rows(query + slots * HEADS * D, slot, head, inside, HEADS, D)
    do = _load_rows(d_out + slots * HEADS * D, slot, head, inside, HEADS, D)
    o = _load_rows(out + slots * HEADS * D, slot, head, inside, HEADS, D)
    dot = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    tl.store(delta + place, dot, inside)
    # Rows outside get an infinite normalizer: their probabilities are zero.
    norm = tl.load(lse + place, mask=inside, other=float("inf"))
    dq = tl.zeros([T * PADDED, D], tl.float32)
    near = tl.arange(0, BN)
    for first in range(full_begin, full_end, BN):
        k = _load_rows(key + context, first + near, kv, near >= 0, KV, D)
        v = _load_rows(value + context, first + near, kv, near >= 0, KV, D)
        s = _scores(q, k, slope, row_low, row_high, first, BN, False)
        p = tl.exp2(s - norm[:, None])
        ds = p * (tl.dot(do, tl.trans(v)) - dot[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    left = tl.cdiv(full_begin - begin, BN)
    right = tl.cdiv(tl.maximum(end - full_end, 0), BN)
    for step in range(0, left + right):
        first = tl.where(step < left, begin + step * BN, full_end + (step - left) * BN)
        k = _load_rows(key + context, first + near, kv, first + near < S, KV, D)
        v = _load_rows(value + context, first + near, kv, first + near < S, KV, D)
        s = _scores(q, k, slope, row_low, row_high, first, BN, True)
        p = tl.exp2(s - norm[:, None])
        ds = p * (tl.dot(do, tl.trans(v)) - dot[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    mine = tile * T + tl.arange(0, T)
    k = _load_rows(own_key + slots * KV * D, mine, kv, mine < Q, KV, D)
    v = _load_rows(own_value + slots * KV * D, mine, kv, mine < Q, KV, D)
    from_ = tl.load(own_low + bounds + slot, mask=inside, other=0) - S
    to = tl.load(own_high + bounds + slot, mask=inside, other=0) - S
    s = _scores(q, k, slope, from_, to, tile * T, T, True)
    p = tl.exp2(s - norm[:, None])
    ds = (p * (tl.dot(do, tl.trans(v)) - dot[:, None])).to(k.dtype)
    dq = tl.dot(ds, k, dq) * scale
    dv = tl.dot(tl.trans(p.to(do.dtype)), do)
    dk = tl.dot(tl.trans(ds), q) * scale
    columns = tl.arange(0, D)
    tl.store(
        d_query + place[:, None] * D + columns[None, :],
        dq.to(d_query.dtype.element_ty),
        inside[:, None],
    )
    at = ((slots + mine) * KV + kv)[:, None] * D + columns[None, :]
    tl.store(d_own_key + at, dk.to(d_own_key.dtype.element_ty), (mine < Q)[:, None])
    tl.store(d_own_value + at, dv.to(d_own_value.dtype.element_ty), (mine < Q)[:, None])


@triton.jit
def _key_step(
    dk, dv, k, v, query, d_out, lse, delta, low, high, slot, member, head, first, slope, Q,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """What one tile of query rows adds to the gradients of BN keys."""
    inside = (slot < Q) & (member < GROUP)
    q = _load_rows(query, slot, head, inside, HEADS, D)
    do = _load_rows(d_out, slot, head, inside, HEADS, D)
    norm = tl.load(lse + slot * HEADS + head, mask=inside, other=float("inf"))
    dot = tl.load(delta + slot * HEADS + head, mask=inside, other=0.0)
    s = tl.dot(k, tl.trans(q)) * slope
    p = tl.exp2(s - norm[None, :])
    if MASKED:
        row_low = tl.load(low + slot, mask=inside, other=0)
        row_high = tl.load(high + slot, mask=inside, other=0)
        key = first + tl.arange(0, BN)
        seen = (key[:, None] >= row_low[None, :]) & (key[:, None] < row_high[None, :])
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv)
    ds = p * (tl.dot(v, tl.trans(do)) - dot[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def key_gradient_kernel(
    query, key, value, low, high, lse, delta, d_out, ranges, d_key, d_value,
    slope, scale, S, Q,
    HEADS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    D: tl.constexpr, T: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dK and dV of the context: each program owns BN keys and sweeps the query tiles that see them.

    ``ranges`` i32 [b, key tiles, 4]: first tile, first and last+1 of those that see all the keys,
    last+1. Early keys are seen by all, late ones by few: the grid's order begins with the longest.
    """
    tile = tl.program_id(1)
    batch = tl.program_id(0) // KV
    kv = tl.program_id(0) % KV
    first = tile * BN
    near = first + tl.arange(0, BN)
    context = batch.to(tl.int64) * S * KV * D
    slots = batch.to(tl.int64) * Q * HEADS
    bounds = batch * Q
    k = _load_rows(key + context, near, kv, near < S, KV, D)
    v = _load_rows(value + context, near, kv, near < S, KV, D)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    rows = tl.arange(0, T * PADDED)
    member = rows % PADDED
    head = kv * GROUP + member
    reach = ranges + (batch * tl.num_programs(1) + tile) * 4
    begin = tl.load(reach)
    full_begin = tl.load(reach + 1)
    full_end = tl.load(reach + 2)
    end = tl.load(reach + 3)
    for step in range(full_begin, full_end):
        dk, dv = _key_step(
            dk, dv, k, v, query + slots * D, d_out + slots * D, lse + slots, delta + slots,
            low + bounds, high + bounds, step * T + rows // PADDED, member, head, first, slope, Q,
            HEADS, GROUP, D, BN, False,
        )  # fmt: skip
    left = full_begin - begin
    for count in range(0, left + end - full_end):
        step = tl.where(count < left, begin + count, full_end + count - left)
        dk, dv = _key_step(
            dk, dv, k, v, query + slots * D, d_out + slots * D, lse + slots, delta + slots,
            low + bounds, high + bounds, step * T + rows // PADDED, member, head, first, slope, Q,
            HEADS, GROUP, D, BN, True,
        )  # fmt: skip
    columns = tl.arange(0, D)
    at = context + (near * KV + kv).to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(d_key + at, (dk * scale).to(d_key.dtype.element_ty), (near < S)[:, None])
    tl.store(d_value + at, dv.to(d_value.dtype.element_ty), (near < S)[:, None])
