# mypy: disable-error-code="no-untyped-def"
# (Triton traces the text of a kernel; its arguments are pointers and scalars of its own types.)
"""AdamW on fp32 masters, the gradient's scaling before it and the bf16 copy after it, in one pass.

28 bytes a parameter (gradient 2, master 8, moments 16, copy 2) are all that must move: 29.4 GB for
the 1,049 M parameters of a drafter for an 8B target. Apart, the same steps move more than three
times that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _adamw_kernel(
    copy,
    gradient,
    master,
    average,
    square,
    factors,
    count,
    beta1,
    beta2,
    epsilon,
    BLOCK: tl.constexpr,
):
    # The factors are read from the device: nobody waits for the gradient's norm.
    coefficient = tl.load(factors)
    rate = tl.load(factors + 1)
    keep = tl.load(factors + 2)
    root = tl.load(factors + 3)
    # True for NaN and infinities alike: such a step changes nothing.
    if coefficient - coefficient != 0.0:
        return
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * coefficient
    m = tl.load(average + place, mask=inside, other=0.0)
    v = tl.load(square + place, mask=inside, other=0.0)
    p = tl.load(master + place, mask=inside, other=0.0)
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p * keep - rate * m / (tl.sqrt(v) * root + epsilon)
    tl.store(average + place, m, mask=inside)
    tl.store(square + place, v, mask=inside)
    tl.store(master + place, p, mask=inside)
    tl.store(copy + place, p.to(copy.dtype.element_ty), mask=inside)


def schedule_factors(
    *, step: int, learning_rate: float, weight_decay: float, beta1: float, beta2: float
) -> Tensor:
    """f32 [3] on the CPU: the factors of ``adamw_`` that the host knows. ``step`` counts from 1."""
    return torch.tensor(
        [
            learning_rate / (1 - beta1**step),
            1 - learning_rate * weight_decay,
            (1 - beta2**step) ** -0.5,
        ]
    )


def adamw_(
    copy: Tensor,
    gradient: Tensor,
    master: Tensor,
    average: Tensor,
    square: Tensor,
    factors: Tensor,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """One AdamW step (decoupled decay) of one tensor, in place; all contiguous, of equal size.

    ``master``, ``average``, ``square`` are f32; ``copy`` receives the new master in its own type.
    ``factors`` f32 [4] on their device: what scales the gradient (clip factor / weight sum; not
    finite: the step leaves everything as it was), then ``schedule_factors``. The formula is
    ``torch.optim.AdamW``'s.
    """
    count = master.numel()
    _adamw_kernel[(triton.cdiv(count, BLOCK),)](
        copy,
        gradient,
        master,
        average,
        square,
        factors,
        count,
        beta1,
        beta2,
        epsilon,
        BLOCK=BLOCK,
        num_warps=8,
    )
