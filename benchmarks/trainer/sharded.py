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
from measure import figure
from steps import Steps
from workload import Workload

from trainer.pipeline.allreduce import AllReduce
from trainer.pipeline.costs import drafter_memory
from trainer.pipeline.stages import Sums

SHARES = (1, 4)
"""Microbatches of a drafter in a step: shards gather weights and sum gradients at each."""
ROUNDS = 2
COMPARED = 4
"""Steps whose losses are compared."""


def slowest(steps: Steps, summing: AllReduce, share: int, count: int) -> float:
    """Seconds of a step of the slowest rank."""
    ways = summing.finished, summing.rest
    rounds = [steps.seconds(count, *ways, share=share, warm=0) for _ in range(ROUNDS)]
    found = torch.tensor(min(rounds))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


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
    summing = AllReduce(stage.buckets(), group, device)
    steps = Steps(load, stage, dist.get_rank(), dist.get_world_size())
    memory.peak("peak while building")
    steps.warm_up()
    tell(f"{kind}: built and compiled s", time.perf_counter() - began)
    compiles = load.lock.stats().compiles
    sums = [steps.step(i, summing.finished, summing.rest) for i in range(COMPARED)]
    losses = [Sums.read(vector).mean_loss for vector in sums]
    tell(f"{kind}: losses", losses)
    memory.now("between steps")
    memory.begin()
    for share in SHARES:
        seconds = slowest(steps, summing, share, max(2, count // 2 // share))
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
