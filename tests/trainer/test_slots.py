"""Decoding in fixed slots is decoding: the same texts as one by one, whoever sits beside."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from tiny_target import make_model

from trainer.data.decode import BatchDecoder, Completion, Request
from trainer.data.slots import SlotDecoder, Waiting, uniform
from trainer.errors import TargetError

pytestmark = pytest.mark.torch

STOP, PAD = {2}, 0
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def requests(count: int, temperature: float = 0.0, top_p: float = 1.0) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for key in range(count):
        length = 1 + key % 7
        tokens = torch.randint(4, 200, (length,), generator=generator).tolist()
        found.append(Request(key, tokens, 3 + key % 11, temperature, top_p, seed=5))
    return found


def decode(decoder: SlotDecoder | BatchDecoder, asked: list[Request]) -> dict[int, Completion]:
    found = [c for c in decoder.run(asked) if c is not None]
    assert len(found) == len(asked)
    return {c.key: c for c in found}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "qwen3"])
def test_greedy_texts_are_those_of_the_batched_decoder(kind: str, device: str) -> None:
    model, asked = make_model(kind).to(device), requests(23)
    wanted = decode(BatchDecoder(model, STOP, PAD, 1), asked)
    found = decode(SlotDecoder(model, STOP, PAD, 5), asked)
    for key, completion in wanted.items():
        assert found[key].tokens == completion.tokens
        assert found[key].ended == completion.ended


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_row_draws_the_same_whoever_sits_beside_it(top_p: float, device: str) -> None:
    model = make_model("llama").to(device)
    asked = requests(12, temperature=1.0, top_p=top_p)
    together = decode(SlotDecoder(model, STOP, PAD, 12), asked)
    others = decode(SlotDecoder(model, STOP, PAD, 3), asked[::-1])
    assert {k: c.tokens for k, c in together.items()} == {k: c.tokens for k, c in others.items()}
    greedy = decode(SlotDecoder(model, STOP, PAD, 12), requests(12))
    assert any(greedy[k].tokens != c.tokens for k, c in together.items())


@pytest.mark.slow
def test_draws_have_the_models_own_frequencies() -> None:
    """Next tokens of one prompt, many times, against its softmax."""
    model = make_model("llama")
    prompt = [5, 9, 17]
    asked = [Request(key, prompt, 1, 1.0, 1.0, seed=1) for key in range(4000)]
    found = decode(SlotDecoder(model, STOP, PAD, 500), asked)
    counts = torch.zeros(model.config.vocab_size)
    for completion in found.values():
        counts[completion.tokens[0]] += 1
    wanted = model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1) * len(asked)
    # Pearson's statistic has a mean of 263 here and a deviation of 23.
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 263 + 5 * 23


def test_hashed_numbers_are_uniform_and_differ_by_key_and_place() -> None:
    key = torch.arange(1000)[:, None].expand(-1, 50)
    place = torch.arange(50).expand(1000, -1)
    drawn = uniform(key, place)
    assert float(drawn.min()) >= 0 and float(drawn.max()) < 1
    assert drawn.unique().numel() > 49_000
    histogram = torch.histc(drawn, 10, 0, 1)
    assert float((histogram - 5000).abs().max()) < 350


def test_a_deadline_hands_out_what_was_begun() -> None:
    model = make_model("llama")
    asked = [Request(key, [5, 6], 200) for key in range(3)]
    decoder = SlotDecoder(model, set(), PAD, 3)
    found = [c for c in decoder.run(asked, time.monotonic() + 0.05) if c is not None]
    assert all(0 < len(c.tokens) < 200 and not c.ended for c in found)


@pytest.mark.parametrize("kind", ["gemma2", "mistral", "mixtral"])
def test_targets_with_other_attention_are_refused(kind: str) -> None:
    with pytest.raises(TargetError, match="fixed_slots cannot decode this target"):
        SlotDecoder(make_model(kind), STOP, PAD, 2)


def test_what_waits_is_handed_out_as_it_came(tmp_path: Path) -> None:
    asked = [*requests(5), *requests(7, temperature=1.0), *requests(4, 1.0, 0.9)]
    waiting = Waiting(iter(asked), tmp_path)
    assert waiting.room == max(len(r.tokens) + r.limit for r in asked)
    assert (waiting.sampling, waiting.nucleus) == (True, True)
    assert [waiting.take() for _ in range(len(waiting))] == asked
    assert len(waiting) == 0
    greedy = Waiting(requests(3, top_p=0.9))
    assert (greedy.sampling, greedy.nucleus) == (False, False)


def test_memory_does_not_grow_with_the_tokens_of_what_waits(tmp_path: Path) -> None:
    def held(length: int) -> int:
        """Bytes, for a thousand prompts."""
        before, _ = tracemalloc.get_traced_memory()
        waiting = Waiting((Request(i, [300 + i] * length, 9) for i in range(1000)), tmp_path)
        held = tracemalloc.get_traced_memory()[0] - before
        assert len(waiting) == 1000
        return held

    tracemalloc.start()
    try:
        held(10)
        grown = held(500) - held(10)
    finally:
        tracemalloc.stop()
    # As lists 490,000 tokens more take 4 MB.
    assert grown < 100_000
