"""The target is tapped exactly where transformers reports its hidden states."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_target import CONFIGS, SHAPE, TEMPLATE, make_model, save_target
from transformers import AutoModelForCausalLM, AutoTokenizer, PhiConfig, Qwen3NextConfig, ViTConfig

from trainer import taps
from trainer.config import TargetConfig
from trainer.data.batch import Batch
from trainer.errors import DataError, TargetError
from trainer.taps import TappedTarget, check_taps, decoder_layers
from trainer.target import (
    check_target,
    check_weight_files,
    load_frozen,
    load_hf_config,
    load_model,
    load_tokenizer,
)

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def packed_batch(lengths: list[int], row: int) -> Batch:
    """One row with documents of these lengths, the rest padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 200, (1, row), generator=generator)
    document = torch.full((1, row), -1, dtype=torch.int32)
    position, start = torch.zeros(1, row, dtype=torch.long), 0
    for number, length in enumerate(lengths):
        document[0, start : start + length] = number
        position[0, start : start + length] = torch.arange(length)
        start += length
    position[0, start:] = torch.arange(row - start)
    return Batch(
        tokens=tokens,
        document=document,
        position=position,
        supervised=document >= 0,
        anchors=torch.zeros(1, 1, dtype=torch.long),
        anchor_valid=torch.ones(1, 1, dtype=torch.bool),
        sample_ids=(tuple(range(len(lengths))),),
    )


def reported(model: Any, tokens: torch.Tensor, layer_ids: list[int]) -> torch.Tensor:
    out = model(input_ids=tokens, output_hidden_states=True)
    return torch.cat([out.hidden_states[i + 1] for i in layer_ids], dim=-1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_tap_is_the_hidden_state_that_transformers_reports(kind: str) -> None:
    model = make_model(kind)
    batch = packed_batch([24], 24)
    for layer_ids in ([0], [2], [1, 3], [0, 2, 5], [5]):
        stage = TappedTarget(model, layer_ids, CPU)
        features = stage.features(batch)
        assert torch.equal(features, reported(model, batch.tokens, layer_ids)), layer_ids
        assert features.shape[-1] == stage.feature_width
        check_taps(model, layer_ids)


@pytest.mark.parametrize("kind", CONFIGS)
def test_documents_of_a_row_do_not_see_each_other(kind: str) -> None:
    model = make_model(kind)
    batch = packed_batch([11, 7], 24)
    features = TappedTarget(model, [1, 4], CPU).features(batch)
    for start, end in ((0, 11), (11, 18)):
        alone = reported(model, batch.tokens[:, start:end], [1, 4])
        torch.testing.assert_close(features[:, start:end], alone, rtol=1e-4, atol=1e-5)


def test_no_layer_above_the_last_tap_is_run() -> None:
    model = make_model("llama")
    ran: list[int] = []
    _, layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_args, index=index: ran.append(index))
    head_ran: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: head_ran.append(1))
    TappedTarget(model, [1, 3], CPU).features(packed_batch([8], 8))
    assert ran == [0, 1, 2, 3]
    assert not head_ran


def test_the_model_stays_whole_and_two_stages_share_it() -> None:
    model = make_model("llama")
    batch = packed_batch([8], 8)
    before = model(input_ids=batch.tokens).logits
    first, second = TappedTarget(model, [1], CPU), TappedTarget(model, [3], CPU)
    assert torch.equal(first.features(batch), reported(model, batch.tokens, [1]))
    assert torch.equal(second.features(batch), reported(model, batch.tokens, [3]))
    assert torch.equal(model(input_ids=batch.tokens).logits, before)


def test_features_go_into_a_given_slot_and_may_be_used_by_autograd() -> None:
    stage = TappedTarget(make_model("llama"), [1, 3], CPU)
    batch = packed_batch([8], 8)
    slot = torch.zeros(1, 8, stage.feature_width)
    assert stage.features(batch, slot) is slot
    weight = torch.ones(stage.feature_width, requires_grad=True)
    (stage.features(batch) @ weight).sum().backward()
    assert torch.allclose(weight.grad, slot.sum((0, 1)), atol=1e-4)


def test_a_tap_one_layer_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneOff(TappedTarget):
        def __init__(self, model: Any, layer_ids: list[int], device: torch.device) -> None:
            super().__init__(model, [i + 1 for i in layer_ids], device)

    model = make_model("llama")
    check_taps(model, [2])
    monkeypatch.setattr(taps, "TappedTarget", OneOff)
    with pytest.raises(TargetError, match=r"hidden_states\[3\]"):
        check_taps(model, [2])


