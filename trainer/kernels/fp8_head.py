"""The head loss with both products in fp8: an option, whose loss is shown beside bf16's.

    logits     hidden (e4m3) × head (e4m3)
    gradient   probabilities (e5m2) × head (e4m3), and the label's own row in bf16, exactly

The label's entry of the gradient is the only large one. Left in e5m2 it would be off by up to an
eighth, and a token already learned would never stop being pushed about.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.head_loss import Chunk, ChunkedHeadLoss, LogitsScale, torch_softmax_gradient_
from trainer.kernels.cross_entropy import FP8_SCALE, softmax_gradient_fp8

E4M3_MAX = 448.0


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """As e4m3 with one scale (f32 [1]) that takes the largest value to the type's largest."""
    scale = values.abs().amax().float().clamp(min=1e-12) / E4M3_MAX
    return (values / scale).to(torch.float8_e4m3fn), scale.reshape(1)


def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """``a`` [m, k] × ``b`` [n, k] transposed, bf16 [m, n]; full accumulation."""
    return F.scaled_mm(
        a,
        b.t(),
        a_scale,
        F.ScalingType.TensorWise,
        b_scale,
        F.ScalingType.TensorWise,
        output_dtype=torch.bfloat16,
    )


class Fp8HeadLoss(ChunkedHeadLoss):
    """Keeps two fp8 copies of ``head`` [V, H], by rows and by columns (2 bytes a value in all)."""

    def __init__(self, head: Tensor, chunk: int) -> None:
        super().__init__(torch_softmax_gradient_, chunk)
        self.head = head
        self.by_row, self.scale = quantize(head.detach())
        self.by_column = self.by_row.t().contiguous()
        self.probability_scale = torch.full((1,), 1 / FP8_SCALE.value, device=head.device)

    def _finish(
        self, hidden: Tensor, head: Tensor, labels: Tensor, logits_scale: LogitsScale
    ) -> Chunk:
        assert head.data_ptr() == self.head.data_ptr(), "made for another head"
        small, scale = quantize(hidden)
        logits = multiply(small, scale, self.by_row, self.scale)
        slopes = torch.empty_like(logits, dtype=torch.float8_e5m2)
        logp, best, own = softmax_gradient_fp8(logits, labels, slopes, logits_scale)
        del logits
        others = multiply(slopes, self.probability_scale, self.by_column, self.scale)
        mine = head.index_select(0, labels) * own[:, None]
        return Chunk((others + mine).to(hidden.dtype), logp, best)
