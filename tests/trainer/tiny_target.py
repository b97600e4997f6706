"""Targets small enough for a test: random weights, a byte-level tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SPECIAL = ["<pad>", "<s>", "</s>", "<mask>"]
VOCABULARY = 256 + len(SPECIAL) + 4

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=8, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**SHAPE, sliding_window=8, query_pre_attn_scalar=8),
    "mistral": MistralConfig(**SHAPE, sliding_window=8),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ message['content'] }}</s>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_model(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A causal LM with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    implementation = "eager" if kind == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation=implementation)
    return model.eval().to(dtype).requires_grad_(False)


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """One token a byte; the special tokens first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
        chat_template=template,
    )


def save_target(folder: Path, kind: str = "llama", template: str | None = TEMPLATE) -> Path:
    """A folder that `from_pretrained` reads."""
    make_model(kind).save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


def write_chats(path: Path, count: int) -> Path:
    """Short conversations, each different."""
    with path.open("w", encoding="utf-8") as stream:
        for number in range(count):
            messages = [
                {"role": "user", "content": f"count from {number}"},
                {"role": "assistant", "content": " ".join(str(number + i) for i in range(6))},
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return path


def make_home(folder: Path) -> Path:
    """``folder`` with a target and chats, as ``run_config`` names them."""
    save_target(folder / "target")
    write_chats(folder / "chats.jsonl", 40)
    return folder


def run_config(home: Path, /, **changes: Any) -> dict[str, Any]:
    """A whole training config on a saved tiny target; ``changes`` replace sections' keys."""
    tree: dict[str, Any] = {
        "target": {"model": str(home / "target")},
        "drafter": {"num_layers": 1, "block_size": 4, "intermediate_size": 32},
        "data": {
            "files": [str(home / "chats.jsonl")],
            "sequence_length": 64,
            "anchors": 8,
            "held_out": 0.2,
        },
        "optimization": {"steps": 20, "rows": 2, "learning_rate": 1e-3},
        "checkpoint": {"every": 5, "validate_batches": 1},
        "folder": str(home / "run"),
        "log_every": 5,
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    return tree
