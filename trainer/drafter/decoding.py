"""Drafting with a cache: what evaluation and a server do between two passes of the target.

    session.extend(features of the tokens the target has accepted)
    session.propose(anchor)   →  B-1 tokens after the anchor, whose own features do not exist yet

The cache holds keys and values of accepted context only; the block's own are never kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.drafter.config import SLIDING
from trainer.drafter.dflash2 import Candidates, CandidateSelector
from trainer.drafter.mask import Masks, decoding_mask
from trainer.drafter.model import Drafter, KeyValue


class Proposal(NamedTuple):
    tokens: Tensor
    """i64 [T]"""
    probability: Tensor | None
    """f32 [T, V]: what each token was drawn from; null when greedy."""


class DraftSession:
    """One sequence. Not for training: runs without gradients."""

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor) -> None:
        """``embedding`` and ``head`` [V, H] are the target's."""
        self.drafter = drafter
        self.embedding = embedding
        self.head = head
        self.cache: list[KeyValue] | None = None
        self.length = 0

    @torch.no_grad()
    def extend(self, features: Tensor) -> None:
        """Append the features [1, T, K·H] of T accepted tokens, in order."""
        position = torch.arange(self.length, self.length + features.shape[1])
        fresh = self.drafter.context(features, position.to(features.device)[None])
        old = self.cache
        self.cache = (
            fresh if old is None else [a.followed_by(b) for a, b in zip(old, fresh, strict=True)]
        )
        self.length += features.shape[1]

    @torch.no_grad()
    def hidden(self, anchor: int, slots: int) -> Tensor:
        """[1, slots, H] for the block that starts with the token ``anchor`` at ``self.length``."""
        assert self.cache is not None, "extend first"
        config, device = self.drafter.config, self.embedding.device
        tokens = self.drafter.slot_tokens(torch.tensor([anchor], device=device))[:, :slots]
        place = torch.arange(self.length, self.length + slots, device=device)[None]
        sliding = None
        if SLIDING in config.layer_types:
            sliding = decoding_mask(self.length, slots, config.sliding_window, device)
        embedded = self.drafter.embed(tokens, self.embedding)
        return self.drafter.decode(self.cache, embedded, place, Masks(full=None, sliding=sliding))

    @torch.no_grad()
    def propose(
        self,
        anchor: int,
        slots: int | None = None,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """The ``slots - 1`` tokens (default: a whole block) that the drafter puts after ``anchor``.

        Greedy at temperature 0; otherwise drawn, with the distributions they were drawn from.
        """
        size = self.drafter.config.block_size if slots is None else slots
        hidden = self.hidden(anchor, size)[:, 1:]
        logits = self.drafter.logits(hidden, self.head)
        selector = self.drafter.candidate_selector
        if selector is not None:
            return self._selected(selector, hidden, anchor, logits, temperature, generator)
        if temperature <= 0:
            return Proposal(logits[0].argmax(-1), None)
        probability = (logits[0].float() / temperature).softmax(-1)
        return Proposal(torch.multinomial(probability, 1, generator=generator)[:, 0], probability)

    def _selected(
        self,
        selector: CandidateSelector,
        hidden: Tensor,
        anchor: int,
        logits: Tensor,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Proposal:
        best = logits.topk(selector.top_k, dim=-1)
        found = Candidates(best.values, best.indices)
        before = torch.tensor([anchor], device=hidden.device)
        if temperature <= 0:
            return Proposal(selector.select(hidden, before, found)[0], None)
        path, rows = [], []
        for slot in range(hidden.shape[1]):
            here = Candidates(found.logits[:, slot], found.tokens[:, slot])
            q = (selector.scores(hidden[:, slot], before, here) / temperature).softmax(-1)
            before = here.tokens.gather(-1, torch.multinomial(q, 1, generator=generator))[:, 0]
            path.append(before[0])
            rows.append(q.new_zeros(logits.shape[-1]).scatter(0, here.tokens[0], q[0]))
        return Proposal(torch.stack(path), torch.stack(rows))
