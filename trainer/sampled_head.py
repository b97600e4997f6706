"""Cross-entropy over a sample of the vocabulary: for small drafters on a CPU.

At 135 M parameters the output head (49,152 × 576) is 80 % of a drafter's step. Here the softmax
runs over C candidates: every token that the training data can ask for, exactly, and a fresh random
sample of all others, whose logits are raised by log(others / sampled) so that the sum they stand
for is estimated without bias. Tokens that are never an answer are thus still pushed down, and
decoding may use the whole head.

The reported accuracy is slightly kind: a token outside the candidates cannot win. Evaluation by
decoding is not.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.head_loss import HeadResult, LogitsScale, WeightOf


class SampledHeadLoss:
    """A ``HeadLoss`` over ``answers`` (i64 [A], sorted, unique) and ``others`` further tokens."""

    def __init__(self, answers: Tensor, others: int, vocabulary: int) -> None:
        self.answers = answers
        rest = torch.ones(vocabulary, dtype=torch.bool)
        rest[answers.cpu()] = False
        self.rest = rest.nonzero()[:, 0]
        self.others = min(others, self.rest.numel())
        self.place = torch.zeros(vocabulary, dtype=torch.long, device=answers.device)
        self.place[answers] = torch.arange(answers.numel(), device=answers.device)

    def __call__(
        self,
        hidden: Tensor,
        head: Tensor,
        rows: Tensor,
        labels: Tensor,
        weight_of: WeightOf,
        logits_scale: LogitsScale,
    ) -> HeadResult:
        scale, cap = logits_scale
        sampled = self._sample(labels).to(hidden.device)
        candidates = torch.cat((self.answers, sampled))
        logits = F.linear(hidden.index_select(0, rows), head[candidates]).float() * scale
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        best = candidates[logits.detach().argmax(-1)]
        if self.others:
            raised = torch.zeros(candidates.numel(), device=hidden.device)
            raised[self.answers.numel() :] = math.log(self.rest.numel() / self.others)
            logits = logits + raised
        logp = logits.log_softmax(-1).gather(-1, self.place[labels][:, None])[:, 0]
        weight = weight_of(logp.detach())
        return HeadResult(-(logp * weight).sum(), weight, best)

    def _sample(self, labels: Tensor) -> Tensor:
        """A function of the labels, so that a resumed run draws the same."""
        key = int((labels * torch.arange(1, labels.numel() + 1, device=labels.device)).sum())
        generator = np.random.Generator(np.random.Philox(key=abs(key)))
        chosen = generator.choice(self.rest.numel(), size=self.others, replace=False)
        return self.rest[torch.from_numpy(chosen)]
