"""A drafter may begin as its target's last layers; where it cannot, the reason is named."""

from __future__ import annotations

import pytest
import torch
from tiny_target import CONFIGS, make_model

from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.errors import ConfigError
from trainer.target import decoder_layers
from trainer.warm_start import check_start, start_from_target

pytestmark = pytest.mark.torch


def make_drafter(kind: str, **changes: object) -> Drafter:
    config = DrafterConfig.for_target(
        CONFIGS[kind], mask_token_id=3, num_layers=2, block_size=4, **changes
    )
    return Drafter(config)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_layers_are_the_targets_last_and_the_last_tap_passes_through(kind: str) -> None:
    model, drafter = make_model(kind), make_drafter(kind)
    check_start(drafter, model)
    start_from_target(drafter, model)
    _, layers = decoder_layers(model)
    for mine, theirs in zip(drafter.layers, layers[-2:], strict=True):
        assert torch.equal(mine.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
        assert torch.equal(mine.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
    features = torch.randn(1, 5, drafter.config.feature_size)
    assert torch.equal(drafter.fc(features), features[..., -32:])


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("llama", {"intermediate_size": 20}, r"has shape \(48, 32\) in the target"),
        ("qwen2", {}, "bias"),
        ("gemma3", {}, "feedforward"),
        ("mixtral", {}, "no mlp.gate_proj"),
    ],
)
def test_a_target_of_another_build_is_refused(
    kind: str, changes: dict[str, object], says: str
) -> None:
    with torch.device("meta"):
        drafter = make_drafter(kind, **changes)
    with pytest.raises(ConfigError, match=says):
        check_start(drafter, make_model(kind))
