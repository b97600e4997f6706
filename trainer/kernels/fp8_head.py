"""The head loss with both products in fp8: an option, whose loss is shown beside bf16's.

    logits     hidden (e4m3) × head (e4m3)
    gradient   probabilities (e5m2) × head (e4m3), and the label's own row in bf16, exactly

The label's entry of the gradient is the only large one. Left in e5m2 it would be off by up to an
eighth, and a token already learned would never stop being pushed about.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.head_loss import Chunk, ChunkedHeadLoss, LogitsScale, torch_softmax_gradient_
from trainer.kernels.cross_entropy import FP8_SCALE, softmax_gradient_fp8
from trainer.kernels.fp8 import fp8_product, quantize


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
        logits = fp8_product(small, scale, self.by_row, self.scale)
        slopes = torch.empty_like(logits, dtype=torch.float8_e5m2)
        logp, best, own = softmax_gradient_fp8(logits, labels, slopes, logits_scale)
        del logits
        others = fp8_product(slopes, self.probability_scale, self.by_column, self.scale)
        mine = head.index_select(0, labels) * own[:, None]
        return Chunk((others + mine).to(hidden.dtype), logp, best)
