"""The selector's candidates: the largest logits of a vocabulary, found without sorting it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.drafter.dflash2 import GROUP, best_tokens


@given(
    vocabulary=st.integers(5, 40 * GROUP),
    top_k=st.integers(2, 5),
    levels=st.integers(2, 1000),
    seed=st.integers(0, 2**31),
)
def test_they_are_those_of_topk_whatever_the_vocabulary_and_however_many_are_equal(
    vocabulary: int, top_k: int, levels: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (2, 3, vocabulary), generator=generator).bfloat16()
    found = best_tokens(logits, top_k)
    assert torch.equal(
        found.logits.sort(-1, descending=True).values, logits.topk(top_k, dim=-1).values
    )
    assert torch.equal(logits.gather(-1, found.tokens), found.logits)
    assert all(len(set(row)) == top_k for row in found.tokens.flatten(0, 1).tolist())


def test_the_vocabularys_last_tokens_that_fill_no_group_are_found_too() -> None:
    logits = torch.zeros(1, 20 * GROUP + 3)
    logits[0, -1] = 2.0
    logits[0, 0] = 1.0
    assert best_tokens(logits, 2).tokens.tolist() == [[20 * GROUP + 2, 0]]
