"""Greedy speculative decoding of a text that is known already: every block of it at once.

The text is the target's own greedy answer. Speculative decoding reproduces it, whatever is drafted,
so what each pass would accept can be read off: draft at every position of the answer in one forward
pass, count how far each draft is right, and walk from the first position by what was accepted. The
passes are those that ``trainer.speculate`` makes one after the other (``test_walk.py``), up to
rounding and to the last block, which is shorter there; some hundred times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.data.batch import Batch
from trainer.drafter.dflash2 import Candidates
from trainer.drafter.mask import masks_for
from trainer.drafter.model import Drafter
from trainer.objective import DrafterLoss, FrozenTarget, ObjectiveConfig, accepted
from trainer.taps import TappedTarget


@torch.no_grad()
def yields(
    drafter: Drafter,
    frozen: FrozenTarget,
    target: TappedTarget,
    prompt: Sequence[int],
    answer: Sequence[int],
) -> list[int]:
    """Tokens of each pass. The first token of ``answer`` is the prompt's own pass, not counted."""
    tokens = torch.tensor([[*prompt, *answer]], device=target.device)
    length = tokens.shape[1]
    if len(answer) < 2:
        return []
    position = torch.arange(length, device=target.device)[None]
    features = target.tap(tokens, position).to(frozen.embedding.dtype)
    right = lengths(drafter, frozen, tokens, features, len(prompt))
    found, place = [], len(prompt)
    while place < length - 1:
        # The target's own token follows what was accepted, unless the text ends before.
        step = min(int(right[place - len(prompt)]) + 1, length - 1 - place)
        found.append(step)
        place += step
    return found


def lengths(
    drafter: Drafter, frozen: FrozenTarget, tokens: Tensor, features: Tensor, first: int
) -> Tensor:
    """i64 [L - 1 - first]: right drafts of the block that starts at each position from ``first``
    on. ``tokens`` [1, L], ``features`` [1, L, K·H]."""
    config, device = drafter.config, tokens.device
    length = tokens.shape[1]
    anchors = torch.arange(first, length - 1, device=device)[None]
    batch = Batch(
        tokens=tokens,
        document=torch.zeros_like(tokens, dtype=torch.int32),
        position=torch.arange(length, device=device)[None],
        supervised=torch.ones_like(tokens, dtype=torch.bool),
        anchors=anchors,
        anchor_valid=torch.ones_like(anchors, dtype=torch.bool),
        sample_ids=((0,),),
    )
    loss = DrafterLoss(drafter, frozen, ObjectiveConfig(), masks_for(config, device, None))
    hidden = loss.hidden(batch, features).unflatten(1, (-1, config.block_size))[0, :, 1:]
    drafts = proposals(drafter, frozen, hidden, tokens[0, anchors[0]])
    place = anchors[0, :, None] + torch.arange(1, config.block_size, device=device)
    inside = place < length
    wanted = tokens[0, place.clamp(max=length - 1)]
    return accepted(drafts == wanted, inside)


def proposals(drafter: Drafter, frozen: FrozenTarget, hidden: Tensor, anchor: Tensor) -> Tensor:
    """Greedy drafts, i64 [N, B-1], of ``hidden`` [N, B-1, H] after ``anchor`` [N]."""
    parts = []
    for some, before in zip(hidden.split(256), anchor.split(256), strict=True):
        logits = drafter.logits(some, frozen.head)
        selector = drafter.candidate_selector
        if selector is None:
            parts.append(logits.argmax(-1))
            continue
        best = logits.topk(selector.top_k, dim=-1)
        parts.append(selector.select(some, before, Candidates(best.values, best.indices)))
    return torch.cat(parts)
