"""What a slot may see: two intervals of keys, and nothing else.

Keys of a row are its S context tokens followed by its N·B block slots. A slot of block j, at offset
k from anchor a_j of a document that starts at s_j, sees

    context  [s_j, a_j)                 strictly before the anchor, in the same document
    own      block j's slots            all of them: both directions, as at decoding
             sliding layers: offsets up to k only, and no key more than W-1 positions back

Nothing of other blocks. Because every visible set is two intervals, flex_attention's tiles follow
from the intervals' ends alone: (b, queries, key tiles) comparisons instead of a dense
(b, queries, keys) mask, which took others 24 ms a call. Anchors must be sorted for the tiles to be
few; the result is right in any order.

b = rows, S = context length, N = blocks a row, B = block size, Q = N·B queries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.drafter.config import FULL, SLIDING, DrafterConfig

TILE = 128
"""Queries and keys of one tile of flex_attention (its kernels' own default)."""


class Visible(NamedTuple):
    """Per query two half-open intervals of key indices; i32 [b, Q] each."""

    context_low: Tensor
    context_high: Tensor
    own_low: Tensor
    own_high: Tensor


def visible(
    anchors: Tensor,
    anchor_valid: Tensor,
    position: Tensor,
    block_size: int,
    window: int | None = None,
) -> Visible:
    """The intervals of every query.

    ``anchors`` i64 [b, N] are row positions, ``anchor_valid`` bool [b, N], ``position`` i64 [b, S]
    restarts at 0 in each document. ``window`` null is a full layer. An invalid block sees itself
    only: its output is finite, unused, and reads no context.
    """
    (rows, blocks), length = anchors.shape, position.shape[1]
    start = anchors - position.gather(1, anchors)
    high = torch.where(anchor_valid, anchors, 0)
    low = torch.where(anchor_valid, start, 0)
    offset = torch.arange(block_size, device=anchors.device)
    first = length + torch.arange(blocks, device=anchors.device)[:, None] * block_size
    zero = torch.zeros_like(offset)
    context_low = low[:, :, None] + zero
    context_high = high[:, :, None] + zero
    own_low = first + zero
    own_high = first + block_size + zero
    if window is not None:
        # The window counts the slot itself, hence W-1 further keys.
        reach = anchors[:, :, None] + offset - (window - 1)
        context_low = torch.minimum(torch.maximum(context_low, reach), context_high)
        own_low = first + (offset - (window - 1)).clamp(min=0)
        own_high = first + offset + 1
    return Visible(
        context_low.reshape(rows, -1).int(),
        context_high.reshape(rows, -1).int(),
        own_low.expand(rows, -1, -1).reshape(rows, -1).int(),
        own_high.expand(rows, -1, -1).reshape(rows, -1).int(),
    )


def dense(seen: Visible, length: int) -> Tensor:
    """bool [b, 1, Q, S+Q]: the reference, and the mask for ``scaled_dot_product_attention``."""
    queries = seen.own_low.shape[1]
    key = torch.arange(length + queries, device=seen.own_low.device, dtype=torch.int32)
    low, high, own_low, own_high = (bound[:, :, None] for bound in seen)
    return (((key >= low) & (key < high)) | ((key >= own_low) & (key < own_high)))[:, None]


def tiles(seen: Visible, length: int, tile: int = TILE) -> tuple[Tensor, Tensor]:
    """Which key tiles a query tile needs: bool (some, all) [b, ⌈Q/tile⌉, ⌈(S+Q)/tile⌉].

    ``some``: at least one visible pair. ``all``: every pair is visible (tiles beyond the last query
    or key are never ``all``). Pure tensor arithmetic of fixed shapes: compile it.
    """
    rows, queries = seen.own_low.shape
    keys = length + queries
    low, high, own_low, own_high = (bound[:, :, None] for bound in seen)
    begin = torch.arange(0, keys, tile, device=low.device, dtype=torch.int32)
    end = begin + tile
    covered = (torch.minimum(high, end) - torch.maximum(low, begin)).clamp(min=0)
    covered = covered + (torch.minimum(own_high, end) - torch.maximum(own_low, begin)).clamp(min=0)
    padding = -queries % tile
    covered = torch.nn.functional.pad(covered, (0, 0, 0, padding))
    covered = covered.view(rows, -1, tile, begin.numel())
    return (covered > 0).any(2), (covered == tile).all(2)


class TileLists(NamedTuple):
    """A block mask as flex_attention's kernels read it, both ways round; all i32.

    ``q_*`` lists, for each query tile, the key tiles to visit; ``k_*`` the transpose. ``part_*``
    need the mask inside, ``full_*`` do not.
    """

    q_part_count: Tensor
    q_part: Tensor
    q_full_count: Tensor
    q_full: Tensor
    k_part_count: Tensor
    k_part: Tensor
    k_full_count: Tensor
    k_full: Tensor


def tile_lists(seen: Visible, length: int, tile: int = TILE) -> TileLists:
    """From intervals to the lists of tiles, [b, 1, tiles] counts and [b, 1, tiles, tiles] indices.

    This is the function to compile: fixed shapes, integers only, no data-dependent control.
    """
    some, every = tiles(seen, length, tile)
    part = some & ~every
    return TileLists(
        *_ordered(part),
        *_ordered(every),
        *_ordered(part.transpose(1, 2)),
        *_ordered(every.transpose(1, 2)),
    )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Counts, and the chosen columns first, in rising order (a stable sort keeps it).

    Contiguous by order: flex_attention's kernels step through the last axis by one, whatever its
    stride, and a sort returns the strides of what it was given (here a transpose).
    """
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return (
        chosen.sum(-1).to(torch.int32, memory_format=torch.contiguous_format)[:, None],
        order.to(torch.int32, memory_format=torch.contiguous_format)[:, None],
    )


def block_mask(seen: Visible, length: int, lists: TileLists, tile: int = TILE) -> BlockMask:
    """The BlockMask of ``lists``, whose partial tiles are decided by the intervals."""
    low, high, own_low, own_high = seen

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        context = (kv >= low[b, q]) & (kv < high[b, q])
        own = (kv >= own_low[b, q]) & (kv < own_high[b, q])
        return context | own

    queries = own_low.shape[1]
    return BlockMask(
        seq_lengths=(queries, length + queries),
        kv_num_blocks=lists.q_part_count,
        kv_indices=lists.q_part,
        full_kv_num_blocks=lists.q_full_count,
        full_kv_indices=lists.q_full,
        q_num_blocks=lists.k_part_count,
        q_indices=lists.k_part,
        full_q_num_blocks=lists.k_full_count,
        full_q_indices=lists.k_full,
        BLOCK_SIZE=(tile, tile),
        mask_mod=mask_mod,
    )


class SlotMask(NamedTuple):
    """What ``trainer.kernels`` needs: the intervals, and for each tile of context keys the query
    tiles that see it, i32 [b, key tiles, 4]: first, first and last+1 of those that see all of it,
    last+1."""

    seen: Visible
    ranges: Tensor


def key_ranges(seen: Visible, length: int, slots: int, keys: int) -> Tensor:
    """``SlotMask.ranges`` for tiles of ``slots`` queries and ``keys`` context keys. Fixed shapes:
    compile it. Where the tiles that see all keys are no unbroken run (anchors out of order), none
    is called full: the result stays right."""
    rows, queries = seen.own_low.shape
    begin = torch.arange(0, length, keys, device=seen.own_low.device, dtype=torch.int32)
    low, high = (bound[:, :, None] for bound in seen[:2])
    common = torch.minimum(high, begin + keys) - torch.maximum(low, begin)
    common = torch.nn.functional.pad(common.clamp(min=0), (0, 0, 0, -queries % slots))
    common = common.view(rows, -1, slots, begin.numel())
    tile = torch.arange(common.shape[1], device=begin.device, dtype=torch.int32)[:, None]
    some, every = (common > 0).any(2), (common == keys).all(2)
    beyond = common.shape[1]
    first = torch.where(some, tile, beyond).amin(1)
    last = torch.where(some, tile + 1, 0).amax(1)
    full_first = torch.where(every, tile, beyond).amin(1)
    full_last = torch.where(every, tile + 1, 0).amax(1)
    unbroken = full_last - full_first == every.sum(1)
    full_first = torch.where(unbroken, full_first, first)
    full_last = torch.where(unbroken, full_last, first)
    last = torch.maximum(last, first)
    return torch.stack((first, full_first, full_last, last), dim=-1).int()


Mask = Tensor | BlockMask | SlotMask
"""Dense bool [b, 1, Q, S+Q], flex_attention's, or our kernels'."""


class Masks(NamedTuple):
    """What ``Drafter.forward`` takes: one for each kind of layer; null sees everything."""

    full: Mask | None
    sliding: Mask | None


ListTiles = Callable[[Visible, int], TileLists]
ListRanges = Callable[[Visible, int], Tensor]


class MaskBuilder:
    """Masks for batches of one shape.

    ``list_tiles`` is ``tile_lists``, compiled or not, and gives masks for flex_attention;
    ``list_ranges`` is ``key_ranges`` with its tiles filled in, and gives those of our kernels. With
    neither the masks are dense (for a CPU, where flex_attention has no backward).
    """

    def __init__(
        self,
        block_size: int,
        *,
        full: bool,
        window: int | None,
        list_tiles: ListTiles | None = None,
        list_ranges: ListRanges | None = None,
    ) -> None:
        """``full``: some layer is full. ``window``: the sliding layers' window, null if none is."""
        self.block_size = block_size
        self.full = full
        self.window = window
        self.list_tiles = list_tiles
        self.list_ranges = list_ranges

    def __call__(self, anchors: Tensor, anchor_valid: Tensor, position: Tensor) -> Masks:
        def one(window: int | None) -> Mask:
            seen = visible(anchors, anchor_valid, position, self.block_size, window)
            length = position.shape[1]
            if self.list_ranges is not None:
                return SlotMask(seen, self.list_ranges(seen, length))
            if self.list_tiles is not None:
                return block_mask(seen, length, self.list_tiles(seen, length))
            return dense(seen, length)

        return Masks(
            full=one(None) if self.full else None,
            sliding=one(self.window) if self.window is not None else None,
        )


KERNEL_SHARED_BYTES = 229_376
"""What the queries' gradient keeps in shared memory: Hopper and B200 have it, an A100 or an RTX
card has 100 to 163 KB."""


def masks_for(
    config: DrafterConfig, device: torch.device, compile_: Callable[..., Any] | None
) -> MaskBuilder:
    """The best masks for a drafter on a device: dense on a CPU (and where nothing is compiled), our
    kernels' on a GPU of Hopper's size if they take the shape, else flex_attention's.

    ``compile_``: (function, name) → the function, compiled.
    """
    types = set(config.layer_types)
    kinds: dict[str, Any] = {
        "full": FULL in types,
        "window": config.sliding_window if SLIDING in types else None,
    }
    if device.type != "cuda" or compile_ is None:
        return MaskBuilder(config.block_size, **kinds)
    found = torch.cuda.get_device_properties(device)
    # Absent on AMD's.
    shared = getattr(found, "shared_memory_per_block_optin", 0)
    if not kernels_take(config) or shared < KERNEL_SHARED_BYTES:
        return MaskBuilder(config.block_size, **kinds, list_tiles=compile_(tile_lists, "mask"))
    from trainer.kernels.operators import KEY_GRADIENT_TILE, key_slots

    slots = key_slots(config.num_heads, config.num_kv_heads)
    sized = partial(key_ranges, slots=slots, keys=KEY_GRADIENT_TILE)
    ranges = compile_(lambda seen, length: sized(seen, length), "mask")
    return MaskBuilder(config.block_size, **kinds, list_ranges=ranges)


def kernels_take(config: DrafterConfig) -> bool:
    """Whether our attention kernels can serve this shape: whole blocks in every query tile."""
    group = config.num_heads // config.num_kv_heads
    slots = 128 // (1 << (group - 1).bit_length())
    return config.head_dim in (64, 128) and slots >= 16 and slots % config.block_size == 0


def decoding_mask(context: int, slots: int, window: int | None, device: torch.device) -> Tensor:
    """bool [1, 1, slots, context + slots] for one block right after ``context`` tokens."""
    query = context + torch.arange(slots, device=device)[:, None]
    key = torch.arange(context + slots, device=device)
    seen = torch.ones_like(query >= key)
    if window is not None:
        seen = (key <= query) & (query - key < window)
    return seen[None, None]
