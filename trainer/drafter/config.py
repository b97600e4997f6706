"""Every dimension of a drafter, stated; nothing is left to a library's default.

A drafter borrows the target's embedding, output head and vocabulary, so its width must be the
target's. Everything else that public trainers inherited by accident (heads, head width, RoPE base,
norm epsilon, partial rotary factor) is a field here and is written into every export.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LayerType = Literal["full_attention", "sliding_attention"]
FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"
ABSENT = object()
"""Of a field that this kind of target does not state under the usual name."""


def tapped_layers(target_layers: int, count: int) -> list[int]:
    """0-based ids of the target layers whose *outputs* feed a drafter of ``count`` taps.

    The published rule: evenly spaced from layer 1 to layer L-3. ``tapped_layers(36, 5)`` is
    ``[1, 9, 17, 25, 33]``; one tap takes the middle.
    """
    if count == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count)]


class Dflash2Config(BaseModel):
    """The parts DFlash2 adds: a convolution round each sublayer and a candidate selector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    conv_kernel_size: int = Field(2, ge=1)
    """Taps of the causal convolution, the current slot included."""
    conv_group_size: int = Field(16, ge=1)
    """Channels that share one dynamic kernel; divides ``hidden_size``."""
    selector_rank: int = Field(256, ge=1)
    """Width of the two codebooks."""
    selector_top_k: int = Field(16, ge=2)
    """Candidates kept per slot; the selector chooses among them left to right."""


