"""What a slot sees: the rule, told three ways, and what follows from it."""

from __future__ import annotations

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_drafter import MIXED, SECOND, noisy_drafter, packed_batch, tiny_config
from torch.nn.attention.flex_attention import create_block_mask

from trainer.data.batch import Batch
from trainer.drafter.config import FULL, SLIDING
from trainer.drafter.mask import (
    MaskBuilder,
    Masks,
    block_mask,
    decoding_mask,
    dense,
    tile_lists,
    visible,
)

pytestmark = pytest.mark.torch


def by_the_book(batch: Batch, size: int, window: int | None) -> torch.Tensor:
    """The rule as prose has it, one pair at a time: [1, Q, S+Q]."""
    length, blocks = batch.length, batch.anchors.shape[1]
    seen = torch.zeros(blocks * size, length + blocks * size, dtype=torch.bool)
    document = batch.document[0].tolist()
    for query in range(blocks * size):
        block, offset = divmod(query, size)
        anchor = int(batch.anchors[0, block])
        for key in range(length):
            before = key < anchor and document[key] == document[anchor]
            near = window is None or key >= anchor + offset - (window - 1)
            seen[query, key] = before and near and bool(batch.anchor_valid[0, block])
        for other in range(blocks * size):
            its_block, its_offset = divmod(other, size)
            causal = window is None or 0 <= offset - its_offset < window
            seen[query, length + other] = its_block == block and causal
    return seen[None]


@st.composite
def packings(draw: st.DrawFn) -> tuple[Batch, int, int | None]:
    lengths = draw(st.lists(st.integers(2, 12), min_size=1, max_size=3))
    padding = draw(st.integers(0, 5))
    anchors = sorted(draw(st.sets(st.integers(0, sum(lengths) - 1), min_size=1, max_size=6)))
    unused = [-1] * draw(st.integers(0, 2))
    size = draw(st.integers(2, 5))
    window = draw(st.none() | st.integers(1, 9))
    return packed_batch(lengths, anchors + unused, padding), size, window


@examples(40)
@given(packings())
def test_dense_flex_and_prose_agree(case: tuple[Batch, int, int | None]) -> None:
    batch, size, window = case
    seen = visible(batch.anchors, batch.anchor_valid, batch.position, size, window)
    wanted = by_the_book(batch, size, window)
    reference = dense(seen, batch.length)[:, 0]
    assert torch.equal(reference, wanted)
    # The same through flex_attention's eyes: its mask function at every pair of indices, …
    tile = 8
    mask = block_mask(seen, batch.length, tile_lists(seen, batch.length, tile), tile)
    query, key = torch.meshgrid(*map(torch.arange, wanted.shape[1:]), indexing="ij")
    zero = torch.zeros_like(query)
    assert torch.equal(mask.mask_mod(zero, zero, query, key)[None], wanted)
    # … and its lists of tiles, which must equal those torch derives from that function densely.
    derived = create_block_mask(
        mask.mask_mod, 1, None, *wanted.shape[1:], device="cpu", BLOCK_SIZE=tile
    )
    for part in ("kv", "full_kv", "q", "full_q"):
        counts, lists = f"{part}_num_blocks", f"{part}_indices"
        assert torch.equal(getattr(mask, counts), getattr(derived, counts))
        for n, ours, theirs in zip(
            getattr(mask, counts).flatten().tolist(),
            getattr(mask, lists).flatten(0, -2),
            getattr(derived, lists).flatten(0, -2),
            strict=True,
        ):
            assert ours[:n].tolist() == theirs[:n].tolist()


def test_tile_lists_are_contiguous() -> None:
    """The kernels step through the last axis by one whatever its stride: a transposed list lets the
    backward pass read other tiles, silently."""
    batch = packed_batch([30, 20], [3, 9, 33, 40])
    seen = visible(batch.anchors, batch.anchor_valid, batch.position, 4)
    assert all(t.is_contiguous() and t.dtype == torch.int32 for t in tile_lists(seen, 50, 8))


