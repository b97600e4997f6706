"""What one microbatch costs each stage, and what each device must hold: arithmetic, no device.

Counted per row of S context tokens with N blocks of B slots (Q = N·B slots): two operations a
multiply-add, attention over what is visible. A Qwen3-8B drafter at S = 3072, N = 512, B = 16 comes
to 28 TFLOP forward and 74 in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.drafter.config import DrafterConfig, text_config


@dataclass(frozen=True)
class TargetShape:
    """The language part of a target, as far as its cost goes."""

    hidden_size: int
    num_layers: int
    attention_width: int
    """heads · head_dim"""
    kv_width: int
    """key-value heads · head_dim"""
    mlp_width: int
    """Intermediate columns that one token meets: for a mixture, of its chosen experts."""
    mlp_stored: int
    """Intermediate columns that memory holds: for a mixture, of all experts."""
    vocab_size: int
    tied: bool
    """Embedding and output head are one matrix."""

    @classmethod
    def of(cls, hf_config: Any) -> TargetShape:
        text = text_config(hf_config)
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
        width = stored = dense
        if experts:
            each = getattr(text, "moe_intermediate_size", None) or dense
            shared = getattr(text, "shared_expert_intermediate_size", None) or 0
            width = each * (getattr(text, "num_experts_per_tok", None) or 1) + shared
            stored = each * experts + shared
        return cls(
            hidden_size=text.hidden_size,
            num_layers=text.num_hidden_layers,
            attention_width=heads * head_dim,
            kv_width=kv_heads * head_dim,
            mlp_width=width,
            mlp_stored=stored,
            vocab_size=text.vocab_size,
            tied=bool(getattr(text, "tie_word_embeddings", False)),
        )

    def attention_weights(self) -> int:
        return 2 * self.hidden_size * (self.attention_width + self.kv_width)

    def vocabulary_weights(self) -> int:
        """Of the embedding and the output head."""
        return (1 if self.tied else 2) * self.vocab_size * self.hidden_size


@dataclass(frozen=True)
class Work:
    """Everything that decides costs: the two models and the microbatch."""

    target: TargetShape
    drafter: DrafterConfig
    rows: int
    length: int
    anchors: int
    microbatches: int
    target_bytes: int = 2
    """Of a value in the target's type, features included."""
    drafter_bytes: int = 2

    @property
    def layers_run(self) -> int:
        """Target layers up to the last tap."""
        return max(self.drafter.target_layer_ids) + 1

    @property
    def slots(self) -> int:
        return self.anchors * self.drafter.block_size

    @property
    def feature_slot_bytes(self) -> int:
        return self.rows * self.length * self.drafter.feature_size * self.target_bytes

    @property
    def context_tokens(self) -> int:
        """Of a microbatch, without padding."""
        return self.rows * self.length


def target_flop(work: Work) -> float:
    """One microbatch through the target, up to the last tap, without its head."""
    shape = work.target
    products = shape.attention_weights() + 3 * shape.hidden_size * shape.mlp_width
    attention = 2 * work.length * shape.attention_width  # causal: half of S keys, two products
    return float(work.rows * work.length * work.layers_run * (2 * products + attention))


def drafter_flop(work: Work) -> tuple[float, float]:
    """(forward, forward and backward) of one microbatch through one drafter."""
    c, slots, length = work.drafter, work.slots, work.length
    attention_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    # Mean context before an anchor is S/2; a block sees its own B slots as well.
    seen = length / 2 + c.block_size
    layers = c.num_layers * (
        2 * 3 * c.hidden_size * c.intermediate_size * slots
        + 2 * 2 * c.hidden_size * attention_width * slots
        + 2 * 2 * c.hidden_size * kv_width * (slots + length)
    )
    attention = c.num_layers * 4 * slots * seen * attention_width
    fc = 2 * c.feature_size * c.hidden_size * length
    # Slot 0 of a block is never asked for.
    head = 2 * c.hidden_size * c.vocab_size * slots * (c.block_size - 1) / c.block_size
    forward = layers + attention + fc + head
    # Frozen: the features' own gradient and the head's weight gradient are not made. The attention
    # kernel reckons its scores again in the backward pass: 2.5 times its forward.
    training = 3 * layers + 3.5 * attention + 2 * fc + 2 * head
    return work.rows * forward, work.rows * training


