"""What a CUDA graph holds must not wait for the device, nor mix devices: tried without one, on meta
tensors, which have no values to wait for (reading one raises) and mix with no others."""

from __future__ import annotations

import pytest
import torch
from tiny_drafter import SECOND, packed_batch, tiny_config
from tiny_target import CONFIGS
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

from trainer.data.slots import SlotDecoder
from trainer.drafter.config import FULL, SLIDING, Dflash2Config
from trainer.drafter.mask import MaskBuilder
from trainer.drafter.model import Drafter
from trainer.flat_group import Now
from trainer.head_loss import (
    ChunkedHeadLoss,
    HeadLoss,
    reference_head_loss,
    torch_softmax_gradient_,
)
from trainer.muon import MuonGroup
from trainer.objective import DrafterLoss, FrozenTarget, ObjectiveConfig
from trainer.pipeline.stages import Sums

pytestmark = pytest.mark.torch
NOWHERE = torch.device("meta")


def test_reading_a_value_is_what_would_raise() -> None:
    here = torch.ones(3, device=NOWHERE)
    for waits in (lambda: here.sum().item(), lambda: here.nonzero(), lambda: here[here > 0]):
        with pytest.raises(RuntimeError):
            waits()
    with pytest.raises(RuntimeError):
        here + torch.ones(3)


@pytest.mark.parametrize("nucleus", [False, True])
@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_a_decoded_token(kind: type, nucleus: bool) -> None:
    name = "llama" if kind is LlamaForCausalLM else "qwen3"
    model = kind(CONFIGS[name]).to(NOWHERE).eval()
    decoder = SlotDecoder(model, {2}, 0, 4)
    decoder._allocate(4, 32)
    decoder._sampling, decoder._nucleus = True, nucleus
    with torch.inference_mode(), decoder._attention():
        decoder._step()
    assert decoder._made.device == NOWHERE


def test_an_update_by_muon() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(6, n, bias=False) for n in (6, 3)))
    module.to(NOWHERE)
    group = MuonGroup(list(module.named_parameters()), 0.1, torch.float32, 0.95)
    group.prepare(Now(1, 0.01))
    group.apply(torch.ones((), device=NOWHERE))


HEADS = {
    "reference": reference_head_loss,
    "chunked": ChunkedHeadLoss(torch_softmax_gradient_, 16),
}


@pytest.mark.parametrize("head", list(HEADS))
@pytest.mark.parametrize("objective", ["decay", "dpace"])
@pytest.mark.parametrize("second", [None, SECOND], ids=["dflash", "dflash2"])
def test_a_microbatch(second: Dflash2Config | None, objective: str, head: str) -> None:
    head_loss: HeadLoss = HEADS[head]  # type: ignore[assignment]
    config = tiny_config(dflash2=second, layer_types=(FULL, SLIDING), sliding_window=6)
    drafter = Drafter(config).to(NOWHERE)
    matrix = torch.empty(40, 32, device=NOWHERE)
    loss = DrafterLoss(
        drafter,
        FrozenTarget(matrix, matrix),
        ObjectiveConfig.model_validate({"kind": objective}),
        MaskBuilder(config.block_size, full=True, window=6),
        head_loss=head_loss,
    )
    batch = packed_batch([9, 7], [2, 5, 11], padding=3).to(NOWHERE)
    found = loss(batch, torch.empty(1, 19, 64, device=NOWHERE))
    found.loss.backward()
    assert Sums.vector(found).device == NOWHERE
    assert all(p.grad is not None for p in drafter.parameters())
