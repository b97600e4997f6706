"""What a drafter learns: anchors, labels, weights, and the loss with its measures.

A block starts at an anchor, whose token is known. Slot k (1..B-1) predicts the token at anchor+k;
slot 0 is the anchor itself and predicts nothing. A slot counts if its token is supervised, in the
anchor's document, and no slot before it failed to (a gap ends the block).

    loss = Σ w_k · cross-entropy        a *sum*: the optimizer divides by the global Σ w
    decay:  w_k = exp(-(k-1)/γ)         γ = 7, 5, 4 for blocks of 16, 10, 8
    D-PACE: w_j = Σ_{m≥j} Π_{i≤m} q̃_i   q̃ = (1-α)·q + α, q the drafter's probability of the label,
                                         detached; the sum runs over counted slots

Everything here is a pure function of tensors. b = rows, S = context length, N = blocks a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F

from trainer.data.batch import Batch
from trainer.drafter.config import DrafterConfig
from trainer.drafter.dflash2 import Candidates, CandidateSelector, best_tokens
from trainer.drafter.mask import Masks
from trainer.drafter.model import Drafter
from trainer.head_loss import HeadLoss, reference_head_loss

PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


class ObjectiveConfig(BaseModel):
    """The loss and where its labels come from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["decay", "dpace"] = "decay"
    """How slots are weighed: ``decay`` by their distance from the anchor (published), ``dpace`` by
    how likely the drafter gets that far."""
    gamma: float | None = Field(None, gt=0)
    """Decay length in slots; null takes the published one for the block size (7 / 5 / 4 for
    16 / 10 / 8, and 7/16 of any other)."""
    dpace_alpha: float = Field(0.5, ge=0, le=1)
    """Floor of the probability in D-PACE's weights, so that a slot after a hard one still counts;
    0.5 as published."""
    labels: Literal["data", "target"] = "data"
    """``data``: the sample's own tokens. ``target``: the target's argmax at the position before."""
    selector_weight: float = Field(1.0, ge=0)
    """Of the candidate selector's cross-entropy beside the head's (DFlash2 only)."""

    def gamma_for(self, block_size: int) -> float:
        if self.gamma is not None:
            return self.gamma
        return PUBLISHED_GAMMA.get(block_size, 7.0 * block_size / 16)


# -- anchors: on the CPU, before anything is packed -----------------------------------------------


def anchor_candidates(supervised: np.ndarray) -> np.ndarray:
    """Positions of a document (bool [L]) that may start a block: supervised, and the next one too.

    The last B-1 tokens are no exception: a block there is short, and so is the last block of every
    generation.
    """
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def sample_anchors(
    supervised: np.ndarray, count: int, *, seed: int, epoch: int, sample_id: int
) -> np.ndarray:
    """At most ``count`` anchors of one document, i64, sorted, without replacement.

    A pure function of its arguments: a resumed run needs no generator state, and a validation
    sample has the same anchors in every evaluation.
    """
    candidates = anchor_candidates(supervised)
    if count >= candidates.size:
        return candidates
    generator = np.random.Generator(np.random.Philox(key=(seed, (epoch << 40) ^ sample_id)))
    return np.sort(generator.choice(candidates, size=count, replace=False))