def drafter_units(c: DrafterConfig) -> tuple[int, int]:
    """Parameters of one layer without what makes its keys and values, and all that is in no such
    part: the units in which a sharded drafter is gathered."""
    attention_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = 2 * c.hidden_size * attention_width + c.head_dim
    layer += 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    key_value = 2 * c.hidden_size * kv_width + c.head_dim
    rest = (c.feature_size + 2) * c.hidden_size + c.num_layers * key_value
    if c.dflash2 is not None:
        groups, kernel = c.hidden_size // c.dflash2.conv_group_size, c.dflash2.conv_kernel_size
        layer += 2 * 2 * kernel * c.hidden_size * (1 + groups)
        rest += c.dflash2.selector_rank * (2 * c.vocab_size + c.hidden_size)
    return layer, rest


def drafter_parameters(c: DrafterConfig) -> int:
    layer, rest = drafter_units(c)
    return rest + c.num_layers * layer


def target_memory(work: Work, *, staging: bool, beside: bool = False) -> int:
    """Bytes of one target worker: the whole target (it makes data and is evaluated against), the
    activations of one layer, taps, and two staging buffers where features travel. ``beside``
    another of its process on the same device it reads that one's weights."""
    shape = work.target
    layer = shape.attention_weights() + 3 * shape.hidden_size * shape.mlp_stored
    weights = 0 if beside else shape.num_layers * layer + shape.vocabulary_weights()
    tokens = work.rows * work.length
    activations = tokens * (6 * shape.hidden_size + 3 * shape.mlp_width)
    buffers = (1 + (2 if staging else 0)) * work.feature_slot_bytes
    return (weights + activations) * work.target_bytes + buffers


def sharded_states(work: Work, shards: int) -> int:
    """Bytes of one of ``shards`` drafters that hold one together (``sharded.py``): fp32 masters,
    moments and gradients, and what is whole for a while. That is, in the computation's type, the
    weights of two layers (one is used, the next arrives) and its arrival, and the gradient of one;
    in fp32 the gradients of two layers on their way; and what belongs to no layer, with its
    gradient and its way."""
    width = work.drafter_bytes
    layer, rest = drafter_units(work.drafter)
    passing = layer * (4 * width + 2 * 4) + rest * (2 * width + 4)
    return -(-drafter_parameters(work.drafter) * 16 // shards) + passing


def drafter_memory(work: Work, queue_depth: int, shards: int = 1, *, beside: bool = False) -> int:
    """Bytes of one drafter worker: weights, gradients, fp32 masters and moments, the frozen
    matrices, kept activations, and the feature slots. ``shards``: drafters that hold one
    together; 1 is a replica. ``beside`` a target of its process on the same device it reads that
    one's matrices, if both have one type."""
    c, width = work.drafter, work.drafter_bytes
    states = drafter_parameters(c) * (2 * width + (4 if width < 4 else 0) + 8)
    if shards > 1:
        states = sharded_states(work, shards)
    frozen = work.target.vocabulary_weights() * width
    if beside and work.target_bytes == width:
        frozen = 0
    attention_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    kept = 5 * c.hidden_size + 3 * attention_width + 3 * c.intermediate_size
    per_slot = c.num_layers * (kept + 4 * kv_width) + 4 * c.hidden_size
    per_token = c.num_layers * 4 * kv_width + 2 * c.hidden_size
    activations = work.rows * (work.slots * per_slot + work.length * per_token) * width
    return states + frozen + activations + queue_depth * work.feature_slot_bytes
