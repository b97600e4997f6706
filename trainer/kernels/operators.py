"""The attention kernels as operators that torch.compile and autograd know.

    split_heads(fused, …)      → query, key, value
    slot_attention(query, …)   → out

They are opaque to the compiler: it fuses what stands before and after them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from trainer.kernels import attention
from trainer.kernels.heads import norm_rotate, norm_rotate_gradient

ROW_TILE = 128
"""(slot, head) rows of a query tile: two warpgroups of 64, the height of their instruction."""
KEY_ROW_TILE = 64
"""… of the tiles that the key gradient's program sweeps, which holds two accumulators already."""
KEY_TILE = 64
KEY_GRADIENT_TILE = 128


def padded_group(heads: int, kv_heads: int) -> int:
    """Query heads that share a key head, rounded up to a power of two."""
    return triton.next_power_of_2(heads // kv_heads)


def key_slots(heads: int, kv_heads: int) -> int:
    """Slots in a tile of the key gradient's sweep: what ``drafter.mask.key_ranges`` counts in."""
    return KEY_ROW_TILE // padded_group(heads, kv_heads)


# -- split_heads ----------------------------------------------------------------------------------


@torch.library.custom_op("dflash::split_heads", mutates_args=())
def split_heads(
    fused: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``fused`` [b, L, (heads + 2·kv_heads)·D] as query, key [b, L, n, D] (normed, rotated by f32
    [b, L, D/2]) and value. ``heads`` may be 0: the query is then empty."""
    rows, length, _ = fused.shape
    width = key_weight.numel()
    flat, c, s = _flat(fused), cos.reshape(-1, width // 2), sin.reshape(-1, width // 2)
    if heads:
        query = norm_rotate(flat, query_weight, c, s, eps, 0, heads)
    else:
        query = fused.new_empty(rows * length, 0, width)
    key = norm_rotate(flat, key_weight, c, s, eps, heads * width, kv_heads)
    value = flat[:, (heads + kv_heads) * width :].reshape(-1, kv_heads, width)
    value = value.clone(memory_format=torch.contiguous_format)
    query, key, value = (t.unflatten(0, (rows, length)) for t in (query, key, value))
    return query, key, value


@split_heads.register_fake
def _(
    fused: Tensor, query_weight: Tensor, key_weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, heads, kv_heads = rest
    shape, width = fused.shape[:2], key_weight.numel()
    query = fused.new_empty(*shape, heads, width)
    return query, fused.new_empty(*shape, kv_heads, width), fused.new_empty(*shape, kv_heads, width)


@torch.library.custom_op("dflash::split_heads_gradient", mutates_args=())
def split_heads_gradient(
    fused: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``fused``, ``query_weight``, ``key_weight``."""
    heads, kv_heads, width = d_query.shape[2], d_key.shape[2], d_key.shape[3]
    flat, c, s = _flat(fused), cos.reshape(-1, width // 2), sin.reshape(-1, width // 2)
    d_fused = torch.empty(fused.shape, dtype=fused.dtype, device=fused.device)
    d_flat = d_fused.view(flat.shape)
    if heads:
        one = norm_rotate_gradient(
            flat, query_weight, c, s, eps, 0, d_query.flatten(0, 1).contiguous(), d_flat
        )
    else:
        one = torch.zeros_like(query_weight)
    two = norm_rotate_gradient(
        flat, key_weight, c, s, eps, heads * width, d_key.flatten(0, 1).contiguous(), d_flat
    )
    d_flat[:, (heads + kv_heads) * width :].copy_(d_value.reshape(flat.shape[0], -1))
    return d_fused, one, two


@split_heads_gradient.register_fake
def _(
    fused: Tensor, query_weight: Tensor, key_weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    d_fused = fused.new_empty(fused.shape)
    return d_fused, torch.empty_like(query_weight), torch.empty_like(key_weight)


def _flat(fused: Tensor) -> Tensor:
    """[b·L, columns]; rows may be a slice of wider ones, columns must follow each other."""
    if fused.stride(2) != 1 or fused.stride(0) != fused.shape[1] * fused.stride(1):
        fused = fused.contiguous()
    rows = fused.shape[0] * fused.shape[1]
    return fused.as_strided((rows, fused.shape[2]), (fused.stride(1), 1))


def _save_heads(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    fused, query_weight, key_weight, cos, sin, eps, _, _ = inputs
    ctx.save_for_backward(fused, query_weight, key_weight, cos, sin)
    ctx.eps = eps


def _heads_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    found = split_heads_gradient(*ctx.saved_tensors, ctx.eps, *gradients)
    return *found, None, None, None, None, None


split_heads.register_autograd(_heads_backward, setup_context=_save_heads)


# -- slot_attention -------------------------------------------------------------------------------


@torch.library.custom_op("dflash::slot_attention", mutates_args=())
def slot_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    low: Tensor,
    high: Tensor,
    own_low: Tensor,
    own_high: Tensor,
    ranges: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attention of ``query`` [b, Q, heads, D] over the context's ``key``, ``value`` [b, S, kv, D]
    and the slots' own [b, Q, kv, D]; all contiguous. i32 [b, Q] bounds and ``ranges`` as in
    ``drafter.mask.SlotMask``. Returns the output [b, Q, heads, D] and the base-2 log of each row's
    softmax sum, f32 [b, Q, heads]."""
    rows, slots, heads, width = query.shape
    kv_heads = key.shape[2]
    padded = padded_group(heads, kv_heads)
    out = torch.empty_like(query)
    lse = torch.empty(rows, slots, heads, dtype=torch.float32, device=query.device)
    tile = ROW_TILE // padded
    attention.forward_kernel[(triton.cdiv(slots, tile), rows * kv_heads)](
        query, key, value, own_key, own_value, low, high, own_low, own_high, out, lse,
        width**-0.5 * math.log2(math.e), key.shape[1], slots,
        HEADS=heads, KV=kv_heads, GROUP=heads // kv_heads, PADDED=padded, D=width, T=tile,
        BN=KEY_TILE, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out, lse


@slot_attention.register_fake
def _(query: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dflash::slot_attention_gradient", mutates_args=())
def slot_attention_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    low: Tensor,
    high: Tensor,
    own_low: Tensor,
    own_high: Tensor,
    ranges: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, own_key, own_value."""
    rows, slots, heads, width = query.shape
    length, kv_heads = key.shape[1:3]
    padded = padded_group(heads, kv_heads)
    scale = width**-0.5
    slope = scale * math.log2(math.e)
    shared = {"HEADS": heads, "KV": kv_heads, "GROUP": heads // kv_heads, "PADDED": padded}
    d_out = d_out.contiguous()
    d_query, d_own_key, d_own_value = (torch.empty_like(t) for t in (query, own_key, own_value))
    d_key, d_value, delta = (torch.empty_like(t) for t in (key, value, lse))
    tile = ROW_TILE // padded
    attention.query_gradient_kernel[(triton.cdiv(slots, tile), rows * kv_heads)](
        query, key, value, own_key, own_value, low, high, own_low, own_high, out, lse, d_out,
        d_query, d_own_key, d_own_value, delta, slope, scale, length, slots,
        **shared, D=width, T=tile, BN=KEY_TILE, num_warps=8, num_stages=3,
    )  # fmt: skip
    attention.key_gradient_kernel[(rows * kv_heads, triton.cdiv(length, KEY_GRADIENT_TILE))](
        query, key, value, low, high, lse, delta, d_out, ranges, d_key, d_value,
        slope, scale, length, slots,
        **shared, D=width, T=KEY_ROW_TILE // padded, BN=KEY_GRADIENT_TILE,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return d_query, d_key, d_value, d_own_key, d_own_value


@slot_attention_gradient.register_fake
def _(*inputs: Tensor) -> tuple[Tensor, ...]:
    # Of query, key, value, own_key, own_value.
    return tuple(torch.empty_like(t) for t in inputs[:5])


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _attention_backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None) -> tuple[Any, ...]:
    found = slot_attention_gradient(*ctx.saved_tensors, d_out)
    return *found, None, None, None, None, None


slot_attention.register_autograd(_attention_backward, setup_context=_save_attention)