def test_the_frozen_rows_are_read_without_the_rest(tmp_path: Path) -> None:
    config = TargetConfig(model=str(save_target(tmp_path / "t", "qwen3")))
    frozen = load_frozen(config)
    whole = load_model(config, CPU)
    assert torch.equal(frozen.embedding, whole.get_input_embeddings().weight)
    assert torch.equal(frozen.head, whole.get_output_embeddings().weight)


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ("/nowhere/at/all", TargetError, "no file or folder"),
        ("/nowhere/model.gguf", TargetError, "no file"),
        ("package:no_such_package/x.gguf", DataError, "pip install"),
        ("package:numpy/x.gguf", DataError, "no such file"),
    ],
)
def test_an_absent_model_is_named(model: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        load_hf_config(TargetConfig(model=model))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"config\.json"):
        load_hf_config(TargetConfig(model=str(tmp_path)))


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def without_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def with_a_narrower_tensor(file: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name][:10]}, file, metadata={"format": "pt"})


def as_a_page(file: Path) -> None:
    file.rename(file.with_name("pytorch_model.bin")).write_bytes(b"<html>")


def as_a_cut_archive(file: Path) -> None:
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    cut_short(file.with_name("pytorch_model.bin"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_short, "model.safetensors is absent, damaged or cut short"),
        (Path.unlink, "no file named model.safetensors"),
        (as_a_page, "pytorch_model.bin is absent, damaged or cut short"),
        (as_a_cut_archive, "pytorch_model.bin is absent, damaged or cut short"),
        (without_a_tensor, "no tensor model.layers.2.mlp.up_proj.weight"),
        (
            with_a_narrower_tensor,
            "model.layers.2.mlp.up_proj.weight has shape (10, 32), config.json implies (48, 32)",
        ),
    ],
)
def test_weights_that_are_damaged_or_not_those_of_the_config_are_named_before_they_are_loaded(
    tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    """transformers itself would fill the hole with noise, and only warn."""
    folder = save_target(tmp_path / "t")
    damage(folder / "model.safetensors")
    target = TargetConfig(model=str(folder))
    with pytest.raises(TargetError) as caught:
        check_target(target, load_hf_config(target))
    assert says in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[1]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_names_no_files_is_named(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "t"
    make_model("llama").save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(TargetError, match=r"model\.safetensors\.index\.json cannot be read"):
        check_weight_files(TargetConfig(model=str(folder)))


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "40KB"}])
def test_files_that_transformers_does_not_read_may_be_anything(
    tmp_path: Path, shards: dict[str, Any]
) -> None:
    """Mistral's models hold their weights twice, and who cloned one may have fetched half of it."""
    folder = save_target(tmp_path / "t")
    (folder / "model.safetensors").unlink()
    make_model("llama").save_pretrained(folder, **shards)
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    target = TargetConfig(model=str(folder))
    check_target(target, load_hf_config(target))
    load_frozen(target)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_hidden_layers": "six"}, "'num_hidden_layers' expected int, got str"),
        ({"hidden_size": 33}, "hidden size (33) is not a multiple"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"layer_types": ["wobble"] * 6}, "`layer_types` entries must be in"),
        ({"dtype": "wobble"}, "no attribute 'wobble'"),
        ({"quantization_config": "x"}, "AttributeError"),
        ({"hidden_act": "wobble"}, "KeyError: 'wobble'"),
        ({"intermediate_size": -5}, "negative dimension"),
        ({"model_type": "wombat", "auto_map": {"AutoConfig": "own.Config"}}, "custom code"),
    ],
)
def test_a_config_of_nonsense_is_told_in_a_sentence(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    config = save_target(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    target = TargetConfig(model=str(tmp_path))
    with pytest.raises(TargetError) as caught:
        check_target(target, load_hf_config(target))
    assert says in caught.value.what
    assert "\n" not in caught.value.what


def test_code_that_comes_with_a_model_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask the terminal for a yes, for 15 s."""
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked"))
    settings = {"model_type": "wombat", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(TargetError, match="contains custom code") as caught:
        load_hf_config(TargetConfig(model=str(tmp_path)))
    assert "code beside a model is never run" in caught.value.next_step


@pytest.mark.parametrize("content", ["{}", "[", '{"model": {"type": "Wobble"}}'])
def test_a_damaged_tokenizer_is_told_in_a_sentence(tmp_path: Path, content: str) -> None:
    (save_target(tmp_path) / "tokenizer.json").write_text(content)
    with pytest.raises(TargetError, match="no usable tokenizer") as caught:
        load_tokenizer(TargetConfig(model=str(tmp_path)))
    assert "\n" not in caught.value.what


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_target_that_can_be_trained_passes_without_a_weight_being_read(
    tmp_path: Path, kind: str
) -> None:
    implementation = make_model(kind).config._attn_implementation
    folder = str(save_target(tmp_path / "t", kind))
    target = TargetConfig(model=folder, attention=implementation)
    whole = check_target(target, load_hf_config(target))
    assert {parameter.device.type for parameter in whole.parameters()} == {"meta"}


def test_accelerate_is_asked_for_where_transformers_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have torch, transformers and nothing more."""
    monkeypatch.setattr("trainer.target.find_spec", lambda _: None)
    folder = TargetConfig(model=str(save_target(tmp_path / "t")))
    assert next(check_target(folder, load_hf_config(folder)).parameters()).device.type == "meta"
    (tmp_path / "model.gguf").touch()
    with pytest.raises(TargetError, match="beside `accelerate` only"):
        check_target(TargetConfig(model=str(tmp_path / "model.gguf")), None)


def without(shape: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in shape.items() if key != name}


UNTRAINABLE = {
    "biased output head": PhiConfig(**without(SHAPE, "head_dim")),
    "linear_attention, whose state would pass": Qwen3NextConfig(
        **SHAPE,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    ),
}


@pytest.mark.parametrize("says", UNTRAINABLE)
def test_a_target_that_no_drafter_can_be_trained_for_is_refused(tmp_path: Path, says: str) -> None:
    AutoModelForCausalLM.from_config(UNTRAINABLE[says]).save_pretrained(tmp_path)
    target = TargetConfig(model=str(tmp_path))
    with pytest.raises(TargetError, match=says) as caught:
        check_target(target, load_hf_config(target))
    assert caught.value.next_step.startswith("choose another target")


def test_a_model_that_writes_no_text_is_refused(tmp_path: Path) -> None:
    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="of type vit, no causal language model"):
        load_hf_config(TargetConfig(model=str(tmp_path)))


def test_a_target_without_the_attention_asked_for_is_refused_by_field(tmp_path: Path) -> None:
    target = TargetConfig(model=str(save_target(tmp_path, "gemma2")))
    with pytest.raises(TargetError, match="scaled_dot_product_attention") as caught:
        check_target(target, load_hf_config(target))
    assert caught.value.next_step == "state target.attention: eager"


def test_a_package_that_the_target_needs_is_named_before_it_is_loaded(tmp_path: Path) -> None:
    config = save_target(tmp_path) / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"quantization_config": {"quant_method": "awq"}}))
    target = TargetConfig(model=str(tmp_path))
    with pytest.raises(TargetError, match="cannot be loaded here") as caught:
        check_target(target, load_hf_config(target))
    assert "install the package named above" in caught.value.next_step


