"""The drafter: Qwen3-style layers whose queries are block slots and whose keys are context + block.

One training step, b rows of S context tokens and N blocks of B slots (Q = N·B):

    features [b, S, K·H] ─ fc, hidden_norm ─→ context hidden [b, S, H]        (once, for all layers)
                                              └─ k_proj, v_proj of every layer, one product
    slot embeddings [b, Q, H] ─ layers: q, k, v of the slots; keys = [context ; slots] ─→ [b, Q, H]

Parameter names are the published ones. The embedding and the output head are the frozen target's:
they are passed to the objective and to decoding and are never part of the state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.drafter import dflash2
from trainer.drafter.config import SLIDING, DrafterConfig
from trainer.drafter.mask import Mask, Masks, SlotMask


class RMSNorm(nn.Module):
    """Scale by the root mean square of the last axis, reckoned in fp32, times a learned weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotation(NamedTuple):
    """cos and sin, f32 [b, L, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


def rotation(position: Tensor, head_dim: int, theta: float) -> Rotation:
    """Neox-style RoPE angles of i64 positions [b, L], over the full head."""
    exponent = torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32) / head_dim
    angle = position[..., None].float() * (1.0 / theta**exponent)
    return Rotation(angle.cos(), angle.sin())


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """``x`` [b, L, heads, head_dim]: the first half of a head pairs with the second."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class KeyValue(NamedTuple):
    """Keys (normed and rotated) and values of one layer: [b, L, kv_heads, head_dim]."""

    key: Tensor
    value: Tensor

    def followed_by(self, other: KeyValue) -> KeyValue:
        return KeyValue(
            torch.cat((self.key, other.key), dim=1), torch.cat((self.value, other.value), dim=1)
        )


class Attention(nn.Module):
    """Of slots over context and slots; queries and keys are normed by head, as Qwen3 norms them."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        width = config.hidden_size
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, context: KeyValue, by: Rotation, mask: Mask | None) -> Tensor:
        """``x`` [b, Q, H] → [b, Q, H]. ``mask`` null: every key is visible (decoding)."""
        fused = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        query, own = self.split(F.linear(x, fused), by, self.heads, isinstance(mask, SlotMask))
        return self.o_proj(attend(query, context, own, mask).flatten(2))

    def split(
        self, fused: Tensor, by: Rotation, heads: int, kernels: bool
    ) -> tuple[Tensor, KeyValue]:
        """``heads`` queries, then keys and values, [b, L, (heads + 2·kv_heads)·head_dim], as what
        attention reads: normed, weighted, rotated. ``kernels``: by ours instead of plain torch."""
        if kernels:
            from trainer.kernels.operators import split_heads

            # Nothing of the layer's own: in shards it is not gathered before the layer runs.
            unread = self.k_norm.weight.detach()
            query, key, value = split_heads(
                fused,
                self.q_norm.weight if heads else unread,
                self.k_norm.weight,
                by.cos,
                by.sin,
                self.q_norm.eps,
                heads,
                self.kv_heads,
            )
            return query, KeyValue(key, value)
        q, key, value = fused.unflatten(-1, (-1, self.head_dim)).split(
            (heads, self.kv_heads, self.kv_heads), dim=2
        )
        query = rotate(self.q_norm(q), by) if heads else q
        return query, KeyValue(rotate(self.k_norm(key), by), value)


def attend(query: Tensor, context: KeyValue, own: KeyValue, mask: Mask | None) -> Tensor:
    """[b, Q, heads, head_dim]; scores are scaled by 1/√head_dim, heads share keys in groups."""
    if isinstance(mask, SlotMask):
        from trainer.kernels.operators import slot_attention

        out: Tensor = slot_attention(query, *context, *own, *mask.seen, mask.ranges)[0]
        return out
    keys = context.followed_by(own)
    q, k, v = (t.transpose(1, 2) for t in (query, *keys))
    grouped = query.shape[2] != keys.key.shape[2]
    if isinstance(mask, BlockMask):
        flexed = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
        assert isinstance(flexed, Tensor)
        return flexed.transpose(1, 2)
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return plain.transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.fp8 = False
        """Multiply in fp8 (a GPU only): set by ``Drafter.use_fp8``."""

    def forward(self, x: Tensor) -> Tensor:
        linear: Callable[[Tensor, Tensor], Tensor] = F.linear
        if self.fp8:
            from trainer.kernels.fp8 import fp8_linear

            linear = fp8_linear
        gate, up = linear(x, self.gate_proj.weight), linear(x, self.up_proj.weight)
        return linear(F.silu(gate) * up, self.down_proj.weight)


class Layer(nn.Module):
    """Qwen3's: a norm before each sublayer, none behind. DFlash2's convolutions come after the norm
    and before the sum."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = dflash2.make_conv(config)
        self.mlp_conv = dflash2.make_conv(config)

    def forward(self, x: Tensor, context: KeyValue, by: Rotation, mask: Mask | None) -> Tensor:
        # A decoded block may be shorter than those of training: it is then one block.
        size = min(self.block_size, x.shape[1])
        hidden = self.input_layernorm(x)
        if self.attention_conv is None:
            x = x + self.self_attn(hidden, context, by, mask)
        else:
            hidden, after = self.attention_conv.prepare(hidden, size)
            out = self.self_attn(hidden, context, by, mask)
            x = x + self.attention_conv.finish(out, after, size)
        hidden = self.post_attention_layernorm(x)
        if self.mlp_conv is None:
            return x + self.mlp(hidden)
        hidden, after = self.mlp_conv.prepare(hidden, size)
        return x + self.mlp_conv.finish(self.mlp(hidden), after, size)


