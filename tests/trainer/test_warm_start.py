"""A drafter may begin as its target's last layers; where it cannot, the reason is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_target import CONFIGS, make_model, run_config, save_target, write_chats

from trainer.config import parse_config
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.errors import ConfigError
from trainer.resolve import resolve
from trainer.run import open_run, prepare_run
from trainer.taps import decoder_layers
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


def test_a_run_begins_with_the_copies_when_its_config_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_RUN_DIR", raising=False)
    save_target(tmp_path / "target")
    write_chats(tmp_path / "chats.jsonl", 12)
    wanted = "layers.0.mlp.down_proj.weight"

    def begun(start: str) -> torch.Tensor:
        changes = {"start": start, "intermediate_size": None}
        tree = run_config(tmp_path, drafter=changes, folder=str(tmp_path / start))
        config = parse_config(tree, source="a test", base=tmp_path)
        run = prepare_run(open_run(resolve(config)))
        return run.make_drafter(torch.device("cpu")).state()["master"][wanted]

    theirs = make_model("llama").model.layers[-1].mlp.down_proj.weight
    assert torch.equal(begun("target"), theirs)
    assert not torch.equal(begun("random"), theirs)