class DrafterConfig(BaseModel):
    """A drafter, complete: two runs with equal configs build equal modules."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: int = Field(gt=0)
    """Equal to the target's: the embedding and the output head are the target's own."""
    intermediate_size: int = Field(gt=0)
    """Width of the gated MLPs."""
    num_layers: int = Field(gt=0)
    """Draft layers."""
    num_heads: int = Field(gt=0)
    """Query heads."""
    num_kv_heads: int = Field(gt=0)
    """Key and value heads; each serves ``num_heads / num_kv_heads`` query heads."""
    head_dim: int = Field(gt=0)
    """Width of one head, even: RoPE rotates pairs."""
    vocab_size: int = Field(gt=0)
    """Rows of the target's embedding."""
    rope_theta: float = Field(gt=0)
    """RoPE base, neox style over the full head; the same in training and in every export."""
    rms_norm_eps: float = Field(gt=0)
    """Added to the mean square in every norm."""
    max_position_embeddings: int = Field(gt=0)
    """Longest context, in tokens, as the target states it."""
    block_size: int = Field(16, ge=2)
    """Slots of a block: the anchor and ``block_size - 1`` predictions."""
    mask_token_id: int = Field(ge=0)
    """The token that stands in the slots to predict."""
    target_layer_ids: tuple[int, ...]
    """0-based ids of the target layers whose outputs are the features, in concatenation order."""
    num_target_layers: int = Field(gt=0)
    """Layers of the target; every tapped id is below it."""
    target_hidden_size: int = Field(gt=0)
    """Width of one tapped output."""
    layer_types: tuple[LayerType, ...]
    """One a draft layer."""
    sliding_window: int | None = Field(None, ge=1)
    """Keys that a slot of a sliding layer sees, itself included; needed by sliding layers only."""
    input_embedding_scale: float = Field(1.0, gt=0)
    """Factor on the raw embedding rows (Gemma multiplies by the square root of its width)."""
    output_multiplier: float = Field(1.0, gt=0)
    """Factor on the logits, before the soft cap."""
    final_logit_softcapping: float | None = Field(None, gt=0)
    """``c·tanh(logits / c)``, as some targets do; null leaves the logits alone."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the matrices at the start."""
    dflash2: Dflash2Config | None = None
    """DFlash2's parts; null is plain DFlash."""

    @model_validator(mode="after")
    def _fits_itself(self) -> DrafterConfig:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> list[str]:
        found = []
        if self.num_heads % self.num_kv_heads:
            found.append(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            found.append(f"head_dim {self.head_dim} is odd; RoPE rotates pairs")
        if self.mask_token_id >= self.vocab_size:
            found.append(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
                " rows; choose an unused id below it"
            )
        if len(self.layer_types) != self.num_layers:
            found.append(
                f"layer_types has {len(self.layer_types)} entries for num_layers {self.num_layers}"
            )
        if SLIDING in self.layer_types and self.sliding_window is None:
            found.append("sliding_window is null although layer_types has sliding_attention")
        if not self.target_layer_ids:
            found.append("target_layer_ids is empty")
        if list(self.target_layer_ids) != sorted(set(self.target_layer_ids)):
            found.append(
                f"target_layer_ids {list(self.target_layer_ids)} must rise, without repeats: state"
                f" others, or fewer num_layers for the target's {self.num_target_layers} layers"
            )
        outside = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if outside:
            found.append(
                f"target_layer_ids {outside} are outside the target's"
                f" {self.num_target_layers} layers"
            )
        if self.hidden_size != self.target_hidden_size:
            found.append(
                f"hidden_size {self.hidden_size} differs from the target's"
                f" {self.target_hidden_size}; the drafter shares the target's embedding and head"
            )
        if self.dflash2 and self.hidden_size % self.dflash2.conv_group_size:
            found.append(
                f"conv_group_size {self.dflash2.conv_group_size} does not divide hidden_size"
                f" {self.hidden_size}"
            )
        if self.dflash2 and self.dflash2.selector_top_k > self.vocab_size:
            found.append(
                f"selector_top_k {self.dflash2.selector_top_k} exceeds the vocabulary of"
                f" {self.vocab_size}"
            )
        return found

    @property
    def feature_size(self) -> int:
        """Width of one row of features: the tapped outputs side by side."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def logits_scale(self) -> tuple[float, float | None]:
        """(multiplier, soft cap) between ``hidden @ head.T`` and the logits."""
        return self.output_multiplier, self.final_logit_softcapping

    @classmethod
    def for_target(
        cls,
        target: Any,
        *,
        mask_token_id: int,
        num_layers: int = 5,
        block_size: int = 16,
        **overrides: Any,
    ) -> DrafterConfig:
        """The published choice for a target: its width, heads, MLP, RoPE base and epsilon.

        ``target`` is a transformers configuration (composite ones give their text part).
        ``overrides`` replace single fields. Raises ``ValueError`` (pydantic's) with every misfit.
        """
        fields = (
            for_target_fields(target, num_layers)
            | {"mask_token_id": mask_token_id, "block_size": block_size}
            | overrides
        )
        absent = [name for name, value in fields.items() if value is ABSENT]
        if absent:
            raise ValueError(
                f"its {type(text_config(target)).__name__} states no {', '.join(absent)}"
            )
        return cls.model_validate(fields)

    def misfits(self, target: Any) -> list[str]:
        """Why this drafter cannot serve ``target``; empty when it can. Each names both values."""
        text = text_config(target)
        wanted = {
            "vocab_size": text.vocab_size,
            "target_hidden_size": text.hidden_size,
            "num_target_layers": text.num_hidden_layers,
            "rope_theta": stated_rope_base(text),
        }
        return [
            f"{name}: the drafter has {getattr(self, name)}, the target {value}"
            for name, value in wanted.items()
            if getattr(self, name) != value
        ]


def text_config(target: Any) -> Any:
    """The language part of a transformers configuration (Gemma 3 and others nest it)."""
    getter = getattr(target, "get_text_config", None)
    return getter() if getter is not None else target


def rope_base(text: Any) -> float:
    """As ``stated_rope_base``, of a target that must have one: falling back to 10,000 is how others
    trained one model and served another."""
    base = stated_rope_base(text)
    if base is None:
        raise ValueError(f"no rope_theta in the target's {type(text).__name__}")
    return base


def stated_rope_base(text: Any) -> float | None:
    """The target's RoPE base, wherever this generation of transformers keeps it.

    transformers 5 moved ``rope_theta`` into ``rope_parameters``, which may again be keyed by layer
    type (Gemma 3: the full-attention layers' base is the one that spans the context).
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    if FULL in parameters:
        parameters = parameters[FULL]
    base = parameters.get("rope_theta") or getattr(text, "rope_theta", None)
    return None if base is None else float(base)


def for_target_fields(target: Any, num_layers: int) -> dict[str, Any]:
    """The fields of a drafter's config that follow from its target."""
    text = text_config(target)
    rope = rope_base(text)
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    # Gemma multiplies embedding rows by sqrt(width) inside its embedding module.
    scaled = "gemma" in (getattr(text, "model_type", "") or "")
    return {
        "hidden_size": text.hidden_size,
        "intermediate_size": getattr(text, "intermediate_size", ABSENT),
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "vocab_size": text.vocab_size,
        "rope_theta": rope,
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
        "max_position_embeddings": getattr(text, "max_position_embeddings", ABSENT),
        "target_layer_ids": tuple(tapped_layers(layers, num_layers)),
        "num_target_layers": layers,
        "target_hidden_size": text.hidden_size,
        "layer_types": (FULL,) * num_layers,
        "input_embedding_scale": text.hidden_size**0.5 if scaled else 1.0,
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
    }
