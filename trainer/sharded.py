"""A drafter that no device holds as a whole: the drafter stage on torch's own FSDP2.

Each of M drafters keeps 1/M of the fp32 masters, of both moments and of the gradient, 16 bytes a
parameter in all. A layer's weights are gathered in the computation's type before they are used, in
the forward pass and again in backward, and freed after; its gradient is summed in fp32 as soon as
its backward is done. At Qwen3-8B's shape that is 16.8 GB / M and 3.9 GB for the layers at hand
(``pipeline/costs.py``), where a replica keeps 16.8 GB.

Gradients are summed at **every** microbatch. To add microbatches up first, FSDP2 keeps a whole
gradient in fp32 (4.2 GB at that shape, more than the bf16 one of a replica), which is what this is
meant to avoid; the price is traffic, a gradient each microbatch instead of one a step.

All drafters run the same collectives in the same order, so each has to take as many microbatches,
and one without a single valid anchor runs forward and backward like the others, on a zero loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from trainer.buckets import Finished
from trainer.checkpoint import KINDS, fitting
from trainer.config import OptimizationConfig, TrainConfig
from trainer.data.batch import Batch
from trainer.drafter.by_layer import compile_parts
from trainer.drafter.config import DrafterConfig
from trainer.drafter.mask import masks_for
from trainer.drafter.model import Drafter, Layer
from trainer.head_loss import HeadLoss
from trainer.objective import DrafterLoss, FrozenTarget
from trainer.optimize import clipped, decays, learning_rate
from trainer.pipeline.stages import WEIGHT_SUM, Sums
from trainer.replica import Compile, new_drafter
from trainer.target import compute_dtype


class ShardedDrafter:
    """``DrafterStage`` of one of the drafters in ``group``, all of which call the same methods at
    the same time: ``accumulate``, ``measure``, ``update``, ``discard``, ``state`` and ``share`` are
    collective.

    ``state`` gives whole tensors, to the first of the group alone; ``load`` keeps them until
    ``share`` has cut them up. Checkpoints are a replica's: either kind of run continues the
    other's, on any number of drafters.
    """

    def __init__(
        self,
        config: TrainConfig,
        drafter_config: DrafterConfig,
        frozen: FrozenTarget,
        steps: int,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        head_loss: HeadLoss,
        measure_head: HeadLoss | None = None,
        start: Callable[[Drafter], None] | None = None,
        compile_: Compile | None = None,
        backward: Callable[[Tensor], None] = Tensor.backward,
    ) -> None:
        """As ``DrafterReplica``."""
        self.backward = backward
        self.measure_head = measure_head
        self.device = device
        self.dtype = compute_dtype(config.optimization.dtype, device)
        drafter = new_drafter(drafter_config, config.seed, frozen.head)
        if start is not None:
            start(drafter)
        # From the CPU: a device meets one layer at a time in fp32, and keeps its shard.
        shard(drafter, DeviceMesh.from_group(group, device.type), self.dtype)
        self.drafter = drafter
        self.optimizer = ShardedAdamW(drafter, config.optimization, steps, group)
        self._loaded: dict[str, Any] | None = None
        compiled = compile_ if device.type == "cuda" else None
        if compiled is not None:
            # The hooks that gather and free weights run around compiled calls, never inside one.
            compile_parts(drafter, compiled)
        self.loss = DrafterLoss(
            drafter,
            frozen,
            config.objective,
            masks_for(drafter_config, device, compiled),
            head_loss=head_loss,
        )

    def accumulate(
        self, batch: Batch, features: Tensor, finished: Finished | None = None
    ) -> Tensor:
        labels = None if batch.labels is None else batch.labels.to(self.device, non_blocking=True)
        found = self.loss(batch, features.to(self.dtype), labels)
        self.backward(found.loss)
        return Sums.vector(found)

    def measure(self, batch: Batch, features: Tensor) -> Tensor:
        labels = None if batch.labels is None else batch.labels.to(self.device, non_blocking=True)
        sums = Sums.vector(self.loss(batch, features.to(self.dtype), labels, self.measure_head))
        # What backward would free: kept gathered, it would be read in place of weights that
        # ``share`` or an update has changed meanwhile.
        for module in self.drafter.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return sums

    def gradients(self) -> list[Tensor]:
        """None: they are summed already."""
        return []

    def buckets(self) -> list[Tensor]:
        return []

    def weights(self) -> list[Tensor]:
        """Shards differ; what all hold alike is how many steps changed nothing."""
        return [self.optimizer.skipped]

    def update(self, step: int, sums: Tensor) -> Tensor:
        return self.optimizer.step(step, sums)

    def discard(self) -> None:
        self.optimizer.rehearse()

    def state(self) -> dict[str, Any]:
        return self.optimizer.state()

    def load(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def share(self, broadcast: Callable[[Tensor], None]) -> None:
        self.optimizer.share(self._loaded, broadcast)
        self._loaded = None


def early(drafter: Drafter) -> nn.ModuleList:
    """The parts of every layer that make the context's keys and values."""
    attentions = [layer.self_attn for layer in cast(Iterable[Layer], drafter.layers)]
    return nn.ModuleList([m for a in attentions for m in (a.k_proj, a.v_proj, a.k_norm)])


