"""Products in fp8 with one scale a tensor: an option, whose loss is shown beside bf16's.

Forward and input gradient of a linear layer run in fp8 (e4m3 × e4m3, e5m2 × e4m3); the weight's own
gradient stays in bf16, where it is added up over steps and needs no transposed copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57_344.0}


def quantize(values: Tensor, kind: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """``values`` over a scale (f32 [1]) that takes the largest of them to the type's largest."""
    scale = (values.abs().amax().float() / LARGEST[kind]).clamp(min=1e-12)
    return (values.float() / scale).to(kind), scale.reshape(1)


@torch.library.custom_op("dflash::fp8_product", mutates_args=())
def fp8_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """``a`` [m, k] times ``b`` [n, k] transposed, bf16 [m, n], accumulated in full precision."""
    return F.scaled_mm(
        a,
        b.t(),
        a_scale,
        F.ScalingType.TensorWise,
        b_scale,
        F.ScalingType.TensorWise,
        output_dtype=torch.bfloat16,
    )


@fp8_product.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return fp8_product(*quantize(x), *quantize(weight))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        slope = outer[0].contiguous()
        small, scale = quantize(weight)
        d_x = fp8_product(*quantize(slope, torch.float8_e5m2), small.t().contiguous(), scale)
        return d_x, slope.t() @ x


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear`` of bf16 ``x`` [..., k] and ``weight`` [n, k], multiplied in fp8."""
    out: Tensor = _Fp8Linear.apply(x.flatten(0, -2), weight)
    return out.unflatten(0, x.shape[:-1])