class Drafter(nn.Module):
    """DFlash, and DFlash2 where ``config.dflash2`` is set."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector = dflash2.make_selector(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices normal with ``initializer_range``, norms 1, DFlash2's additions at the identity.

        No smaller start for the matrices that write into the residual stream (GPT-2's habit): every
        slot but one starts as the mask token's embedding, and the less is added to it, the larger
        the first loss (SmolLM2's tied head: 54 to 68 with that habit, 25 to 39 without).
        """
        deviation = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=deviation)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        for module in self.modules():
            if isinstance(module, dflash2.GroupedDynamicCausalConv):
                module.reset_parameters()
            elif isinstance(module, dflash2.CandidateSelector):
                module.reset_parameters(deviation)

    def use_fp8(self) -> None:
        """Let the MLPs, half of a step's work, multiply in fp8: training on a GPU only."""
        for module in self.modules():
            if isinstance(module, MLP):
                module.fp8 = True

    def forward(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        context_position: Tensor,
        block_position: Tensor,
        mask: Masks,
    ) -> Tensor:
        """Hidden states of all slots, after the final norm.

        ``features`` [b, S, K·H], ``block_embeddings`` [b, Q, H], positions i64 [b, S] and [b, Q].
        """
        kernels = any(isinstance(m, SlotMask) for m in mask)
        context = self.context(features, context_position, kernels=kernels)
        return self.decode(context, block_embeddings, block_position, mask)

    def context(
        self, features: Tensor, position: Tensor, *, kernels: bool = False
    ) -> list[KeyValue]:
        """Keys and values of the context for each layer; also what decoding caches.

        The context's hidden states are the same for every layer, so all k and v projections are
        one product of 2·layers·kv_heads·head_dim columns.
        """
        hidden = self.hidden_norm(self.fc(features))
        attentions = [layer.self_attn for layer in cast(Iterable[Layer], self.layers)]
        fused = torch.cat([w for a in attentions for w in (a.k_proj.weight, a.v_proj.weight)])
        parts = F.linear(hidden, fused).chunk(len(attentions), dim=-1)
        by = self.rotation(position)
        return [a.split(part, by, 0, kernels)[1] for a, part in zip(attentions, parts, strict=True)]

    def decode(
        self, context: list[KeyValue], block_embeddings: Tensor, position: Tensor, mask: Masks
    ) -> Tensor:
        """The slots' hidden states [b, Q, H], after the final norm."""
        by = self.rotation(position)
        x = block_embeddings
        for kind, layer, cached in zip(self.config.layer_types, self.layers, context, strict=True):
            x = layer(x, cached, by, mask.sliding if kind == SLIDING else mask.full)
        return self.norm(x)

    def rotation(self, position: Tensor) -> Rotation:
        return rotation(position, self.config.head_dim, self.config.rope_theta)

    def backward_order(self) -> list[str]:
        """The parameters' names, in the order in which a backward pass finishes their gradients:
        the selector, the layers from the last to the first, and at the end what makes the context's
        keys and values, which every layer reads."""
        last = self.config.num_layers + 2

        def turn(name: str) -> int:
            first, *rest = name.split(".")
            if first == "candidate_selector":
                return 0
            if first == "norm":
                return 1
            if first != "layers" or rest[-2] in ("k_proj", "v_proj", "k_norm"):
                return last
            return last - 1 - int(rest[0])

        # Within a layer the other way round than they are defined: roughly the way back.
        return sorted(reversed([name for name, _ in self.named_parameters()]), key=turn)

    def slot_tokens(self, anchor_tokens: Tensor) -> Tensor:
        """``[anchor, MASK × (B-1)]`` for each block: i64 [...] → [..., B]."""
        filler = (*anchor_tokens.shape, self.config.block_size - 1)
        masks = anchor_tokens.new_full(filler, self.config.mask_token_id)
        return torch.cat((anchor_tokens[..., None], masks), dim=-1)

    def embed(self, tokens: Tensor, embedding: Tensor) -> Tensor:
        """Rows of the target's embedding matrix [V, H], scaled as the target scales them."""
        return F.embedding(tokens, embedding) * self.config.input_embedding_scale

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """[..., H] and the target's head [V, H] → [..., V], scaled and soft-capped."""
        scale, cap = self.config.logits_scale
        logits = F.linear(hidden, head)
        if scale != 1:
            logits = logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap
