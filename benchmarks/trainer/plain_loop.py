"""SpecForge 0.2.0's model, objective and optimizer in a plain loop: what ``quality.py`` meets.

One sample a row, cut or padded to S; the target's forward pass before each step; no compile beyond
SpecForge's own, no graph. Its recipe: 32 anchors a row, 48 rows, S = 384, lr 1e-3 with a cosine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.store import Samples
from trainer.drafter.config import DrafterConfig
from trainer.objective import FrozenTarget
from trainer.taps import TappedTarget

ROWS, LENGTH, ANCHORS, RATE = 48, 384, 32, 1e-3
SAMPLES = 9_833
"""What 120 s of transformers' `generate` at batch 1,024 gave (one H200, 2026-11-29)."""


class PlainLoop:
    def __init__(
        self,
        config: DrafterConfig,
        frozen: FrozenTarget,
        target: TappedTarget,
        samples: Samples,
        pad: int,
        rows: int = ROWS,
    ) -> None:
        self.target, self.samples, self.pad, self.rows = target, samples, pad, rows
        self.device = target.device
        self.count = min(SAMPLES, len(samples))
        self.model = online_model(config, frozen, self.device)
        self.optimizer: Any = None
        self._order = np.zeros(0, np.int64)
        self._epoch = -1

    def begin(self, steps: int) -> None:
        from specforge.optimizer import BF16Optimizer

        torch.manual_seed(0)
        self.optimizer = BF16Optimizer(
            self.model.draft_model, lr=RATE, max_grad_norm=1.0, total_steps=steps, warmup_ratio=0.04
        )

    def step(self, index: int) -> Tensor:
        """One optimizer step; the mean loss."""
        tokens, mask = self.batch(index)
        position = torch.arange(LENGTH, device=self.device).expand(len(tokens), -1)
        features = self.target.tap(tokens, position)
        loss: Tensor = self.model(tokens, features, mask)[0]
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            self.model.zero_grad()
        return loss.detach()

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = np.full((self.rows, LENGTH), self.pad, np.int64)
        mask = np.zeros((self.rows, LENGTH), np.float32)
        for row in range(self.rows):
            sample = self.samples[self._sample(index * self.rows + row)]
            size = min(LENGTH, len(sample.tokens))
            tokens[row, :size] = sample.tokens[:size]
            mask[row, :size] = sample.supervised[:size]
        return torch.from_numpy(tokens).to(self.device), torch.from_numpy(mask).to(self.device)

    def _sample(self, number: int) -> int:
        epoch, place = divmod(number, self.count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng(epoch).permutation(self.count)
        return int(self._order[place])

    def weights(self) -> dict[str, Tensor]:
        """By the published names."""
        state: dict[str, Tensor] = self.model.draft_model.state_dict()
        return {name: value.float() for name, value in state.items() if "rotary" not in name}


def online_model(config: DrafterConfig, frozen: FrozenTarget, device: torch.device) -> Any:
    """SpecForge's training model round a drafter of this shape, in bfloat16."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel

    torch.manual_seed(0)
    drafter = published_drafter(config, device)
    return training_model(OnlineDFlashModel, drafter, frozen, config, ANCHORS)


def published_drafter(config: DrafterConfig, device: torch.device) -> Any:
    """SpecForge's drafter of this shape, in bfloat16 and training."""
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    c = config
    hf = Qwen3Config(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        rope_theta=c.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        layer_types=list(c.layer_types),
        attn_implementation="flex_attention",
    )
    hf.num_target_layers = c.num_target_layers
    hf.block_size = c.block_size
    hf.dflash_config = {
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": list(c.target_layer_ids),
    }
    drafter = DFlashDraftModel(hf).to(device)
    # Not ``.to(bfloat16)``: that would round the buffer of RoPE frequencies too.
    for parameter in drafter.parameters():
        parameter.data = parameter.data.bfloat16()
    drafter.train()
    return drafter


def training_model(
    kind: Any, drafter: Any, frozen: FrozenTarget, config: DrafterConfig, anchors: int
) -> Any:
    """``kind`` (an ``OnlineDFlashModel``) round the drafter and the target's frozen rows."""
    head = torch.nn.Linear(1, 1, bias=False)
    head.weight = torch.nn.Parameter(frozen.head, requires_grad=False)
    embedding = torch.nn.Embedding(1, 1)
    embedding.weight = torch.nn.Parameter(frozen.embedding, requires_grad=False)
    return kind(
        drafter,
        head,
        embedding,
        config.mask_token_id,
        block_size=config.block_size,
        num_anchors=anchors,
        loss_decay_gamma=7.0,
    )
