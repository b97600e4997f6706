"""Decoding one sequence with key-value caches: plainly, and speculatively with a drafter.

A pass of the target verifies a block: the anchor (known, not yet in the cache) and the drafts after
it. With n drafts accepted the pass yields n + 1 tokens, the last of them the target's own; it is
the next anchor. τ is the mean yield of a pass; the prompt's own pass is not counted.

Greedy output equals the target's greedy decoding by construction, up to rounding: a pass over a
block and a pass over one token multiply matrices of different shapes. Sampled output has exactly
the target's distribution (rejection sampling: a draft x is accepted with min(1, p(x)/q(x)), and the
first refused slot is redrawn from max(0, p - q), normalized).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from trainer.drafter.decoding import DraftSession, Proposal
from trainer.target import cache_argument


@dataclass
class Decoded:
    """One continuation. ``seconds`` counts from the first token, the prompt's pass left out."""

    tokens: list[int]
    seconds: float
    yields: list[int] = field(default_factory=list)
    """Tokens of each pass, cut at the end of the sequence."""
    accepted: list[int] = field(default_factory=list)
    """Accepted drafts of each pass, cut likewise."""
    offered: list[int] = field(default_factory=list)
    """Drafts that each pass judged; those behind the end of the sequence were not."""


@dataclass(frozen=True)
class Limits:
    max_new_tokens: int
    stop: frozenset[int]
    temperature: float = 0.0


class CachedTarget:
    """The target with its cache, for one sequence."""

    def __init__(self, model: Any, layer_ids: tuple[int, ...] | None = None) -> None:
        """``layer_ids``: also return features of these layers."""
        self.model = model
        self.layer_ids = layer_ids
        self.cache = DynamicCache(config=model.config)
        if hasattr(self.cache, "activate_past_recording"):
            # Sliding-window layers must be able to take back refused tokens.
            self.cache.activate_past_recording()
        self.cache_name = cache_argument(model)
        self.length = 0

    def forward(self, tokens: list[int], keep_logits: int) -> tuple[Tensor, Tensor | None]:
        """Append ``tokens``: logits [keep, V] after the last ones, features [1, T, K·H]."""
        device = self.model.device
        position = torch.arange(self.length, self.length + len(tokens), device=device)[None]
        out = self.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=position,
            use_cache=True,
            logits_to_keep=keep_logits,
            output_hidden_states=self.layer_ids is not None,
            **{self.cache_name: self.cache},
        )
        self.length += len(tokens)
        features = None
        if self.layer_ids is not None:
            features = torch.cat([out.hidden_states[i + 1] for i in self.layer_ids], dim=-1)
        return out.logits[0], features

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if self.length > length:
            self.cache.crop(length - self.length)
            self.length = length


@torch.inference_mode()
def decode_plainly(
    model: Any, prompt: list[int], limits: Limits, generator: torch.Generator | None = None
) -> Decoded:
    """The target alone, one token a pass."""
    target = CachedTarget(model)
    logits, _ = target.forward(prompt, 1)
    made = [_pick(logits[-1], limits.temperature, generator)]
    began = _clock(model)
    while len(made) < limits.max_new_tokens and made[-1] not in limits.stop:
        logits, _ = target.forward(made[-1:], 1)
        made.append(_pick(logits[-1], limits.temperature, generator))
    return Decoded(made, _clock(model) - began)


@torch.inference_mode()
def decode_speculatively(
    model: Any,
    session: DraftSession,
    prompt: list[int],
    limits: Limits,
    generator: torch.Generator | None = None,
) -> Decoded:
    """The target and a drafter. ``session`` is fresh."""
    config = session.drafter.config
    dtype = next(session.drafter.parameters()).dtype
    target = CachedTarget(model, config.target_layer_ids)
    logits, features = target.forward(prompt, 1)
    assert features is not None
    session.extend(features.to(dtype))
    result = Decoded([_pick(logits[-1], limits.temperature, generator)], 0.0)
    made = result.tokens
    began = _clock(model)
    while len(made) < limits.max_new_tokens and made[-1] not in limits.stop:
        left = limits.max_new_tokens - len(made)
        slots = min(config.block_size, left + 1)
        before = target.length
        proposal = session.propose(
            made[-1], slots, temperature=limits.temperature, generator=generator
        )
        drafts: list[int] = proposal.tokens.tolist()
        logits, features = target.forward([made[-1], *drafts], len(drafts) + 1)
        accepted, own = verify(logits, drafts, proposal, limits.temperature, generator)
        fresh = _cut([*drafts[:accepted], own], limits, left)
        made += fresh
        result.yields.append(len(fresh))
        result.accepted.append(min(accepted, len(fresh)))
        result.offered.append(len(drafts) if accepted < len(fresh) else len(fresh))
        # The anchor and the accepted drafts stay; the target's own token is the next anchor.
        target.crop(before + len(fresh))
        assert features is not None
        session.extend(features[:, : len(fresh)].to(dtype))
    result.seconds = _clock(model) - began
    return result


def verify(
    logits: Tensor,
    drafts: list[int],
    proposal: Proposal,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[int, int]:
    """(drafts accepted, the token after them). ``logits`` [T + 1, V] follow anchor and drafts."""
    if temperature <= 0:
        best: list[int] = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == best[accepted]:
            accepted += 1
        return accepted, best[accepted]
    p = (logits.float() / temperature).softmax(-1)
    q = proposal.probability
    for slot, draft in enumerate(drafts):
        assert q is not None
        draw = torch.rand((), generator=generator, device=p.device)
        if draw * q[slot, draft] < p[slot, draft]:
            continue
        rest = (p[slot] - q[slot]).clamp(min=0)
        rest = rest if float(rest.sum()) > 0 else p[slot]
        return slot, int(torch.multinomial(rest, 1, generator=generator))
    return len(drafts), int(torch.multinomial(p[-1], 1, generator=generator))


def _cut(tokens: list[int], limits: Limits, left: int) -> list[int]:
    """Up to the first stop token and the limit, both included."""
    for index, token in enumerate(tokens[:left]):
        if token in limits.stop:
            return tokens[: index + 1]
    return tokens[:left]


def _pick(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    return int(
        torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)
    )


def _clock(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
