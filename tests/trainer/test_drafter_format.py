"""Exports: both forms come back equal, the published reader draws the same from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafter import MIXED, SECOND, noisy_drafter, tiny_config

from trainer.drafter.config import SLIDING, DrafterConfig
from trainer.drafter.decoding import DraftSession
from trainer.drafter.format import CONFIG_FILE, WEIGHTS_FILE, Form, load, save
from trainer.drafter.model import Drafter
from trainer.errors import CheckpointError
from trainer.speculate import Limits, decode_speculatively

pytestmark = pytest.mark.torch

KINDS = [
    pytest.param({}, id="full"),
    pytest.param({"layer_types": MIXED, "sliding_window": 3}, id="mixed"),
    pytest.param({"layer_types": (SLIDING, SLIDING), "sliding_window": 5}, id="sliding"),
    pytest.param({"dflash2": SECOND}, id="dflash2"),
    pytest.param({"input_embedding_scale": 5.5, "final_logit_softcapping": 30.0}, id="gemma"),
]


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
@pytest.mark.parametrize("changes", KINDS)
def test_what_is_saved_comes_back(tmp_path: Path, changes: dict[str, Any], form: Form) -> None:
    config = tiny_config(**changes)
    drafter = noisy_drafter(config)
    save(tmp_path, config, drafter.state_dict(), form=form, dtype=torch.float32)
    again, state = load(tmp_path)
    assert again == config
    assert state.keys() == drafter.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in drafter.state_dict().items())


# -- the published reader -------------------------------------------------------------------------


def reader(folder: Path, second: bool) -> Any:
    import dflash

    kind = dflash.DFlash2DraftModel if second else dflash.DFlashDraftModel
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("changes", KINDS)
def test_published_reader_has_our_hidden_states(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    drafter = noisy_drafter(config)
    save(tmp_path, config, drafter.state_dict(), dtype=torch.float32)
    theirs = reader(tmp_path, second=config.dflash2 is not None)
    embedding, features = torch.randn(40, 32), torch.randn(1, 11, 64)
    session = DraftSession(drafter, embedding, embedding)
    session.extend(features)
    slots = drafter.embed(drafter.slot_tokens(torch.tensor([7])), embedding)
    with torch.no_grad():
        hidden = theirs(
            position_ids=torch.arange(15)[None], noise_embedding=slots, target_hidden=features
        )
        head = torch.nn.Linear(32, 40, bias=False)
        head.weight.copy_(embedding)
        logits = theirs.compute_logits(hidden, head)
    torch.testing.assert_close(hidden, session.hidden(7, 4), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, drafter.logits(hidden, embedding), rtol=1e-4, atol=1e-4)


def tiny_target() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=40,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.mark.parametrize(
    "second",
    [pytest.param(False, id="dflash", marks=pytest.mark.slow), pytest.param(True, id="dflash2")],
)
def test_reader_generates_the_targets_greedy_text_with_our_own_drafts(
    tmp_path: Path, second: bool
) -> None:
    """Lossless, and block by block as many tokens accepted as our evaluation counts."""
    target = tiny_target()
    config = DrafterConfig.for_target(
        target.config,
        mask_token_id=39,
        num_layers=2,
        block_size=4,
        dflash2=SECOND if second else None,
    )
    drafter = noisy_drafter(config)
    save(tmp_path, config, drafter.state_dict(), dtype=torch.float32)
    theirs = reader(tmp_path, second)
    appended: list[int] = []
    theirs.register_forward_pre_hook(
        lambda module, args, kwargs: appended.append(kwargs["target_hidden"].shape[1]),
        with_kwargs=True,
    )
    prompt = torch.randint(0, 39, (1, 9), generator=torch.Generator().manual_seed(2))
    # Without stop tokens: a random target has none to give.
    text = theirs.spec_generate(target, prompt, 60, stop_token_ids=None)
    greedy = target.generate(prompt, max_new_tokens=60, do_sample=False, eos_token_id=None)
    assert text.tolist() == greedy.tolist()
    head = target.lm_head.weight.detach()
    session = DraftSession(drafter, target.get_input_embeddings().weight.detach(), head)
    ours = decode_speculatively(target, session, prompt[0].tolist(), Limits(60, frozenset()))
    assert ours.tokens == greedy[0, 9:].tolist()
    # What each pass appends to the reader's context is what the pass before yielded.
    assert appended[0] == 9 and appended[1:] == ours.yields[: len(appended) - 1]
    assert sum(ours.yields) == 59
    assert max(ours.yields) > 1, "no draft was ever right: the case shows nothing"


# -- what readers must be told --------------------------------------------------------------------


def described(tmp_path: Path, form: Form, **changes: Any) -> dict[str, Any]:
    config = tiny_config(**changes)
    save(tmp_path, config, Drafter(config).state_dict(), form=form)
    found: dict[str, Any] = json.loads((tmp_path / CONFIG_FILE).read_text())
    return found


def test_fault_9_every_layout_flag_is_written(tmp_path: Path) -> None:
    full = described(tmp_path / "full", "z-lab")
    assert full["is_causal"] is False
    assert full["use_sliding_window"] is False and full["sliding_window"] is None
    window = {"sliding_window": 5, "layer_types": (SLIDING, SLIDING)}
    sliding = described(tmp_path / "sliding", "z-lab", **window)
    assert sliding["is_causal"] is True
    assert sliding["use_sliding_window"] is True and sliding["sliding_window"] == 5
    mixed = described(tmp_path / "mixed", "z-lab", sliding_window=5, layer_types=MIXED)
    assert "is_causal" not in mixed, "the flag outranks the layer types and would be wrong for one"
    other = described(tmp_path / "other", "speculators", **window)
    assert other["sliding_window_non_causal"] is False
    assert other["sample_from_anchor"] is False


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
def test_fault_4_the_rope_base_is_written_where_old_and_new_readers_look(
    tmp_path: Path, form: Form
) -> None:
    found = described(tmp_path, form)
    body = found.get("transformer_layer_config", found)
    assert body["rope_theta"] == 500_000.0
    assert body["rope_parameters"]["rope_theta"] == 500_000.0
    assert body["rope_parameters"]["partial_rotary_factor"] == 1.0


def test_fault_12_taps_are_counted_as_each_form_counts_them(tmp_path: Path) -> None:
    """z-lab: the layer whose output it is. speculators: one more, the embedding being 0."""
    z_lab = described(tmp_path / "a", "z-lab")
    assert z_lab["dflash_config"]["target_layer_ids"] == [1, 3]
    assert described(tmp_path / "b", "speculators")["aux_hidden_state_layer_ids"] == [2, 4]


def test_an_export_is_bf16_unless_asked_otherwise(tmp_path: Path) -> None:
    config = tiny_config()
    save(tmp_path, config, Drafter(config).state_dict())
    assert {t.dtype for t in load(tmp_path)[1].values()} == {torch.bfloat16}


# -- damaged and foreign folders ------------------------------------------------------------------


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[: len(data) // 2])


def empty_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(b"")


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()


def no_config(folder: Path) -> None:
    (folder / CONFIG_FILE).unlink()


def broken_config(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text('{"architectures": [')


def change(**fields: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        found = json.loads((folder / CONFIG_FILE).read_text())
        changed = {k: v for k, v in (found | fields).items() if v is not ...}
        (folder / CONFIG_FILE).write_text(json.dumps(changed))

    edit.__name__ = f"change {fields}"
    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "cannot be read as safetensors"),
        (empty_weights, "cannot be read as safetensors"),
        (no_weights, "does not exist"),
        (no_config, "does not exist"),
        (broken_config, "is not JSON"),
        (change(dflash_config=...), "lacks 'dflash_config'"),
        (change(head_dim=...), "lacks 'head_dim'"),
        (change(vocab_size=20), "mask_token_id 39 is outside the vocabulary of 20"),
        (change(num_hidden_layers="two"), "num_layers"),
        (
            change(intermediate_size=64),
            r"gate_proj.weight has shape \(48, 32\), the config implies \(64, 32\)",
        ),
        (change(head_dim=16), r"q_proj.weight has shape \(32, 32\), the config implies \(64, 32\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_or_foreign_folder_gives_one_message(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    config = tiny_config()
    save(tmp_path, config, Drafter(config).state_dict())
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert caught.value.next_step
    assert "\n" not in caught.value.what
