"""Batched decoding by the target, for making data: rows leave when they end and others join.

transformers' `generate` keeps a batch until its slowest row ends and copies every key and value at
each token. Here finished rows are dropped, new prompts join as soon as a quarter of the rows are
free, and keys and values live in buffers with room to grow (the copies were 18 % of a decode step
of 32 rows × 200 tokens on a CPU).

All rows end in the same column: prompts are padded on the left. b = rows, T = columns.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from trainer.errors import TargetError
from trainer.target import cache_argument

ROOM = 64
"""Columns added when a buffer is full."""
PREFILL_TOKENS = 2048
"""Of one prefill, padding included."""
SAMPLED_FROM = 256
"""Sampling looks at the best so many tokens; beyond them the mass is negligible."""


@dataclass(frozen=True)
class Request:
    key: int
    tokens: list[int]
    limit: int
    """New tokens at most."""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    request: Request
    tokens: list[int]
    """New ones, the stop token included."""
    ended: bool
    """False: cut by the limit or by the deadline."""
    features: Tensor | None = None
    """[prompt + new - 1, K·H]: of every token that the target read, if taps were asked for."""

    @property
    def key(self) -> int:
        return self.request.key


@dataclass
class _Row:
    request: Request
    made: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    generator: np.random.Generator | None = None


@dataclass(frozen=True)
class _Part:
    """Rows that were prefilled together: mask [b, T], cache, next token [b]."""

    rows: list[_Row]
    mask: Tensor
    cache: Cache
    chosen: Tensor


class GrowingLayer(DynamicLayer):
    """One layer's keys and values in buffers [b, heads, capacity, d]; written, not concatenated."""

    is_initialized: bool
    keys: Tensor
    values: Tensor
    _buffers: list[Tensor]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        if not self.is_initialized or end > self._buffers[0].shape[-2]:
            self._grow(key_states, value_states, end + ROOM)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, length:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def _grow(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        fresh = [x.new_empty((*x.shape[:2], capacity, x.shape[-1])) for x in (keys, values)]
        if self.is_initialized:
            for buffer, old in zip(fresh, (self.keys, self.values), strict=True):
                buffer[:, :, : old.shape[-2]] = old
        self._buffers = fresh
        self.device, self.is_initialized = keys.device, True

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Take over other contents [b, heads, T, d], for other rows."""
        self.is_initialized = False
        self._grow(keys, values, keys.shape[-2] + ROOM)
        length = keys.shape[-2]
        for buffer, states in zip(self._buffers, (keys, values), strict=True):
            buffer[:, :, :length] = states
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


def refuse_other_layers(model: Any) -> None:
    """Raise ``TargetError`` for a target whose cache is more than keys and values."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    if kinds - {"full_attention", "sliding_attention"}:
        raise TargetError(
            f"a target with layers of kind {', '.join(sorted(kinds))} cannot make data here",
            next_step="make the responses with a server, and give them by data.files",
        )


class BatchDecoder:
    """Decodes requests ``batch`` at a time. The model is whole, with its head."""

    def __init__(
        self,
        model: Any,
        stop: set[int],
        pad: int,
        batch: int,
        layer_ids: tuple[int, ...] | None = None,
    ) -> None:
        """``layer_ids``: also keep the outputs of these layers."""
        refuse_other_layers(model)
        self.model = model
        self.device: torch.device = model.device
        self.layers: int = model.config.get_text_config().num_hidden_layers
        self.cache_name = cache_argument(model)
        self.stop = stop
        self.pad = pad
        self.batch = batch
        self.layer_ids = layer_ids
        self.generated = 0
        self._rows: list[_Row] = []
        self._cache = self._new_cache()
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=self.device)
        self._next = torch.zeros(0, dtype=torch.long, device=self.device)

    def run(
        self, requests: Iterable[Request], deadline: float | None = None
    ) -> Iterator[Completion | None]:
        """Completions as they end, in no particular order; None after a step without one, so that
        the caller can show progress. ``deadline``: ``time.monotonic`` at which rows are cut."""
        waiting = iter(requests)
        exhausted = False
        while True:
            free = self.batch - len(self._rows)
            if not exhausted and (free >= max(1, self.batch // 4) or not self._rows):
                joining = [r for _, r in zip(range(free), waiting, strict=False)]
                exhausted = len(joining) < free
                if joining:
                    yield from self._join(joining)
            if not self._rows:
                return
            yield from self._finish() or [None]
            if deadline is not None and time.monotonic() > deadline:
                yield from [_completion(row, ended=False) for row in self._rows]
                return
            if self._rows:
                self._step()

    def _join(self, requests: list[Request]) -> Iterator[None]:
        """Prefill new rows, alike lengths together, and put them under the present ones. Yields
        after each prefill: on a CPU they take a while."""
        parts = [_Part(self._rows, self._mask, self._cache, self._next)] if self._rows else []
        for group in alike(requests, PREFILL_TOKENS):
            parts.append(self._prefill(group))
            yield
        width = max(part.mask.shape[1] for part in parts)
        with torch.inference_mode():
            self._mask = torch.cat([_left(part.mask, width, -1) for part in parts])
            self._next = torch.cat([part.chosen for part in parts])
            merged = self._new_cache()
            for index, layer in enumerate(merged.layers):
                here = [part.cache.layers[index] for part in parts]
                layer.replace(
                    torch.cat([_left(x.keys, width, -2) for x in here]),
                    torch.cat([_left(x.values, width, -2) for x in here]),
                )
        self._cache = merged
        self._rows = [row for part in parts for row in part.rows]

    @torch.inference_mode()
    def _prefill(self, requests: list[Request]) -> _Part:
        rows = [_Row(r, generator=_generator(r)) for r in requests]
        longest = max(len(r.tokens) for r in requests)
        padded = [[self.pad] * (longest - len(r.tokens)) + r.tokens for r in requests]
        shown = [[0] * (longest - len(r.tokens)) + [1] * len(r.tokens) for r in requests]
        tokens = torch.tensor(padded, device=self.device)
        mask = torch.tensor(shown, device=self.device)
        cache = self._new_cache()
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(tokens, mask, position, cache, rows)
        return _Part(rows, mask, cache, self._choose(logits, rows))

    @torch.inference_mode()
    def _step(self) -> None:
        """One more token for every row."""
        self._mask = F.pad(self._mask, (0, 1), value=1)
        position = self._mask.sum(-1, keepdim=True) - 1
        logits = self._forward(self._next[:, None], self._mask, position, self._cache, self._rows)
        self._next = self._choose(logits, self._rows)

    def _forward(
        self, tokens: Tensor, mask: Tensor, position: Tensor, cache: Cache, rows: list[_Row]
    ) -> Tensor:
        """Logits [b, V] after the last column; features go to the rows."""
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            logits_to_keep=1,
            output_hidden_states=self.layer_ids is not None,
            **{self.cache_name: cache},
        )
        if self.layer_ids is not None:
            taps = torch.cat([out.hidden_states[i + 1] for i in self.layer_ids], dim=-1)
            shown = mask[:, -tokens.shape[1] :].bool()
            for row, found, real in zip(rows, taps, shown, strict=True):
                row.features.append(found[real])
        logits: Tensor = out.logits[:, -1]
        return logits

    def _choose(self, logits: Tensor, rows: list[_Row]) -> Tensor:
        """The next token of each row, noted in it."""
        chosen = logits.argmax(-1)
        drawn = [i for i, row in enumerate(rows) if row.generator is not None]
        if drawn:
            chosen[drawn] = _sample(logits[drawn], [rows[i] for i in drawn])
        for row, token in zip(rows, chosen.tolist(), strict=True):
            row.made.append(token)
        self.generated += len(rows)
        return chosen

    @torch.inference_mode()
    def _finish(self) -> list[Completion | None]:
        """Take out the rows that ended; columns that only they used go with them."""
        done: list[Completion | None] = []
        kept = []
        for index, row in enumerate(self._rows):
            ended = row.made[-1] in self.stop
            if ended or len(row.made) >= row.request.limit:
                done.append(_completion(row, ended))
            else:
                kept.append(index)
        if not done:
            return done
        self._rows = [self._rows[i] for i in kept]
        if kept:
            rows = torch.tensor(kept, device=self.device)
            self._mask, self._next = self._mask[rows], self._next[rows]
            lead = int(self._mask.argmax(-1).min())
            self._mask = self._mask[:, lead:]
            for layer in self._cache.layers:
                layer.replace(layer.keys[rows, :, lead:], layer.values[rows, :, lead:])
        return done

    def _new_cache(self) -> Cache:
        return Cache(layers=[GrowingLayer() for _ in range(self.layers)])


def _completion(row: _Row, ended: bool) -> Completion:
    features = torch.cat(row.features) if row.features else None
    return Completion(row.request, row.made, ended, features)


def alike(requests: list[Request], tokens: int) -> list[list[Request]]:
    """Groups of similar lengths, none of more than so many ``tokens`` when padded."""
    groups: list[list[Request]] = []
    for request in sorted(requests, key=lambda r: len(r.tokens)):
        if not groups or (len(groups[-1]) + 1) * len(request.tokens) > tokens:
            groups.append([])
        groups[-1].append(request)
    return groups


def _generator(request: Request) -> np.random.Generator | None:
    """One per request: what a row draws does not depend on who shares its batch."""
    if request.temperature <= 0:
        return None
    return np.random.Generator(np.random.Philox(key=(request.seed, request.key)))


def _sample(logits: Tensor, rows: list[_Row]) -> Tensor:
    """A token for each row, [n, V] → i64 [n]."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=torch.float32)[:, None]

    heat = column([row.request.temperature for row in rows])
    top_p = column([row.request.top_p for row in rows])
    draw = column([row.generator.random() for row in rows if row.generator is not None])
    return nucleus(logits.float() / heat, top_p, draw)


def nucleus(logits: Tensor, top_p: Tensor, draw: Tensor) -> Tensor:
    """Nucleus sampling among the best ``SAMPLED_FROM`` tokens: f32 ``logits`` [n, V] over the
    temperature, ``top_p`` and a uniform ``draw`` [n, 1] → i64 [n]."""
    best = logits.topk(min(SAMPLED_FROM, logits.shape[-1]), dim=-1)
    probability = best.values.softmax(-1)
    before = probability.cumsum(-1) - probability
    total = torch.where(before < top_p, probability, 0.0).cumsum(-1)
    place = (total < draw * total[:, -1:]).sum(-1, keepdim=True)
    return best.indices.gather(-1, place.clamp(max=total.shape[-1] - 1))[:, 0]


def _left(x: Tensor, width: int, dim: int) -> Tensor:
    """Zeros put before ``x`` along ``dim`` until it is ``width`` wide."""
    missing = width - x.shape[dim]
    return F.pad(x, (0, 0) * (-dim - 1) + (missing, 0)) if missing else x
