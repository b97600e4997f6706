"""Anchors, labels, weights and the loss, against values reckoned by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_drafter import SECOND, noisy_drafter, packed_batch, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.data.batch import Batch
from trainer.drafter.mask import MaskBuilder
from trainer.head_loss import ChunkedHeadLoss, torch_softmax_gradient_
from trainer.objective import (
    DrafterLoss,
    FrozenTarget,
    ObjectiveConfig,
    SelectorTask,
    StepLoss,
    accepted,
    anchor_candidates,
    decay_weights,
    dpace_weights,
    sample_anchors,
    selector_loss,
    share_anchors,
    slot_labels,
    slots_counted,
)
from trainer.pipeline.stages import Sums

pytestmark = pytest.mark.torch

FAST = ChunkedHeadLoss(torch_softmax_gradient_, chunk=5)


# -- anchors --------------------------------------------------------------------------------------


def test_an_anchor_and_the_token_after_it_are_supervised() -> None:
    supervised = np.array([0, 1, 1, 0, 1, 0, 1, 1, 1], dtype=bool)
    assert anchor_candidates(supervised).tolist() == [1, 6, 7]


def test_anchors_reach_into_the_last_tokens_of_a_document() -> None:
    """A restriction to S-B would never start a block in the last B-1 tokens."""
    drawn = sample_anchors(np.ones(20, dtype=bool), 100, seed=0, epoch=0, sample_id=0)
    assert drawn.tolist() == list(range(19))


@examples(50)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 20), st.integers(0, 10**9))
def test_anchors_are_distinct_sorted_candidates(marks: list[bool], count: int, sample: int) -> None:
    supervised = np.array(marks, dtype=bool)
    drawn = sample_anchors(supervised, count, seed=1, epoch=2, sample_id=sample)
    candidates = anchor_candidates(supervised).tolist()
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert set(drawn.tolist()) <= set(candidates)
    assert len(drawn) == min(count, len(candidates))


def test_anchors_follow_from_seed_epoch_and_sample_alone() -> None:
    def draw(seed: int, epoch: int, sample: int) -> list[int]:
        supervised = np.ones(500, dtype=bool)
        return sample_anchors(supervised, 8, seed=seed, epoch=epoch, sample_id=sample).tolist()

    np.random.seed(0)
    first = draw(3, 1, 7)
    np.random.seed(99)
    assert draw(3, 1, 7) == first
    others = [draw(4, 1, 7), draw(3, 2, 7), draw(3, 1, 8), draw(3, 0, 7)]
    assert all(other != first for other in others)


@pytest.mark.parametrize(
    ("candidates", "blocks", "shares"),
    [
        ([100, 100], 10, [5, 5]),
        ([2, 100], 10, [2, 8]),
        ([100, 3, 0], 10, [7, 3, 0]),
        ([1, 1], 10, [1, 1]),
        ([9, 9, 9], 7, [3, 2, 2]),
        ([], 4, []),
    ],
)
def test_fault_8_short_documents_of_a_packed_row_get_their_share(
    candidates: list[int], blocks: int, shares: list[int]
) -> None:
    assert share_anchors(candidates, blocks) == shares


# -- labels ---------------------------------------------------------------------------------------


def test_fault_2_slot_k_predicts_the_token_at_anchor_plus_k() -> None:
    batch = packed_batch([12], [2, 7])
    labels = slot_labels(batch, 4)
    tokens = batch.tokens[0].tolist()
    assert labels.tolist() == [[tokens[3:6], tokens[8:11]]]


def test_target_labels_replace_the_tokens_and_nothing_else() -> None:
    batch = packed_batch([12], [2])
    chosen = torch.arange(12)[None] + 20
    assert slot_labels(batch, 4, chosen).tolist() == [[[23, 24, 25]]]


def test_slots_end_with_document_row_gap_and_unused_block() -> None:
    batch = packed_batch([6, 6], [0, 4, 6, 10, -1])
    supervised = batch.supervised.clone()
    supervised[0, 8] = False
    batch = Batch(**(batch.tensors() | {"supervised": supervised}), sample_ids=((0, 1),))
    assert slots_counted(batch, 5).int().tolist() == [
        [
            [1, 1, 1, 1],  # 1..4
            [1, 0, 0, 0],  # 5, then the next document
            [1, 0, 0, 0],  # 7, then a gap at 8 ends the block although 9 and 10 are supervised
            [1, 0, 0, 0],  # 11, then the row ends
            [0, 0, 0, 0],  # unused
        ]
    ]


# -- weights --------------------------------------------------------------------------------------


def test_decay_starts_at_one_and_falls_by_e_in_gamma_slots() -> None:
    counted = torch.tensor([[True, True, True, False]])
    weights = decay_weights(counted, gamma=2.0)[0].tolist()
    assert weights == pytest.approx([1.0, math.exp(-0.5), math.exp(-1.0), 0.0])


@pytest.mark.parametrize(("block", "gamma"), [(16, 7), (10, 5), (8, 4), (32, 14)])
def test_gamma_follows_the_block_size(block: int, gamma: float) -> None:
    assert ObjectiveConfig().gamma_for(block) == gamma
    assert ObjectiveConfig(gamma=3.5).gamma_for(block) == 3.5


def test_dpace_weights_by_hand() -> None:
    """q = .5, .2, 1 and α = .5 give q̃ = .75, .6, 1; prefixes .75, .45, .45; sums from the right."""
    logp = torch.tensor([[0.5, 0.2, 1.0]]).log()
    every = torch.ones(1, 3, dtype=torch.bool)
    assert dpace_weights(logp, every, 0.5)[0].tolist() == pytest.approx([1.65, 0.9, 0.45])
    # The third slot does not count: it neither adds nor multiplies.
    two = torch.tensor([[True, True, False]])
    assert dpace_weights(logp, two, 0.5)[0].tolist() == pytest.approx([1.2, 0.45, 0.0])
    assert not dpace_weights(logp.requires_grad_(), every, 0.5).requires_grad


def test_accepted_multiplies_prefixes() -> None:
    right = torch.tensor([[True, True, False, True], [False, True, True, True], [True] * 4])
    counted = torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]])
    assert accepted(right, counted).tolist() == [2, 0, 2]


# -- the step -------------------------------------------------------------------------------------


def step_loss(
    batch: Batch, fast: bool = False, second: bool = False, **objective: object
) -> tuple[StepLoss, DrafterLoss]:
    config = tiny_config(dflash2=SECOND if second else None)
    drafter = noisy_drafter(config)
    generator = torch.Generator().manual_seed(5)
    frozen = FrozenTarget(
        torch.randn(40, 32, generator=generator), torch.randn(40, 32, generator=generator)
    )
    loss = DrafterLoss(
        drafter,
        frozen,
        ObjectiveConfig.model_validate(objective),
        MaskBuilder(4, full=True, window=None),
        **({"head_loss": FAST} if fast else {}),  # type: ignore[arg-type]
    )
    features = torch.randn(1, batch.length, 64, generator=generator)
    return loss(batch, features), loss


def by_hand(batch: Batch, loss: DrafterLoss, kind: str) -> tuple[float, float, float]:
    """(Σ w·nll, Σ w, accepted drafts) slot by slot."""
    generator = torch.Generator().manual_seed(5)
    torch.randn(40, 32, generator=generator), torch.randn(40, 32, generator=generator)
    features = torch.randn(1, batch.length, 64, generator=generator)
    with torch.no_grad():
        hidden = loss.hidden(batch, features)[0].unflatten(0, (-1, 4))
        logp = (hidden @ loss.frozen.head.T).log_softmax(-1)
    total = weight = good = 0.0
    for block, anchor in enumerate(batch.anchors[0].tolist()):
        if not batch.anchor_valid[0, block]:
            continue
        nll, likely, alive = [], [], True
        for k in range(1, 4):
            place = anchor + k
            if place >= batch.length or batch.document[0, place] != batch.document[0, anchor]:
                break
            label = int(batch.tokens[0, place])
            nll.append(-float(logp[block, k, label]))
            likely.append(math.exp(-nll[-1]))
            alive = alive and int(logp[block, k].argmax()) == label
            good += alive
        survive = np.cumprod([0.5 * q + 0.5 for q in likely])
        for k, value in enumerate(nll):
            w = math.exp(-k / 1.75) if kind == "decay" else float(survive[k:].sum())
            total, weight = total + w * value, weight + w
    return total, weight, good


@pytest.mark.parametrize("fast", [False, True], ids=["reference", "fast"])
@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_loss_and_weight_sum_are_those_reckoned_slot_by_slot(kind: str, fast: bool) -> None:
    batch = packed_batch([9, 8], [1, 4, 7, 9, 13, -1], padding=2)
    got, loss = step_loss(batch, fast, kind=kind)
    total, weight, good = by_hand(batch, loss, kind)
    assert float(got.loss.detach()) == pytest.approx(total, rel=1e-5)
    assert float(got.weight) == pytest.approx(weight, rel=1e-5)
    assert float(got.tau) == good
    assert float(got.blocks) == 5
    assert got.count.tolist() == [5, 4, 4]


@pytest.mark.parametrize("second", [False, True], ids=["dflash", "dflash2"])
@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_fast_gradients_equal_the_reference(kind: str, second: bool) -> None:
    batch = packed_batch([9, 8], [1, 4, 7, 9, 13, -1], padding=2)
    results = []
    for fast in (False, True):
        got, loss = step_loss(batch, fast, second, kind=kind)
        got.loss.backward()
        results.append((got, list(loss.drafter.parameters())))
    (plain, wanted), (quick, found) = results
    assert float(quick.loss.detach()) == pytest.approx(float(plain.loss.detach()), rel=1e-5)
    assert torch.equal(quick.correct, plain.correct)
    for a, b in zip(found, wanted, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fast", [False, True], ids=["reference", "fast"])
@pytest.mark.parametrize("second", [False, True], ids=["dflash", "dflash2"])
def test_fault_7_a_batch_without_anchors_gives_zero_gradients_not_none(
    second: bool, fast: bool
) -> None:
    got, loss = step_loss(packed_batch([9], [-1, -1]), fast, second)
    assert float(got.loss.detach()) == 0.0 and float(got.weight) == 0.0 and float(got.blocks) == 0
    got.loss.backward()
    for name, parameter in loss.drafter.named_parameters():
        assert parameter.grad is not None, name
        assert torch.all(parameter.grad == 0), name


def test_two_microbatches_add_up_to_one() -> None:
    """The divisor is global: sums of losses and weights, not means of means."""
    both, _ = step_loss(packed_batch([9], [1, 3, 7]))
    parts = [step_loss(packed_batch([9], anchors))[0] for anchors in ([1, 7], [3])]
    assert float(sum(p.loss.detach() for p in parts)) == pytest.approx(
        float(both.loss.detach()), rel=1e-5
    )
    assert float(sum(p.weight for p in parts)) == pytest.approx(float(both.weight))


# -- the selector ---------------------------------------------------------------------------------


def test_selector_loss_and_report_are_those_reckoned_slot_by_slot() -> None:
    """Predecessors from the labels; a label outside the head's top K replaces the worst of them."""
    torch.manual_seed(3)
    drafter = noisy_drafter(tiny_config(dflash2=SECOND))
    selector = drafter.candidate_selector
    assert selector is not None
    head = torch.randn(40, 32)
    task = SelectorTask(
        hidden=torch.randn(6, 3, 32),
        anchor=torch.randint(0, 40, (6,)),
        labels=torch.randint(0, 40, (6, 3)),
        counted=torch.tensor([[True, True, False]] * 6),
        weight=torch.rand(6, 3),
    )
    loss, report = selector_loss(selector, drafter, head, task)
    before_book, after_book = (
        book.weight.detach()
        for book in (selector.predecessor_codebook, selector.successor_codebook)
    )
    total, recalled, right, accepted_drafts = 0.0, 0, 0, 0
    for block in range(6):
        chosen, alive = int(task.anchor[block]), True
        for slot in range(3):
            hidden = task.hidden[block, slot]
            logits = (head @ hidden).tolist()
            best = sorted(range(40), key=lambda token: -logits[token])[:5]
            label = int(task.labels[block, slot])
            before = int(task.anchor[block] if slot == 0 else task.labels[block, slot - 1])

            def score(token: int, previous: int, hidden=hidden, logits=logits) -> float:  # type: ignore[no-untyped-def]
                query = before_book[previous] * (
                    selector.hidden_projection.weight.detach() @ hidden
                )
                return float(query @ after_book[token]) + logits[token]

            candidates = best if label in best else [*best[:-1], label]
            scores = torch.tensor([score(token, before) for token in candidates])
            nll = -float(scores.log_softmax(-1)[candidates.index(label)])
            total += float(task.weight[block, slot]) * nll
            counted = bool(task.counted[block, slot])
            recalled += counted and label in best
            right += counted and max(best, key=lambda token: score(token, before)) == label
            chosen = max(best, key=lambda token: score(token, chosen))
            alive = alive and counted and chosen == label
            accepted_drafts += alive
    assert 0 < recalled < 12, "the case must hold labels of both kinds"
    assert float(loss.detach()) == pytest.approx(total, rel=1e-4)
    assert [int(value) for value in report] == [recalled, right, accepted_drafts]


