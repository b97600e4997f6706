"""The drafter against the published reader, its configuration, its start, and decoding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny_drafter import MIXED, SECOND, noisy_drafter, packed_batch, tiny_config

from trainer.drafter.config import FULL, DrafterConfig, tapped_layers
from trainer.drafter.decoding import DraftSession
from trainer.drafter.mask import MaskBuilder
from trainer.drafter.model import Drafter, rotate, rotation

pytestmark = pytest.mark.torch

KINDS = [
    pytest.param({}, id="full"),
    pytest.param({"layer_types": MIXED, "sliding_window": 3}, id="sliding"),
    pytest.param({"dflash2": SECOND}, id="dflash2"),
]


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (36, 1, [18])],
)
def test_taps_follow_the_published_rule(layers: int, count: int, ids: list[int]) -> None:
    assert tapped_layers(layers, count) == ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 40}, "mask_token_id 40 is outside the vocabulary of 40 rows"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"target_layer_ids": (1, 6)}, r"\[6\] are outside the target's 6 layers"),
        ({"target_layer_ids": (3, 1)}, "must rise"),
        ({"target_hidden_size": 64}, "hidden_size 32 differs from the target's 64"),
        ({"layer_types": MIXED}, "sliding_window is null"),
        ({"num_layers": 3}, "layer_types has 2 entries for num_layers 3"),
        ({"dflash2": SECOND.model_copy(update={"conv_group_size": 5})}, "does not divide"),
    ],
)
def test_a_misfit_names_the_field_and_both_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny_config(**changes)


def qwen3_like(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "vocab_size": 151_936,
        "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960,
    }
    return SimpleNamespace(**(fields | changes))


def test_fault_5_every_dimension_comes_from_the_target_not_from_a_default() -> None:
    config = DrafterConfig.for_target(qwen3_like(), mask_token_id=151_669)
    taken = {name: getattr(config, name) for name in DrafterConfig.model_fields}
    assert taken == {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_layers": 5,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960,
        "block_size": 16,
        "mask_token_id": 151_669,
        "target_layer_ids": (1, 9, 17, 25, 33),
        "num_target_layers": 36,
        "target_hidden_size": 4096,
        "layer_types": (FULL,) * 5,
        "sliding_window": None,
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "initializer_range": 0.02,
        "dflash2": None,
    }


def test_fault_4_a_target_without_a_rope_base_is_refused() -> None:
    with pytest.raises(ValueError, match="no rope_theta"):
        DrafterConfig.for_target(qwen3_like(rope_parameters=None), mask_token_id=1)


def test_fault_4_the_whole_head_turns_whatever_the_targets_partial_factor() -> None:
    by = rotation(torch.tensor([[3]]), head_dim=8, theta=500_000.0)
    turned = rotate(torch.ones(1, 1, 1, 8), by)[0, 0, 0]
    angle = 3 / 500_000.0 ** (torch.arange(4) * 2 / 8)
    wanted = torch.cat((angle.cos() - angle.sin(), angle.cos() + angle.sin()))
    torch.testing.assert_close(turned, wanted)


def test_misfits_with_another_target_name_both_values() -> None:
    config = DrafterConfig.for_target(qwen3_like(), mask_token_id=1)
    other = qwen3_like(vocab_size=32_000, rope_parameters={"rope_theta": 1e4})
    assert config.misfits(qwen3_like()) == []
    assert config.misfits(other) == [
        "vocab_size: the drafter has 151936, the target 32000",
        "rope_theta: the drafter has 1000000.0, the target 10000.0",
    ]


# -- the model ------------------------------------------------------------------------------------


def test_parameters_of_an_8b_targets_drafter_have_the_published_names_and_shapes() -> None:
    with torch.device("meta"):
        drafter = Drafter(DrafterConfig.for_target(qwen3_like(), mask_token_id=151_669))
    shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    assert len(shapes) == 58
    assert round(sum(p.numel() for p in drafter.parameters()) / 1e6, 1) == 1048.6
    assert {n: s for n, s in shapes.items() if not n.startswith("layers.")} == {
        "fc.weight": (4096, 20480),
        "hidden_norm.weight": (4096,),
        "norm.weight": (4096,),
    }
    assert {n[9:]: s for n, s in shapes.items() if n.startswith("layers.4.")} == {
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.k_proj.weight": (1024, 4096),
        "self_attn.v_proj.weight": (1024, 4096),
        "self_attn.o_proj.weight": (4096, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "mlp.gate_proj.weight": (12288, 4096),
        "mlp.up_proj.weight": (12288, 4096),
        "mlp.down_proj.weight": (4096, 12288),
        "input_layernorm.weight": (4096,),
        "post_attention_layernorm.weight": (4096,),
    }


@pytest.mark.parametrize("changes", KINDS)
def test_cached_decoding_equals_one_training_pass(changes: dict[str, Any]) -> None:
    """Appending context piece by piece, then one block: the hidden states training would give."""
    drafter = noisy_drafter(tiny_config(**changes))
    batch = packed_batch([12], [9])
    features, embedding = torch.randn(1, 12, 64), torch.randn(40, 32)
    anchor = int(batch.tokens[0, 9])
    masks = MaskBuilder(4, full=True, window=drafter.config.sliding_window)(
        batch.anchors, batch.anchor_valid, batch.position
    )
    slots = drafter.embed(drafter.slot_tokens(torch.tensor([[anchor]])).flatten(1), embedding)
    place = 9 + torch.arange(4)[None]
    with torch.no_grad():
        trained = drafter(features, slots, batch.position, place, masks)
    session = DraftSession(drafter, embedding, embedding)
    for part in (features[:, :5], features[:, 5:6], features[:, 6:9]):
        session.extend(part)
    torch.testing.assert_close(session.hidden(anchor, 4), trained, rtol=1e-4, atol=1e-5)


def test_sampled_drafts_come_with_what_they_were_drawn_from() -> None:
    for changes in ({}, {"dflash2": SECOND}):
        drafter = noisy_drafter(tiny_config(**changes))
        session = DraftSession(drafter, torch.randn(40, 32), torch.randn(40, 32) * 0.3)
        session.extend(torch.randn(1, 6, 64))
        drawn = session.propose(3, temperature=1.0, generator=torch.Generator().manual_seed(1))
        assert drawn.probability is not None and drawn.probability.shape == (3, 40)
        torch.testing.assert_close(drawn.probability.sum(-1), torch.ones(3))
        assert (drawn.probability.gather(-1, drawn.tokens[:, None]) > 0).all()
        cold = session.propose(3, temperature=1e-4)
        assert cold.tokens.tolist() == session.propose(3).tokens.tolist()


def test_convolutions_start_as_the_identity() -> None:
    """So that DFlash2 starts as the DFlash it extends; the reader leaves them uninitialized."""
    torch.manual_seed(0)
    second = Drafter(tiny_config(dflash2=SECOND))
    first = Drafter(tiny_config())
    first.load_state_dict(second.state_dict(), strict=False)
    batch = packed_batch([12], [3, 6])
    masks = MaskBuilder(4, full=True, window=None)(
        batch.anchors, batch.anchor_valid, batch.position
    )
    place = (batch.anchors[..., None] + torch.arange(4)).flatten(1)
    inputs = (torch.randn(1, 12, 64), torch.randn(1, 8, 32), batch.position, place, masks)
    torch.testing.assert_close(second(*inputs), first(*inputs))