def test_fault_10_mask_needs_no_dense_pairs() -> None:
    """Tiles come from the intervals' ends: no tensor on the way has queries × keys elements."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    length, blocks, size = 3072, 512, 16
    anchors = torch.arange(blocks)[None] * 5
    with Watch():
        seen = visible(anchors, anchors >= 0, torch.arange(length)[None], size)
        tile_lists(seen, length)
    assert largest <= blocks * size * ((length + blocks * size) // 128)


# -- influence: perturb it, and nothing moves -----------------------------------------------------

CASES = [
    pytest.param({}, id="full"),
    pytest.param({"layer_types": MIXED, "sliding_window": 5}, id="sliding"),
    pytest.param({"dflash2": SECOND}, id="dflash2"),
]


@pytest.mark.parametrize("changes", CASES)
def test_fault_1_no_future_feature_and_no_other_block_reaches_a_slot(
    changes: dict[str, object],
) -> None:
    """Overlapping blocks (anchors 5 and 7, blocks of 4), a neighbour document, padding."""
    config = tiny_config(**changes)
    drafter = noisy_drafter(config)
    batch = packed_batch([12, 9], [2, 5, 7, 14, 18], padding=3)
    masks = MaskBuilder(4, full=True, window=config.sliding_window)(
        batch.anchors, batch.anchor_valid, batch.position
    )
    place = batch.position.gather(1, batch.anchors)[..., None] + torch.arange(4)
    features = torch.randn(1, 24, 64, requires_grad=True)
    slots = torch.randn(1, 20, 32, requires_grad=True)

    def run(f: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return drafter(f, s, batch.position, place.flatten(1), masks)

    out = run(features, slots)
    for block, anchor in enumerate([2, 5, 7, 14, 18]):
        mine = slice(4 * block, 4 * block + 4)
        start = 0 if anchor < 12 else 12
        allowed = torch.zeros(24, dtype=torch.bool)
        allowed[start:anchor] = True
        grads = torch.autograd.grad(out[:, mine].sum(), (features, slots), retain_graph=True)
        assert torch.all(grads[0][0, ~allowed] == 0)
        assert torch.all(grads[0][0, allowed] != 0) or config.sliding_window is not None
        others = torch.ones(20, dtype=torch.bool)
        others[mine] = False
        assert torch.all(grads[1][0, others] == 0)
        with torch.no_grad():
            shaken_features, shaken_slots = features.clone(), slots.clone()
            shaken_features[0, ~allowed] = 1e3
            shaken_slots[0, others] = -1e3
            assert torch.equal(run(shaken_features, shaken_slots)[:, mine], out[:, mine])


def test_fault_3_a_full_layer_sees_its_block_both_ways_and_a_sliding_one_does_not() -> None:
    batch = packed_batch([10], [4])
    for kind, window in ((FULL, None), (SLIDING, 6)):
        config = tiny_config(num_layers=1, layer_types=(kind,), sliding_window=window)
        drafter = noisy_drafter(config)
        masks = MaskBuilder(4, full=kind == FULL, window=window)(
            batch.anchors, batch.anchor_valid, batch.position
        )
        slots = torch.randn(1, 4, 32, requires_grad=True)
        place = 4 + torch.arange(4)[None]
        out = drafter(torch.randn(1, 10, 64), slots, batch.position, place, masks)
        (grad,) = torch.autograd.grad(out[:, 1].sum(), slots)
        later_slots_matter = bool((grad[0, 2:] != 0).any())
        assert later_slots_matter == (kind == FULL)


def test_an_unused_block_reads_no_context_and_stays_finite() -> None:
    drafter = noisy_drafter(tiny_config())
    batch = packed_batch([10], [3, -1])
    masks = MaskBuilder(4, full=True, window=None)(
        batch.anchors, batch.anchor_valid, batch.position
    )
    features = torch.randn(1, 10, 64, requires_grad=True)
    place = batch.position.gather(1, batch.anchors)[..., None] + torch.arange(4)
    slots = torch.randn(1, 8, 32)
    out = drafter(features, slots, batch.position, place.flatten(1), masks)
    assert torch.isfinite(out).all()
    (grad,) = torch.autograd.grad(out[:, 4:].sum(), features)
    assert torch.all(grad == 0)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_decoding_sees_what_training_saw(window: int | None) -> None:
    """The last block of a document in training, and the block being decoded, have equal masks."""
    context, slots = 9, 4
    batch = packed_batch([context + 1], [context])
    seen = visible(batch.anchors, batch.anchor_valid, batch.position, slots, window)
    trained = dense(seen, context + 1)
    without_anchor = torch.cat((trained[..., :context], trained[..., context + 1 :]), dim=-1)
    assert torch.equal(decoding_mask(context, slots, window, torch.device("cpu")), without_anchor)


def test_masks_hold_only_the_kinds_that_some_layer_has() -> None:
    batch = packed_batch([10], [3])
    build = MaskBuilder(4, full=False, window=3)
    masks: Masks = build(batch.anchors, batch.anchor_valid, batch.position)
    assert masks.full is None and masks.sliding is not None
