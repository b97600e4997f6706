"""Decoding by the target in slots of fixed shape: one CUDA graph a token, whoever sits in them.

``decode.BatchDecoder`` launches some hundred kernels a token and waits for each; a small target on
a GPU spends nearly all its time on that. Here the state of every slot lies on the device (its next
token, its place, whether it is done), keys and values in buffers [slots, heads, room, d], and a
step changes nothing else: it is recorded once and replayed. The host looks every few steps, takes
out what has ended and puts new requests in. While the host writes, the device decodes on.

A prompt is read except its last token, which is the first one that the loop feeds. R = slots.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.data.decode import Completion, GrowingLayer, Request, alike, nucleus
from trainer.errors import TargetError
from trainer.graphs import Recorded
from trainer.taps import decoder_layers
from trainer.target import cache_argument

ATTENTION = "dflash_slots"
LOOK_EVERY = 8
"""Steps between two looks of the host: a look waits for the device, and a slot that ended right
after one idles that long (of some 150 tokens a response)."""
REFILL = 8
"""New requests join when so many parts of the slots are free (one of 8): reading prompts launches
as many kernels for one row as for a hundred."""
PREFILL_TOKENS = 16_384
"""Of one prefill, padding included."""
ROOM_STEP = 32
"""Columns are a multiple of it: attention kernels want aligned masks."""


class SlotLayer(DynamicLayer):
    """One layer's keys and values [R, heads, room, d]; each row writes at its own place."""

    is_initialized: bool
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.place = keys, values, place
        self.device, self.is_initialized = keys.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        column = self.place[:, None, None, None].expand_as(key_states)
        self.keys.scatter_(2, column, key_states)
        self.values.scatter_(2, column, value_states)
        return self.keys, self.values


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' interface for one query token: heads that share a key head become its queries.
    Without this, keys and values are copied once a head where a mask is given."""
    rows, heads, _, width = query.shape
    shared = query.reshape(rows, key.shape[1], -1, width)
    out = F.scaled_dot_product_attention(
        shared, key, value, attn_mask=attention_mask, scale=scaling
    )
    return out.reshape(rows, 1, heads, width), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)


def refuse_unfit(model: Any) -> None:
    """Raise ``TargetError`` for a target whose attention is more than plain and full."""
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    odd = sorted(kinds - {"full_attention"})
    if not odd and getattr(text, "layer_types", None) is None:
        odd = ["sliding_window"] if getattr(text, "sliding_window", None) else []
    odd += [
        name
        for name in ("attn_logit_softcapping", "num_experts", "num_local_experts")
        if getattr(text, name, None)
    ]
    if odd:
        raise TargetError(
            f"data.make.response.fixed_slots cannot decode this target ({', '.join(odd)})",
            next_step="leave fixed_slots out",
        )


class Waiting:
    """All requests, in their order, and the room that the longest needs: the slots' shape. Their
    tokens lie in a file: as lists, those of a million prompts of 60 take 2.7 GB."""

    def __init__(self, requests: Iterable[Request], folder: Path | None = None) -> None:
        self._tokens = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._left: deque[tuple[Request, int]] = deque()
        self.room = 0
        self.sampling = self.nucleus = False
        for request in requests:
            self._tokens.write(array("i", request.tokens).tobytes())
            self._left.append((replace(request, tokens=[]), len(request.tokens)))
            self.room = max(self.room, len(request.tokens) + request.limit)
            self.sampling |= request.temperature > 0
            self.nucleus |= request.temperature > 0 and request.top_p < 1
        self._tokens.seek(0)

    def __len__(self) -> int:
        return len(self._left)

    def take(self) -> Request:
        request, length = self._left.popleft()
        tokens = array("i")
        tokens.frombytes(self._tokens.read(length * tokens.itemsize))
        return replace(request, tokens=tokens.tolist())


class SlotDecoder:
    """Decodes requests ``slots`` at a time. The model is whole, with its head. Greedy rows and
    sampled ones may be mixed; what a row draws depends on its request alone."""

    def __init__(
        self, model: Any, stop: set[int], pad: int, slots: int, folder: Path | None = None
    ) -> None:
        """``folder``: where prompts wait."""
        refuse_unfit(model)
        self.folder = folder
        self.model = model
        self.device: torch.device = model.device
        self.cache_name = cache_argument(model)
        self.decoder, layers = decoder_layers(model)
        self.layers = len(layers)
        self.slots = slots
        self.pad = pad
        self.stop = torch.tensor(sorted(stop), device=self.device)
        self.generated = 0
        self._sitting: list[Request | None] = []

    def run(
        self, requests: Iterable[Request], deadline: float | None = None
    ) -> Iterator[Completion | None]:
        """As ``BatchDecoder.run``; None after each look at the device."""
        waiting = Waiting(requests, self.folder)
        if not waiting:
            return
        self._allocate(min(self.slots, len(waiting)), -(-waiting.room // ROOM_STEP) * ROOM_STEP)
        self._sampling, self._nucleus = waiting.sampling, waiting.nucleus
        step: Recorded[None] = Recorded(self._step, self.device)
        with torch.inference_mode(), self._attention():
            # No slot is active yet: warming up changes nothing.
            step.record()
        while True:
            over = deadline is not None and time.monotonic() > deadline
            done = self._take_out(everything=over)
            if over:
                yield from done
                return
            yield from self._fill(waiting)
            if not any(self._sitting):
                yield from done
                return
            with torch.inference_mode(), self._attention():
                for _ in range(LOOK_EVERY):
                    step()
            # The device is at work now: the caller may write.
            yield from done or [None]

    # -- the device's side ------------------------------------------------------------------------

    def _allocate(self, slots: int, room: int) -> None:
        text = self.model.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        dtype = next(self.model.parameters()).dtype
        self._sitting = [None] * slots

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self._place = zeros(slots)
        self._token = zeros(slots) + self.pad
        self._last = zeros(slots)
        self._active = zeros(slots, dtype=torch.bool)
        self._heat = zeros(slots, dtype=torch.float32)
        self._top_p = zeros(slots, dtype=torch.float32)
        self._key = zeros(slots)
        self._made = zeros(slots, room)
        self._column = torch.arange(room, device=self.device)
        shape = (slots, heads, room, width)
        self._cache = Cache(
            layers=[
                SlotLayer(zeros(*shape, dtype=dtype), zeros(*shape, dtype=dtype), self._place)
                for _ in range(self.layers)
            ]
        )

    def _step(self) -> None:
        """One more token for every active slot; the others stand still."""
        seen = self._column <= self._place[:, None]
        # Additive and in the model's type: a boolean one is converted in every layer.
        mask = torch.zeros_like(seen, dtype=next(self.model.parameters()).dtype)
        mask = mask.masked_fill(~seen, float("-inf"))[:, None, None]
        out = self.model(
            input_ids=self._token[:, None],
            attention_mask=mask,
            position_ids=self._place[:, None],
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self._cache},
        )
        logits = out.logits[:, -1]
        chosen = logits.argmax(-1)
        if self._sampling:
            chosen = torch.where(self._heat > 0, self._draw(logits), chosen)
        chosen = torch.where(self._active, chosen, self._token)
        self._place += self._active
        self._made.scatter_(1, self._place[:, None], chosen[:, None])
        self._token.copy_(chosen)
        ended = (chosen[:, None] == self.stop).any(-1) | (self._place >= self._last)
        self._active &= ~ended

    def _draw(self, logits: Tensor) -> Tensor:
        """Sampled tokens, i64 [R]; under top_p as ``nucleus`` does."""
        scaled = logits.float() / self._heat.clamp(min=1e-6)[:, None]
        draw = uniform(self._key, self._place)[:, None]
        if self._nucleus:
            return nucleus(scaled, self._top_p[:, None], draw)
        total = scaled.softmax(-1).cumsum(-1)
        return (total < draw * total[:, -1:]).sum(-1).clamp(max=total.shape[-1] - 1)

    @contextlib.contextmanager
    def _attention(self) -> Iterator[None]:
        config = self.model.config.get_text_config()
        before = config._attn_implementation
        config._attn_implementation = ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = before

    # -- the host's side --------------------------------------------------------------------------

    @torch.inference_mode()
    def _take_out(self, *, everything: bool) -> list[Completion | None]:
        """What has ended since the last look; with ``everything`` what has not, too."""
        active = self._active.tolist()
        places = self._place.tolist()
        gone = [
            i
            for i, request in enumerate(self._sitting)
            if request is not None and (everything or not active[i])
        ]
        if not gone:
            return []
        made = self._made[torch.tensor(gone, device=self.device)].tolist()
        stop = set(self.stop.tolist())
        found: list[Completion | None] = []
        for row, index in zip(made, gone, strict=True):
            request = self._sitting[index]
            assert request is not None
            tokens = row[len(request.tokens) : places[index] + 1]
            self.generated += len(tokens)
            self._sitting[index] = None
            if tokens:
                found.append(Completion(request, tokens, tokens[-1] in stop))
        return found

    def _fill(self, waiting: Waiting) -> Iterator[None]:
        free = [i for i, request in enumerate(self._sitting) if request is None]
        if not waiting or (len(free) < len(self._sitting) / REFILL):
            return
        joining = [waiting.take() for _ in free[: len(waiting)]]
        for group in alike(joining, PREFILL_TOKENS):
            seats, free = free[: len(group)], free[len(group) :]
            self._seat(group, seats)
            if self.device.type != "cuda":
                # A prefill takes a while there.
                yield

    @torch.inference_mode()
    def _seat(self, requests: list[Request], seats: list[int]) -> None:
        """Read the prompts (but their last tokens) into their slots, and start them."""
        where = torch.tensor(seats, device=self.device)
        longest = max(len(r.tokens) for r in requests) - 1
        if longest:
            padded = [(r.tokens[:-1] + [self.pad] * longest)[:longest] for r in requests]
            cache = Cache(layers=[GrowingLayer() for _ in range(self.layers)])
            position = torch.arange(longest, device=self.device).expand(len(requests), -1)
            # Padded on the right: no token looks at what comes after it.
            self.decoder(
                input_ids=torch.tensor(padded, device=self.device),
                position_ids=position,
                use_cache=True,
                **{self.cache_name: cache},
            )
            for mine, read in zip(self._cache.layers, cache.layers, strict=True):
                mine.keys[where, :, :longest] = read.keys
                mine.values[where, :, :longest] = read.values
        for request, seat in zip(requests, seats, strict=True):
            self._sitting[seat] = request

        def column(values: list[Any], into: Tensor) -> None:
            into[where] = torch.tensor(values, dtype=into.dtype, device=self.device)

        column([len(r.tokens) - 1 for r in requests], self._place)
        column([r.tokens[-1] for r in requests], self._token)
        column([len(r.tokens) - 1 + r.limit for r in requests], self._last)
        column([r.temperature for r in requests], self._heat)
        column([r.top_p for r in requests], self._top_p)
        column([_mixed(r.seed, r.key) for r in requests], self._key)
        column([True] * len(requests), self._active)


def _mixed(seed: int, key: int) -> int:
    """One number for a request, as a signed 64-bit integer."""
    value = (seed * 0x9E3779B97F4A7C15 + key + 1) % 2**64
    return value - 2**64 if value >= 2**63 else value


def uniform(key: Tensor, place: Tensor) -> Tensor:
    """f32 in [0, 1) for each pair of i64: a hash (splitmix64's mixing), so that a graph needs no
    generator state and a row's draws are its own."""
    x = key * -7046029254386353131 + place * -4417276706812531889
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        # Logical shifts: torch's are arithmetic.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 40) & ((1 << 24) - 1)).float() / (1 << 24)