def shard(drafter: Drafter, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """In place; moves it to the mesh's device. Gradients become sums, not means, over the mesh.

    A layer is one unit of gathering, and what is not in a layer another. With the latter go the
    parts of every layer that make the context's keys and values: the context is reckoned before the
    first layer runs. It stays gathered between forward and backward, because the selector reads its
    weights in between, outside the drafter's forward pass.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        # Rotations are fp32 and stay so.
        cast_forward_inputs=False,
    )
    layers = list(cast(Iterable[Layer], drafter.layers))
    drafters_own = early(drafter)
    for layer in layers:
        fully_shard(
            layer,
            mesh=mesh,
            # Backward begins with the last one: it would be gathered again at once.
            reshard_after_forward=layer is not layers[-1],
            mp_policy=policy,
            ignored_params=set(drafters_own.parameters()),
        )
    # Found here too, they belong to the drafter as a whole; their names stay the layers'.
    drafter.early = drafters_own
    fully_shard(drafter, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for module in drafter.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A plain sum: gloo knows no other, and NCCL's scaled sum would scale by one.
            module.set_force_sum_reduction_for_comms(True)


class ShardedAdamW:
    """The formula of ``MasterAdamW``, by torch's fused kernel, on the shards of one drafter.

    Everything that decides over a step (the gradient's norm, whether it is finite) is known to all
    alike, so all take it or none.
    """

    def __init__(
        self, drafter: Drafter, config: OptimizationConfig, steps: int, group: dist.ProcessGroup
    ) -> None:
        self.config = config
        self.steps = steps
        self.group = group
        masters = {n: cast(DTensor, p) for n, p in drafter.named_parameters() if p.requires_grad}
        self.kinds: dict[str, dict[str, DTensor]] = {
            "master": masters,
            "average": {n: cast(DTensor, torch.zeros_like(p)) for n, p in masters.items()},
            "square": {n: cast(DTensor, torch.zeros_like(p)) for n, p in masters.items()},
        }
        self.decays = {n: config.weight_decay if decays(p) else 0.0 for n, p in masters.items()}
        self.device = next(iter(masters.values())).device
        self.skipped = torch.zeros((), device=self.device)
        self._done = torch.zeros(len(masters), device=self.device)
        """Steps, as torch counts them: a value for each parameter."""

    @torch.no_grad()
    def step(self, step: int, sums: Tensor) -> Tensor:
        """As ``MasterAdamW.step``; ``sums`` are those of all drafters."""
        gradients = {name: self._gradient(name) for name in self.kinds["master"]}
        norm, coefficient = clipped(self._norm(list(gradients.values())), sums, self.config.clip)
        stop = (~coefficient.isfinite()).float()
        self.skipped += stop
        for gradient in gradients.values():
            gradient.mul_(coefficient)
        self._apply(step, gradients, stop)
        self.zero()
        return norm

    def rehearse(self) -> None:
        """An update that changes nothing but the gradients, which it forgets: what it needs is
        loaded and connected afterwards."""
        kept = self.skipped.clone()
        self.step(0, torch.full((WEIGHT_SUM + 1,), math.nan, device=self.device))
        self.skipped.copy_(kept)

    def zero(self) -> None:
        for master in self.kinds["master"].values():
            master.grad = None

    def state(self) -> dict[str, Any]:
        """``MasterAdamW.state`` on the first of the group, else empty. One whole tensor at a time
        lies on the devices."""
        leads = self.group.rank() == 0
        state: dict[str, Any] = {"skipped": int(self.skipped)}
        for kind in KINDS:
            kept = state[kind] = {}
            for name, part in self.kinds[kind].items():
                whole = cast(DTensor, part.detach()).full_tensor()
                if leads:
                    kept[name] = whole.cpu().contiguous()
        return state if leads else {}

    @torch.no_grad()
    def share(self, loaded: dict[str, Any] | None, broadcast: Callable[[Tensor], None]) -> None:
        """Everybody's shards of what the one that has ``loaded`` something holds; one whole tensor
        at a time lies on the devices."""
        for kind in KINDS:
            for name, part in self.kinds[kind].items():
                if loaded is None:
                    whole = torch.empty(part.shape, dtype=part.dtype, device=self.device)
                else:
                    whole = fitting(loaded, kind, name, part.shape).to(self.device, part.dtype)
                broadcast(whole)
                mine = distribute_tensor(whole, part.device_mesh, [Shard(0)], src_data_rank=None)
                part.to_local().copy_(mine.to_local())
        if loaded is not None:
            self.skipped.fill_(loaded["skipped"])
        broadcast(self.skipped)
        self.zero()

    def _gradient(self, name: str) -> Tensor:
        master = self.kinds["master"][name]
        if master.grad is None:
            return torch.zeros_like(master.to_local())
        return cast(DTensor, master.grad).to_local()

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """Of the whole gradient; before it is divided."""
        square = get_total_norm([g for g in gradients if g.numel()]).to(self.device).square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def _apply(self, step: int, gradients: dict[str, Tensor], stop: Tensor) -> None:
        """torch's count of steps goes on when one is skipped, as ours does: it is set each time."""
        self._done.fill_(step)
        done = dict(zip(gradients, self._done.unbind(), strict=True))
        for decay in set(self.decays.values()):
            # A shard is empty where a tensor has fewer rows than there are drafters.
            names = [n for n, g in gradients.items() if self.decays[n] == decay and g.numel()]
            masters, averages, squares = (
                [self.kinds[kind][name].to_local() for name in names] for kind in KINDS
            )
            adamw(
                masters,
                [gradients[name] for name in names],
                averages,
                squares,
                [],
                [done[name] for name in names],
                fused=True,
                found_inf=stop,
                amsgrad=False,
                maximize=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=learning_rate(self.config, step, self.steps),
                weight_decay=decay,
                eps=self.config.epsilon,
            )
