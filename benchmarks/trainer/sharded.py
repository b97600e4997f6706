"""A drafter that several devices hold together, beside one whole on each: memory, time, losses.

Part ``sharded`` of ``multi_gpu.py``: a rank a device under torchrun, all of them drafters, features
at hand, no target. Both kinds run the same steps on the same data, one after the other. What they
compile is the same, and the same as in the part ``overlap ranks``: run that first in one call.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from measure import figure, settle
from torch import Tensor
from workload import Workload

from trainer.pipeline.allreduce import AllReduce
from trainer.pipeline.costs import drafter_memory
from trainer.pipeline.stages import DrafterStage, Sums

SHARES = (1, 4)
"""Microbatches of a drafter in a step: shards gather weights and sum gradients at each."""
ROUNDS = 2
COMPARED = 4
"""Steps whose losses are compared."""


class Steps:
    """One drafter's steps on random features."""

    def __init__(self, load: Workload, stage: DrafterStage, summing: AllReduce) -> None:
        self.load, self.stage, self.summing = load, stage, summing
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        shape = (*load.batches.shape[:2], load.drafter_config.feature_size)
        random = torch.Generator(stage.device).manual_seed(self.rank)
        made = torch.randn(shape, device=stage.device, generator=random)
        self.features = made.bfloat16() if stage.device.type == "cuda" else made

    def warm_up(self) -> None:
        self.stage.accumulate(self.load.batches(0, 0), self.features)
        self.stage.discard()
        settle(self.stage.device)

    def step(self, index: int, share: int) -> Tensor:
        total: Tensor | None = None
        for number in range(share):
            batch = self.load.batches(index, self.rank + number * self.ranks)
            last = number == share - 1
            sums = self.stage.accumulate(
                batch, self.features, self.summing.finished if last else None
            )
            total = sums if total is None else total + sums
        assert total is not None
        self.summing.rest(total)
        self.stage.update(index, total)
        return total

    def losses(self) -> list[float]:
        return [Sums.read(self.step(index, 1)).mean_loss for index in range(COMPARED)]

    def seconds(self, share: int, count: int) -> float:
        """Of a step, of the slowest rank."""
        found = []
        for _ in range(ROUNDS):
            settle(self.stage.device)
            began = time.perf_counter()
            for index in range(count):
                self.step(index, share)
            settle(self.stage.device)
            found.append((time.perf_counter() - began) / count)
        slowest = torch.tensor(min(found))
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()


def run_sharded_rank(options: Any) -> None:
    """One rank under torchrun."""
    rank = int(os.environ["RANK"])
    device = torch.device(options.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    ranks = dist.get_world_size()
    load = Workload(options.shape, ranks)
    tell = figure if rank == 0 else lambda name, value: None
    tell("drafters", ranks)
    found: dict[str, list[float]] = {}
    with load.lock.thread():
        for kind in ("shard", "replica"):
            tell_planned(load, kind, ranks, tell)
            found[kind] = measure(load, kind, device, options.steps, tell)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    pairs = zip(found["shard"], found["replica"], strict=True)
    tell("largest difference of losses", max(abs(a - b) / abs(b) for a, b in pairs))
    tell("eager runs", load.lock.stats().eager_runs)
    dist.destroy_process_group()


def tell_planned(load: Workload, kind: str, ranks: int, tell: Any) -> None:
    work = load.work()
    planned = drafter_memory(work, 1, ranks if kind == "shard" else 1)
    # Head and embedding are one matrix here.
    planned -= load.drafter_config.vocab_size * load.drafter_config.hidden_size * work.drafter_bytes
    tell(f"{kind}: planned GB", planned / 1e9)


class Memory:
    """Of a device, over what it held at the start: the kind before may have left something."""

    def __init__(self, kind: str, device: torch.device, tell: Any) -> None:
        self.kind, self.device, self.tell = kind, device, tell
        self.gpu = device.type == "cuda"
        self.before = torch.cuda.memory_allocated(device) if self.gpu else 0
        self.begin()

    def begin(self) -> None:
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self, name: str) -> None:
        if self.gpu:
            self._tell(name, torch.cuda.max_memory_allocated(self.device))

    def now(self, name: str) -> None:
        if self.gpu:
            self._tell(name, torch.cuda.memory_allocated(self.device))

    def _tell(self, name: str, held: int) -> None:
        self.tell(f"{self.kind}: {name} GB", (held - self.before) / 1e9)


def measure(load: Workload, kind: str, device: torch.device, count: int, tell: Any) -> list[float]:
    memory = Memory(kind, device, tell)
    began = time.perf_counter()
    group = dist.group.WORLD
    assert group is not None
    stage = load.make_sharded(device, group) if kind == "shard" else load.make_drafter(device)
    steps = Steps(load, stage, AllReduce(stage.buckets(), group, device))
    memory.peak("peak while building")
    steps.warm_up()
    tell(f"{kind}: built and compiled s", time.perf_counter() - began)
    compiles = load.lock.stats().compiles
    losses = steps.losses()
    tell(f"{kind}: losses", losses)
    memory.now("between steps")
    memory.begin()
    for share in SHARES:
        seconds = steps.seconds(share, max(2, count // 2 // share))
        tell(f"{kind}: step of {share} microbatches a drafter, ms", seconds * 1e3)
    memory.peak("peak of a step")
    tell(f"{kind}: compiles after the first microbatch", load.lock.stats().compiles - compiles)
    memory.begin()
    if kind == "shard":
        began = time.perf_counter()
        stage.state()
        tell("shard: state gathered s", time.perf_counter() - began)
        memory.peak("peak while gathering")
    return losses
