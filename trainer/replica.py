"""One replica of the drafter with its optimizer: the drafter stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from trainer.buckets import Buckets, Finished
from trainer.config import TrainConfig
from trainer.data.batch import Batch
from trainer.drafter.by_layer import compile_parts
from trainer.drafter.config import DrafterConfig
from trainer.drafter.mask import masks_for
from trainer.drafter.model import Drafter
from trainer.graphs import Recorded
from trainer.head_loss import HeadLoss
from trainer.objective import DrafterLoss, FrozenTarget, send
from trainer.optimize import MasterAdamW
from trainer.pipeline.stages import SCALARS, Sums
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
    compiled through ``compile_``; on a CPU everything runs as written, with dense masks.

    With ``pipeline.cuda_graph`` a microbatch (forward, loss, backward) is one graph and the update
    another: a step of a small drafter is otherwise bound by launches.
    """

    def __init__(
        self,
        config: TrainConfig,
        drafter_config: DrafterConfig,
        frozen: FrozenTarget,
        steps: int,
        device: torch.device,
        *,
        head_loss: HeadLoss,
        measure_head: HeadLoss | None = None,
        start: Callable[[Drafter], None] | None = None,
        compile_: Compile | None = None,
        backward: Callable[[Tensor], None] = Tensor.backward,
    ) -> None:
        """``measure_head``: for ``measure``, where ``head_loss`` does not know every token.
        ``start`` changes the weights that training begins with, on the CPU.
        ``backward``: ``CompileLock.backward`` refuses to run where it could hang."""
        dtype = compute_dtype(config.optimization.dtype, device)
        self.backward = backward
        self.measure_head = measure_head
        self.device = device
        self.dtype = dtype
        drafter = new_drafter(drafter_config, config.seed, frozen.head)
        if start is not None:
            start(drafter)
        self.drafter = drafter.to(device)
        if config.optimization.fp8 == "head+mlp" and device.type == "cuda":
            self.drafter.use_fp8()
        order = self.drafter.backward_order()
        self.optimizer = MasterAdamW(self.drafter, config.optimization, steps, dtype, order)
        self._compile = compiled = compile_ if device.type == "cuda" else None
        self.loss = DrafterLoss(
            self.drafter,
            frozen,
            config.objective,
            masks_for(drafter_config, device, compiled),
            forward=compiled(self.drafter.forward, "drafter") if compiled else None,
            head_loss=head_loss,
        )
        self._graph = StepGraph(self) if config.pipeline.cuda_graph else None
        self._buckets: Buckets | None = None

    def buckets(self) -> list[Tensor]:
        buckets = Buckets(self.optimizer.groups, self.drafter.backward_order())
        # No hook runs when a graph is replayed: then every bucket is finished after the microbatch.
        if self._graph is None:
            buckets.watch()
            self._buckets = buckets
            if self._compile is not None:
                # One compiled call for all would hand out every gradient at once, at its end.
                compile_parts(self.drafter, self._compile)
                self.loss.forward = self.drafter
        return buckets.tensors

    def accumulate(
        self, batch: Batch, features: Tensor, finished: Finished | None = None
    ) -> Tensor:
        if self._graph is not None:
            return self._graph.accumulate(batch, features)
        # From the CPU, best: the loss then knows which rows count without asking the device.
        labels = None if batch.labels is None else batch.labels.to(self.device, non_blocking=True)
        telling = self._buckets.telling(finished) if self._buckets and finished else nullcontext()
        with telling:
            return self.learn(batch, features.to(self.dtype), labels)

    def learn(self, batch: Batch, features: Tensor, labels: Tensor | None) -> Tensor:
        """The microbatch itself; ``features`` in the computation's type."""
        found = self.loss(batch, features, labels)
        self.backward(found.loss)
        return Sums.vector(found)

    def measure(self, batch: Batch, features: Tensor) -> Tensor:
        if self._graph is not None:
            # Run plainly, it would need its activations a second time, beside the graph's.
            sums = self._graph.accumulate(batch, features)
            self.optimizer.zero()
            return sums
        # Not under no_grad, which compiled calls tell apart: a second entry beside training's, and
        # guards of such pairs fail now and then (``compile_lock.py``). The graph is dropped here.
        labels = None if batch.labels is None else batch.labels.to(self.device, non_blocking=True)
        return Sums.vector(self.loss(batch, features.to(self.dtype), labels, self.measure_head))

    def gradients(self) -> list[Tensor]:
        return self.optimizer.gradients()

    def weights(self) -> list[Tensor]:
        return self.optimizer.weights()

    def update(self, step: int, sums: Tensor) -> Tensor:
        if self._graph is not None:
            return self._graph.update(step, sums)
        return self.optimizer.step(step, sums)

    def discard(self) -> None:
        if self._graph is not None:
            self._graph.rehearse()
        self.optimizer.rehearse()

    def state(self) -> dict[str, Any]:
        return self.optimizer.state()

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load(state)

    def share(self, broadcast: Callable[[Tensor], None]) -> None:
        self.optimizer.share(broadcast)


class StepGraph:
    """A replica's microbatch and update as two graphs, with the tensors that they read."""

    def __init__(self, replica: DrafterReplica) -> None:
        self._replica = replica
        self._batch: Batch | None = None
        self._features: Tensor
        self._sums: Tensor | None = None
        self._learn: Recorded[Tensor] = Recorded(self._run, replica.device)
        self._apply: Recorded[Tensor] = Recorded(self._run_update, replica.device)

    def accumulate(self, batch: Batch, features: Tensor) -> Tensor:
        device = self._replica.device
        first = self._batch is None
        if self._batch is None:
            moved = {name: value.to(device, copy=True) for name, value in batch.tensors().items()}
            self._batch = Batch(**moved, sample_ids=batch.sample_ids)
            self._features = features.to(self._replica.dtype, copy=True)
        else:
            for name, value in self._batch.tensors().items():
                value.copy_(send(getattr(batch, name), device), non_blocking=True)
            self._features.copy_(features, non_blocking=True)
        if first:
            # Its warm-up runs have added gradients: nothing else has, this early.
            self._learn.record()
            self._replica.optimizer.zero()
        return self._learn().clone()

    def update(self, step: int, sums: Tensor) -> Tensor:
        if self._sums is None:
            return self._replica.optimizer.step(step, sums)
        self._replica.optimizer.prepare(step)
        self._sums.copy_(sums)
        return self._apply().clone()

    def rehearse(self) -> None:
        """Record the update, on sums that make it change nothing. Zeroes the gradients."""
        optimizer = self._replica.optimizer
        if self._sums is not None:
            return
        kept = optimizer.skipped.clone()
        optimizer.prepare(0)
        self._sums = torch.full((self._size(),), math.nan, device=self._replica.device)
        self._apply.record()
        optimizer.skipped.copy_(kept)

    def _size(self) -> int:
        return SCALARS + 2 * (self._replica.drafter.config.block_size - 1)

    def _run(self) -> Tensor:
        assert self._batch is not None
        return self._replica.learn(self._batch, self._features, self._batch.labels)

    def _run_update(self) -> Tensor:
        assert self._sums is not None
        return self._replica.optimizer.apply(self._sums)
