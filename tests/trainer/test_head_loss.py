"""The chunked head loss: the reference's numbers, none of its logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.head_loss import (
    ChunkedHeadLoss,
    HeadLoss,
    LogitsScale,
    reference_head_loss,
    torch_softmax_gradient_,
)

pytestmark = pytest.mark.torch


def confident(logp: Tensor) -> Tensor:
    """A weight that depends on the loss, as D-PACE's does."""
    return logp.exp() + 0.5


@pytest.mark.parametrize("scale", [(1.0, None), (0.5, 3.0)])
@pytest.mark.parametrize("chunk", [1, 10, 100])
def test_loss_weight_choice_and_gradient_equal_the_reference(
    chunk: int, scale: LogitsScale
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(50, 16, dtype=torch.float64)
    head = torch.randn(99, 16, dtype=torch.float64)
    rows = torch.randperm(50)[:33]
    labels = torch.randint(0, 99, (33,))

    def run(head_loss: HeadLoss) -> tuple[Tensor, ...]:
        leaf = hidden.clone().requires_grad_()
        got = head_loss(leaf, head, rows, labels, confident, scale)
        (grad,) = torch.autograd.grad(got.loss * 3, leaf)
        return got.loss.detach().double(), got.weight.double(), got.best, grad

    fast = run(ChunkedHeadLoss(torch_softmax_gradient_, chunk))
    # The fast one keeps log-probabilities in fp32.
    for a, b in zip(fast, run(reference_head_loss), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_no_more_logits_exist_than_one_chunk_and_only_rows_asked_for_are_multiplied() -> None:
    products: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.ndim == 2 and out.shape[1] == 999:
                products.append(out.shape[0])
            return out

    hidden = torch.randn(400, 16, requires_grad=True)
    head = torch.randn(999, 16)
    rows = torch.arange(0, 400, 4)
    with Watch():
        got = ChunkedHeadLoss(torch_softmax_gradient_, 32)(
            hidden, head, rows, torch.randint(0, 999, (100,)), torch.ones_like, (1.0, None)
        )
        got.loss.backward()
    assert max(products) == 32


def test_rows_not_asked_for_get_no_gradient() -> None:
    hidden = torch.randn(10, 8, requires_grad=True)
    got = ChunkedHeadLoss(torch_softmax_gradient_, 4)(
        hidden,
        torch.randn(30, 8),
        torch.tensor([7, 2]),
        torch.tensor([1, 2]),
        torch.ones_like,
        (1.0, None),
    )
    (grad,) = torch.autograd.grad(got.loss, hidden)
    assert grad.abs().sum(-1).nonzero()[:, 0].tolist() == [2, 7]
