"""Speculative decoding gives the target's own text and counts what it accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_target import VOCABULARY, make_model

from trainer.drafter.config import DrafterConfig
from trainer.drafter.decoding import DraftSession, Proposal
from trainer.drafter.model import Drafter
from trainer.evaluate import Pair, bootstrap, position_acceptance, summarize, table
from trainer.speculate import (
    Decoded,
    Limits,
    decode_plainly,
    decode_speculatively,
    verify,
)

pytestmark = pytest.mark.torch
NEVER: frozenset[int] = frozenset()


def make_session(model: Any, block_size: int = 4, seed: int = 0) -> DraftSession:
    config = DrafterConfig.for_target(
        model.config, mask_token_id=3, num_layers=2, block_size=block_size
    )
    torch.manual_seed(seed)
    drafter = Drafter(config).to(model.dtype)
    embedding = model.get_input_embeddings().weight
    return DraftSession(drafter, embedding, model.get_output_embeddings().weight)


class Oracle(DraftSession):
    """Drafts what it is told: right for ``right`` tokens, then wrong."""

    truth: list[int]
    right: int

    def propose(self, anchor: int, slots: int | None = None, **_: Any) -> Proposal:
        assert slots is not None
        done = self.length - self.prompt
        drafts = self.truth[done + 1 : done + slots]
        drafts += [5] * (slots - 1 - len(drafts))
        wrong = [(token + 1) % VOCABULARY for token in drafts[self.right :]]
        return Proposal(torch.tensor(drafts[: self.right] + wrong), None)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mistral"])
def test_greedy_output_is_the_targets_own(kind: str) -> None:
    model = make_model(kind, dtype=torch.float64)
    prompt = list(range(10, 22))
    limits = Limits(24, NEVER)
    plain = decode_plainly(model, prompt, limits)
    drafted = decode_speculatively(model, make_session(model), prompt, limits)
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) == 24
    assert sum(drafted.yields) == 23


@pytest.mark.parametrize("right", [0, 1, 3])
def test_accepted_drafts_are_counted(right: int) -> None:
    model = make_model("mistral", dtype=torch.float64)
    prompt = list(range(10, 22))
    limits = Limits(25, NEVER)
    session = make_session(model)
    oracle = Oracle(session.drafter, session.embedding, session.head)
    oracle.truth = decode_plainly(model, prompt, limits).tokens
    oracle.right, oracle.prompt = right, len(prompt)
    drafted = decode_speculatively(model, oracle, prompt, limits)
    assert drafted.tokens == oracle.truth
    # The last pass may be cut by the limit; all others accept exactly what was right.
    assert set(drafted.yields[:-1]) == {right + 1}
    assert set(drafted.accepted[:-1]) == {right}


def test_decoding_ends_behind_a_stop_token_inside_a_block() -> None:
    model = make_model("llama", dtype=torch.float64)
    prompt = list(range(10, 22))
    free = decode_plainly(model, prompt, Limits(20, NEVER)).tokens
    stop = frozenset({free[9]})
    end = free.index(free[9]) + 1
    session = make_session(model)
    oracle = Oracle(session.drafter, session.embedding, session.head)
    oracle.truth, oracle.right, oracle.prompt = free, 3, len(prompt)
    assert decode_plainly(model, prompt, Limits(20, stop)).tokens == free[:end]
    drafted = decode_speculatively(model, oracle, prompt, Limits(20, stop))
    assert drafted.tokens == free[:end]
    # What the block offered behind the end was neither accepted nor refused.
    assert drafted.offered == drafted.accepted


def test_rejection_sampling_has_the_targets_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, generator=generator) * 1.5
    p = logits.softmax(-1)
    q = (torch.randn(1, 6, generator=generator) * 1.5).softmax(-1)
    first = np.zeros(6)
    rounds = 4_000
    for _ in range(rounds):
        draft = int(torch.multinomial(q[0], 1, generator=generator))
        proposal = Proposal(torch.tensor([draft]), q)
        accepted, own = verify(logits, [draft], proposal, 1.0, generator)
        first[draft if accepted else own] += 1
    expected = p[0].numpy() * rounds
    chi_square = ((first - expected) ** 2 / expected).sum()
    # 5 degrees of freedom: beyond 20.5 once in a thousand; the seed is fixed.
    assert chi_square < 20.5
    # And a sampler that ignored the drafts' own distribution would be far away.
    assert (((q[0].numpy() - p[0].numpy()) ** 2 / p[0].numpy()).sum() * rounds) > 200


def test_sampled_decoding_runs_with_a_real_drafter_and_repeats_with_its_seed() -> None:
    model = make_model("llama")
    runs = [
        decode_speculatively(
            model,
            make_session(model),
            [10, 11, 12],
            Limits(12, NEVER, temperature=1.0),
            torch.Generator().manual_seed(4),
        ).tokens
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 12


def test_position_acceptance_counts_only_offered_slots() -> None:
    assert position_acceptance([3, 1, 0, 1], [3, 3, 3, 1], 4) == [0.75, 0.3333, 0.3333]


def test_the_interval_holds_the_mean_and_narrows_with_prompts() -> None:
    generator = np.random.default_rng(0)
    passes = generator.integers(20, 40, 200).astype(float)
    tokens = np.round(passes * generator.normal(1.5, 0.2, 200))
    few, many = bootstrap(tokens[:10], passes[:10], 0), bootstrap(tokens, passes, 0)
    assert many[0] < tokens.sum() / passes.sum() < many[1]
    assert many[1] - many[0] < (few[1] - few[0]) / 2
    assert bootstrap(tokens, passes, 0) == many


def test_a_summary_is_what_its_passes_say() -> None:
    drafted = Decoded([9] * 7, 2.0, yields=[1, 3, 2], accepted=[0, 2, 1], offered=[3, 3, 3])
    pair = Pair(Decoded([9] * 7, 3.0), drafted)
    summary = summarize([pair, pair], 4, Limits(7, NEVER), 0)
    assert summary["tau"] == 2.0
    assert summary["tokens"] == 12
    assert summary["speed_up"] == 1.5
    assert summary["identical"] == 2
    assert summary["accepted_histogram"] == {"0": 2, "1": 2, "2": 2}
    assert "tau                   2.000" in table(summary)


def test_a_target_that_ends_every_text_at_once_is_summed_up_too() -> None:
    at_once = Pair(Decoded([9], 0.1), Decoded([9], 0.1))
    summary = summarize([at_once], 4, Limits(7, NEVER), 0)
    assert (summary["tau"], summary["speed_up"]) == (0.0, None)
    assert "times" not in table(summary)