def test_selector_loss_joins_the_heads_and_reaches_the_codebooks() -> None:
    batch = packed_batch([9, 8], [1, 4, 7, 9, 13])
    got, loss = step_loss(batch, second=True)
    alone, _ = step_loss(batch, second=True, selector_weight=0.0)
    assert float(got.loss.detach()) > float(alone.loss.detach())
    got.loss.backward()
    selector = loss.drafter.candidate_selector
    assert selector is not None
    for parameter in selector.parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0


def test_the_selectors_candidates_are_one_product_with_the_head_not_one_a_block() -> None:
    class Products(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.shapes: list[tuple[str, int]] = []

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
                self.shapes.append((op.__name__.split(".")[0], args[1].shape[-1]))
            return op(*args, **(kwargs or {}))

    with Products() as products:
        step_loss(packed_batch([9, 8], [1, 4, 7, 9, 13]), second=True)
    assert products.shapes.count(("mm", 40)) == 2, "the head's own loss, and the candidates"
    assert ("bmm", 40) not in products.shapes


def test_an_untrained_selector_chooses_the_heads_own_best() -> None:
    batch = packed_batch([9, 8], [1, 4, 7, 9, 13])
    _, loss = step_loss(batch, second=True)
    selector = loss.drafter.candidate_selector
    assert selector is not None
    selector.reset_parameters(0.02)
    got = loss(batch, torch.randn(1, 17, 64))
    assert got.selector is not None
    assert int(got.selector.tau) == int(got.tau)
    assert int(got.selector.right) == int(got.correct.sum())


def test_what_chooses_the_best_checkpoint_is_the_path_that_decoding_takes() -> None:
    found = Sums(9.0, 4.0, 3.0, 2.0, 4.0, 3.0, 5.0, correct=[2.0, 1.0, 0.0], count=[2.0, 2.0, 2.0])
    assert (found.mean_tau, found.decoded_tau) == (2.5, 3.5)
    plain = replace(found, recalled=0.0, selected=0.0, selected_tau=0.0)
    assert plain.decoded_tau == plain.mean_tau