def test_a_shard_that_is_not_there_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    make_model("llama").save_pretrained(folder, max_shard_size="40KB")
    target = TargetConfig(model=str(folder))
    check_weight_files(target)
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(TargetError, match=f"{gone.name} is absent"):
        check_weight_files(target)


@pytest.mark.parametrize("content", [b"hello", b"GGUF" + struct.pack("<IQQ", 3, 1, 5)])
def test_a_gguf_file_that_is_none_or_cut_short_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(TargetError, match=r"model\.gguf") as caught:
        load_hf_config(TargetConfig(model=str(file)))
    assert "copy or download" in str(caught.value)


def write_gguf(file: Path, longest: int) -> None:
    """A Llama's metadata and tokenizer, without weights."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(longest)
    writer.add_embedding_length(16)
    writer.add_block_count(2)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<e>", "a", "b", "c", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_files_metadata_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []

    class Counting(gguf.GGUFReader):  # type: ignore[misc, unused-ignore]
        def __init__(self, *given: Any) -> None:
            read.append(given)
            super().__init__(*given)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    file = tmp_path / "model.gguf"
    target = TargetConfig(model=str(file))
    write_gguf(file, longest=64)
    config = load_hf_config(target)
    config.max_position_embeddings = 7
    assert load_hf_config(target).max_position_embeddings == 64, "what one changes is its own"
    tokenizer = load_tokenizer(target)
    assert len(read) == 1

    chosen = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert type(tokenizer) is type(chosen)
    assert tokenizer.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()
    assert tokenizer.special_tokens_map == chosen.special_tokens_map
    assert tokenizer.chat_template == chosen.chat_template == TEMPLATE

    write_gguf(file, longest=128)
    assert load_hf_config(target).max_position_embeddings == 128