def share_anchors(candidates: Sequence[int], blocks: int) -> list[int]:
    """How many of a row's ``blocks`` each of its documents gets, given their candidates.

    Equal shares first, what a short document cannot use goes to the others; earlier documents get
    the remainder. No document starves because a long one shares its row.
    """
    shares = [0] * len(candidates)
    left = blocks
    while left > 0:
        open_ = [i for i, limit in enumerate(candidates) if shares[i] < limit]
        if not open_:
            break
        each = max(1, left // len(open_))
        for i in open_[: left if each == 1 else None]:
            taken = min(each, candidates[i] - shares[i], left)
            shares[i] += taken
            left -= taken
    return shares


# -- labels and weights ---------------------------------------------------------------------------


def slot_places(batch: Batch, block_size: int) -> Tensor:
    """Row position of slots 1..B-1 of every block, i64 [b, N, B-1]; may lie beyond the row."""
    offset = torch.arange(1, block_size, device=batch.anchors.device)
    return batch.anchors[..., None] + offset


def slot_labels(batch: Batch, block_size: int, labels: Tensor | None = None) -> Tensor:
    """The token slots 1..B-1 should predict, i64 [b, N, B-1]; anything where they do not count.

    ``labels`` i64 [b, S] is the token wanted *at* each position; null takes the batch's own.
    """
    place = slot_places(batch, block_size).clamp(max=batch.length - 1)
    wanted = batch.tokens if labels is None else labels
    return wanted.gather(1, place.flatten(1)).view(place.shape)


def slots_counted(batch: Batch, block_size: int) -> Tensor:
    """Which of slots 1..B-1 count, bool [b, N, B-1]: a prefix of each block."""
    place = slot_places(batch, block_size)
    inside = place < batch.length
    near = place.clamp(max=batch.length - 1).flatten(1)
    document = batch.document.gather(1, near).view(place.shape)
    same = document == batch.document.gather(1, batch.anchors)[..., None]
    asked = batch.supervised.gather(1, near).view(place.shape)
    asked = asked & inside & same & batch.anchor_valid[..., None]
    return asked.long().cumprod(-1).bool()


def rows_to_reckon(counted: Tensor) -> Tensor:
    """Indices into the b·N·(B-1) predicting slots, i64 [R]: on a CPU those that count; on a GPU all
    of them, because finding out would mean waiting for it."""
    if counted.device.type == "cpu":
        return counted.flatten().nonzero()[:, 0]
    return torch.arange(counted.numel(), device=counted.device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To ``device`` without waiting for it: a copy from unpinned memory waits for the queue before
    it, which leaves a GPU without work at the start of every step."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def decay_weights(counted: Tensor, gamma: float) -> Tensor:
    """f32, shape of ``counted`` [..., B-1]: exp(-(k-1)/γ) where counted."""
    slot = torch.arange(counted.shape[-1], device=counted.device, dtype=torch.float32)
    return torch.exp(-slot / gamma) * counted


def dpace_weights(log_probability: Tensor, counted: Tensor, alpha: float) -> Tensor:
    """f32, detached: the expected number of slots from j on that survive, given q̃. [..., B-1]"""
    likely = (1 - alpha) * log_probability.detach().float().exp() + alpha
    survive = torch.where(counted, likely, 1.0).cumprod(-1) * counted
    return survive.flip(-1).cumsum(-1).flip(-1) * counted


def accepted(right: Tensor, counted: Tensor) -> Tensor:
    """i64 [...]: length of each block's right prefix, from bool [..., B-1]."""
    return (right & counted).long().cumprod(-1).sum(-1)


# -- the step -------------------------------------------------------------------------------------


class FrozenTarget(NamedTuple):
    """What drafter and target share; neither is trained."""

    embedding: Tensor
    """[V, H]"""
    head: Tensor
    """[V, H]; the same tensor where the target ties them."""

    def to(self, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
        embedding = self.embedding.to(device, dtype)
        tied = self.head is self.embedding
        return FrozenTarget(embedding, embedding if tied else self.head.to(device, dtype))


class SelectorReport(NamedTuple):
    """DFlash2: sums over counted slots (recalled, right) and blocks (tau); 0-d each."""

    recalled: Tensor
    """Labels among the head's top K."""
    right: Tensor
    """Choices that are the label, given the right predecessor."""
    tau: Tensor
    """Right prefix of the path the selector takes by itself."""


@dataclass(frozen=True)
class StepLoss:
    """One microbatch; sums, so that they add up over microbatches and replicas."""

    loss: Tensor
    """0-d with gradient: Σ w · cross-entropy (plus the selector's)."""
    weight: Tensor
    """0-d: Σ w."""
    tau: Tensor
    """0-d: accepted drafts, summed over blocks."""
    blocks: Tensor
    """0-d: blocks with a counted slot."""
    correct: Tensor
    """[B-1]"""
    count: Tensor
    """[B-1]"""
    selector: SelectorReport | None


Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Masks], Tensor]
"""``Drafter.forward``, compiled or not."""

MakeMasks = Callable[[Tensor, Tensor, Tensor], Masks]
"""``MaskBuilder``: (anchors, anchor_valid, position)."""


class DrafterLoss:
    """From a batch and its features to a loss. Holds no state of training.

    ``forward`` is the drafter's forward, compiled by the caller if at all; ``head_loss`` is the
    reference (dense fp32 logits) or the fast one of ``trainer.head_loss``.
    """

    def __init__(
        self,
        drafter: Drafter,
        frozen: FrozenTarget,
        objective: ObjectiveConfig,
        make_masks: MakeMasks,
        *,
        forward: Forward | None = None,
        head_loss: HeadLoss = reference_head_loss,
    ) -> None:
        self.drafter = drafter
        self.config: DrafterConfig = drafter.config
        self.frozen = frozen
        self.objective = objective
        self.make_masks = make_masks
        self.forward = forward or drafter
        self.head_loss = head_loss

    def __call__(
        self,
        batch: Batch,
        features: Tensor,
        labels: Tensor | None = None,
        head_loss: HeadLoss | None = None,
    ) -> StepLoss:
        """``features`` [b, S, K·H] and ``labels`` on the drafter's device, ``batch`` anywhere (on
        the CPU, best: the head then meets only the rows that count). ``head_loss``: instead of the
        one for training.

        A batch without a valid anchor gives a zero loss that still reaches every parameter.
        """
        device, size = features.device, self.config.block_size
        counted = slots_counted(batch, size)
        chosen, counted = send(rows_to_reckon(counted), device), send(counted, device)
        batch = batch.to(device, non_blocking=True)
        wanted = slot_labels(batch, size, labels)
        hidden = self.hidden(batch, features)
        head = (head_loss or self.head_loss)(
            hidden.flatten(0, 1),
            self.frozen.head,
            # The anchor's own slot precedes the B-1 predicting ones of each block.
            chosen + chosen // (size - 1) + 1,
            wanted.flatten()[chosen],
            lambda logp: self._weights(logp, chosen, counted),
            self.config.logits_scale,
        )
        best = wanted.new_full((wanted.numel(),), -1).index_copy(0, chosen, head.best)
        right = best.view(wanted.shape) == wanted
        loss, report = head.loss, None
        selector = self.drafter.candidate_selector
        if selector is not None:
            weight = head.weight.new_zeros(wanted.numel()).index_copy(0, chosen, head.weight)
            task = SelectorTask(
                # Contiguous, or each block becomes a product of its own with the head: 15 rows a
                # tile, 19.8 ms of a step of 59.6 (one H200, SmolLM2's shape, 2026-11-30).
                hidden=hidden.unflatten(1, (-1, size))[:, :, 1:].flatten(0, 1).contiguous(),
                anchor=batch.tokens.gather(1, batch.anchors).flatten(),
                labels=wanted.flatten(0, 1),
                counted=counted.flatten(0, 1),
                weight=weight.view(-1, size - 1),
            )
            extra, report = selector_loss(selector, self.drafter, self.frozen.head, task)
            loss = loss + self.objective.selector_weight * extra
        return StepLoss(
            loss=loss,
            weight=head.weight.sum(),
            tau=accepted(right, counted).sum(),
            blocks=counted[..., 0].sum(),
            correct=(right & counted).sum((0, 1)),
            count=counted.sum((0, 1)),
            selector=report,
        )

    def hidden(self, batch: Batch, features: Tensor) -> Tensor:
        """The drafter's output for every slot of the batch, [b, N·B, H]."""
        size = self.config.block_size
        tokens = self.drafter.slot_tokens(batch.tokens.gather(1, batch.anchors))
        embeddings = self.drafter.embed(tokens.flatten(1), self.frozen.embedding)
        place = batch.position.gather(1, batch.anchors)[..., None]
        place = place + torch.arange(size, device=place.device)
        masks = self.make_masks(batch.anchors, batch.anchor_valid, batch.position)
        return self.forward(features, embeddings, batch.position, place.flatten(1), masks)

    def _weights(self, logp: Tensor, chosen: Tensor, counted: Tensor) -> Tensor:
        if self.objective.kind == "decay":
            weights = decay_weights(counted, self.objective.gamma_for(self.config.block_size))
        else:
            full = logp.new_zeros(counted.numel()).index_copy(0, chosen, logp)
            weights = dpace_weights(full.view(counted.shape), counted, self.objective.dpace_alpha)
        return weights.flatten()[chosen]


class SelectorTask(NamedTuple):
    """What the selector learns from, m = b·N blocks of T = B-1 predicting slots."""

    hidden: Tensor
    """[m, T, H]"""
    anchor: Tensor
    """i64 [m]: the token before the first slot."""
    labels: Tensor
    """i64 [m, T]"""
    counted: Tensor
    """bool [m, T]"""
    weight: Tensor
    """f32 [m, T]"""


def selector_loss(
    selector: CandidateSelector, drafter: Drafter, head: Tensor, task: SelectorTask
) -> tuple[Tensor, SelectorReport]:
    """Weighted K-way cross-entropy of the selector, predecessors taken from the labels.

    A label outside the head's top K takes the place of the worst candidate, in the loss only. The
    head's logits carry no gradient here: the head's own loss trains them.
    """
    labels = task.labels[..., None]
    with torch.no_grad():
        found, own = top_candidates(drafter, head, task.hidden, labels, selector.top_k)
    recalled = (found.tokens == labels).any(-1)
    worst = found.logits.argmin(-1, keepdim=True)
    keep = recalled[..., None]
    tokens = torch.where(keep, found.tokens, found.tokens.scatter(-1, worst, labels))
    logits = torch.where(keep, found.logits, found.logits.scatter(-1, worst, own))
    before = torch.cat((task.anchor[:, None], task.labels[:, :-1]), dim=1)
    scores = selector.scores(task.hidden, before, Candidates(logits, tokens))
    place = (tokens == labels).long().argmax(-1)
    entropy = F.cross_entropy(scores.flatten(0, 1), place.flatten(), reduction="none")
    with torch.no_grad():
        # Where the label was put in by hand, the selector could not have chosen it.
        right = recalled & (scores.argmax(-1) == place)
        path = selector.select(task.hidden, task.anchor, found)
        report = SelectorReport(
            recalled=(recalled & task.counted).sum(),
            right=(right & task.counted).sum(),
            tau=accepted(path == task.labels, task.counted).sum(),
        )
    return (entropy * task.weight.flatten()).sum(), report


def top_candidates(
    drafter: Drafter, head: Tensor, hidden: Tensor, labels: Tensor, top_k: int, chunk: int = 256
) -> tuple[Candidates, Tensor]:
    """The head's best ``top_k`` of every slot, and the labels' own logits, without keeping logits.

    ``hidden`` [m, T, H], ``labels`` i64 [m, T, 1]; ``chunk`` blocks at a time.
    """
    logits, tokens, own = [], [], []
    for some, wanted in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        scores = drafter.logits(some, head)
        best = best_tokens(scores, top_k)
        logits.append(best.logits)
        tokens.append(best.tokens)
        own.append(scores.gather(-1, wanted))
    return Candidates(torch.cat(logits), torch.cat(tokens)), torch.cat(own)
