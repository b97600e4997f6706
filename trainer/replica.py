"""One replica of the drafter with its optimizer: the drafter stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.config import TrainConfig
from trainer.data.batch import Batch
from trainer.drafter.config import DrafterConfig
from trainer.drafter.mask import masks_for
from trainer.drafter.model import Drafter
from trainer.head_loss import HeadLoss
from trainer.objective import DrafterLoss, FrozenTarget
from trainer.optimize import MasterAdamW
from trainer.pipeline.stages import Sums
from trainer.target import compute_dtype

Compile = Callable[..., Any]
"""``CompileLock.compile``: (function, name) → the function, compiled."""


def new_drafter(config: DrafterConfig, seed: int, head: Tensor) -> Drafter:
    """On the CPU in fp32, the same for every replica and device.

    ``head`` is the target's, [V, H]. The final norm starts at the scale where logits have unit
    deviation: a head tied to a large-norm embedding otherwise starts at a loss of 84 instead of
    ln V + 0.5 = 11.3, and the first hundreds of steps only shrink it (seen with SmolLM2-135M).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
    # Three digits: the mean's last bits depend on the device it is taken on.
    deviation = float(f"{head.float().norm(dim=-1).mean().item():.3g}")
    torch.nn.init.constant_(drafter.norm.weight, 1.0 / deviation)
    return drafter


class DrafterReplica:
    """``DrafterStage`` (``pipeline/stages.py``). On a GPU the forward pass and the mask's tiles are
    compiled through ``compile_``; on a CPU everything runs as written, with dense masks."""

    def __init__(
        self,
        config: TrainConfig,
        drafter_config: DrafterConfig,
        frozen: FrozenTarget,
        steps: int,
        device: torch.device,
        *,
        head_loss: HeadLoss,
        start: Callable[[Drafter], None] | None = None,
        compile_: Compile | None = None,
        backward: Callable[[Tensor], None] = Tensor.backward,
    ) -> None:
        """``start`` changes the weights that training begins with, on the CPU.
        ``backward``: ``CompileLock.backward`` refuses to run where it could hang."""
        dtype = compute_dtype(config.optimization.dtype, device)
        self.backward = backward
        self.device = device
        self.dtype = dtype
        drafter = new_drafter(drafter_config, config.seed, frozen.head)
        if start is not None:
            start(drafter)
        self.drafter = drafter.to(device)
        if config.optimization.fp8 == "head+mlp" and device.type == "cuda":
            self.drafter.use_fp8()
        self.optimizer = MasterAdamW(self.drafter, config.optimization, steps, dtype)
        compiled = compile_ if device.type == "cuda" else None
        self.loss = DrafterLoss(
            self.drafter,
            frozen,
            config.objective,
            masks_for(drafter_config, device, compiled),
            forward=compiled(self.drafter.forward, "drafter") if compiled else None,
            head_loss=head_loss,
        )

    def accumulate(self, batch: Batch, features: Tensor) -> Tensor:
        # From the CPU, best: the loss then knows which rows count without asking the device.
        labels = None if batch.labels is None else batch.labels.to(self.device, non_blocking=True)
        found = self.loss(batch, features.to(self.dtype), labels)
        self.backward(found.loss)
        return Sums.vector(found)

    def gradients(self) -> list[Tensor]:
        return self.optimizer.gradients()

    def weights(self) -> list[Tensor]:
        return self.optimizer.weights()

    def update(self, step: int, sums: Tensor) -> Tensor:
        return self.optimizer.step(step, sums)

    def discard(self) -> None:
        self.optimizer.zero()

    def state(self) -> dict[str, Any]:
        return self.optimizer.state()

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load(state)
