"""A drafter small enough for a CPU, a batch for it, and both made from a seed."""

from __future__ import annotations

from typing import Any

import torch

from trainer.data.batch import Batch
from trainer.drafter.config import FULL, SLIDING, Dflash2Config, DrafterConfig
from trainer.drafter.model import Drafter

SECOND = Dflash2Config(conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=5)
MIXED = (FULL, SLIDING)


def tiny_config(**changes: Any) -> DrafterConfig:
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 40,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "block_size": 4,
        "mask_token_id": 39,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
        "target_hidden_size": 32,
        "layer_types": (FULL, FULL),
    }
    return DrafterConfig.model_validate(fields | changes)


def noisy_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    """Every parameter random, so that none is at a value that hides a fault (ones, zeros)."""
    drafter = Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return drafter


def packed_batch(lengths: list[int], anchors: list[int], padding: int = 0) -> Batch:
    """One row of documents of ``lengths``; all supervised; an anchor of -1 is an unused block."""
    document = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    position = [p for n in lengths for p in range(n)] + list(range(padding))
    size = len(document)
    generator = torch.Generator().manual_seed(size)
    return Batch(
        tokens=torch.randint(0, 39, (1, size), generator=generator),
        document=torch.tensor([document], dtype=torch.int32),
        position=torch.tensor([position]),
        supervised=torch.tensor([[d >= 0 for d in document]]),
        anchors=torch.tensor([[a if a >= 0 else size - 1 for a in anchors]]),
        anchor_valid=torch.tensor([[a >= 0 for a in anchors]]),
        sample_ids=(tuple(range(len(lengths))),),
    )
