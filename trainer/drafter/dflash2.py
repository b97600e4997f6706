"""What DFlash2 adds to a drafter: a convolution round each sublayer, and a candidate selector.

Shapes: b = rows, n = blocks, B = slots a block, H = width, G = groups of channels, K = candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.drafter.config import DrafterConfig


class GroupedDynamicCausalConv(nn.Module):
    """A short causal convolution whose kernel depends on the slot, before and after a sublayer.

    ``out[i, c] = Σ_t (base[t, c] + δ[i, t, g(c)]) · x[i-t, c]`` over the taps t, inside one block:
    a tap that reaches before the block's first slot is zero. One projection of the sublayer's
    normed input makes δ for both places. It starts as the identity: ``base`` is 1 on the current
    slot and the projection is 0.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.group_size = group_size
        groups = hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * groups, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def prepare(self, hidden: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """``hidden`` [b, n·B, H], the normed input: the sublayer's input, and δ for ``finish``."""
        rows, slots, width = hidden.shape
        groups = width // self.group_size
        delta = self.kernel_projection(hidden).view(rows, slots, 2, self.kernel_size, groups)
        before, after = delta.unbind(2)
        return self._convolve(hidden, before, self.base_kernel[0], block_size), after

    def finish(self, hidden: Tensor, delta: Tensor, block_size: int) -> Tensor:
        """The sublayer's output [b, n·B, H], convolved."""
        return self._convolve(hidden, delta, self.base_kernel[1], block_size)

    def _convolve(self, hidden: Tensor, delta: Tensor, base: Tensor, block_size: int) -> Tensor:
        rows, slots, width = hidden.shape
        blocks = hidden.view(rows, slots // block_size, block_size, -1, self.group_size)
        shifted = delta.view(*blocks.shape[:3], self.kernel_size, -1, 1)
        out = torch.zeros_like(blocks)
        for tap in range(self.kernel_size):
            past = F.pad(blocks, (0, 0, 0, 0, tap, 0))[:, :, :block_size]
            kernel = base[tap].view(-1, self.group_size) + shifted[:, :, :, tap]
            out = out + kernel * past
        return out.view(rows, slots, width)


class Candidates(NamedTuple):
    """The head's best tokens of each slot, any order."""

    logits: Tensor
    """[m, T, K]"""
    tokens: Tensor
    """i64 [m, T, K]"""


class CandidateSelector(nn.Module):
    """Chooses a path through the candidates, left to right.

    ``score(p → c) = ⟨A[p] ⊙ P h, B[c]⟩ + logit[c]`` for the token p chosen at the slot before (the
    anchor before the first) and a candidate c. ``A`` starts at zero, so that an untrained selector
    chooses the head's own best token.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Embedding(vocab_size, rank)
        self.successor_codebook = nn.Embedding(vocab_size, rank)
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def reset_parameters(self, deviation: float) -> None:
        nn.init.zeros_(self.predecessor_codebook.weight)
        nn.init.normal_(self.successor_codebook.weight, std=deviation)
        nn.init.normal_(self.hidden_projection.weight, std=deviation)

    def scores(self, hidden: Tensor, predecessor: Tensor, candidates: Candidates) -> Tensor:
        """f32 [..., K]: ``hidden`` [..., H], ``predecessor`` i64 [...], candidates [..., K]."""
        query = self.predecessor_codebook(predecessor) * self.hidden_projection(hidden)
        edges = self.successor_codebook(candidates.tokens) @ query[..., None]
        return edges[..., 0].float() + candidates.logits.float()

    def select(self, hidden: Tensor, anchor: Tensor, candidates: Candidates) -> Tensor:
        """The greedy path, i64 [m, T]: ``hidden`` [m, T, H], ``anchor`` i64 [m]."""
        path, predecessor = [], anchor
        for slot in range(hidden.shape[1]):
            here = Candidates(candidates.logits[:, slot], candidates.tokens[:, slot])
            best = self.scores(hidden[:, slot], predecessor, here).argmax(-1, keepdim=True)
            predecessor = here.tokens.gather(-1, best)[:, 0]
            path.append(predecessor)
        return torch.stack(path, dim=1)


GROUP = 64


def best_tokens(logits: Tensor, top_k: int) -> Candidates:
    """The ``top_k`` largest of each row of [..., V], in any order; among equals, any.

    The k largest lie in the k groups with the largest maxima: one pass finds those, and k · 64
    values are searched. On a GPU ``topk`` reads all of a vocabulary once for every two bits of its
    values, some ten times. A group's members lie V/64 apart: the largest of 64 neighbours takes
    torch ten times as long as reading them (7.5 ms for 3 GB on an H200, 2026-11-30).
    """
    vocabulary = logits.shape[-1]
    groups = vocabulary // GROUP
    if groups <= 2 * top_k:
        return Candidates(*logits.topk(top_k, dim=-1))
    whole, rest = logits.split((groups * GROUP, vocabulary - groups * GROUP), dim=-1)
    grouped = whole.unflatten(-1, (GROUP, groups))
    chosen = grouped.amax(-2).topk(top_k, dim=-1).indices[..., None, :]
    members = grouped.gather(-1, chosen.expand(*chosen.shape[:-2], GROUP, top_k))
    tokens = chosen + groups * torch.arange(GROUP, device=logits.device)[:, None]
    last = torch.arange(groups * GROUP, vocabulary, device=logits.device).expand(rest.shape)
    best = torch.cat((members.flatten(-2), rest), dim=-1).topk(top_k, dim=-1)
    found = torch.cat((tokens.flatten(-2), last), dim=-1).gather(-1, best.indices)
    return Candidates(best.values, found)


def make_conv(config: DrafterConfig) -> GroupedDynamicCausalConv | None:
    extra = config.dflash2
    if extra is None:
        return None
    return GroupedDynamicCausalConv(
        config.hidden_size, extra.conv_kernel_size, extra.conv_group_size
    )


def make_selector(config: DrafterConfig) -> CandidateSelector | None:
    extra = config.dflash2
    if extra is None:
        return None
    return CandidateSelector(
        config.vocab_size, config.hidden_size, extra.selector_rank, extra.selector_top_k
    )
