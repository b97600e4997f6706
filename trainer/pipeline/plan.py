"""Which device plays which part: pure data, from a config, a list of devices and stage costs.

    plan = make_plan(pipeline, work, devices)      # PlanError says why the impossible is impossible
    print(plan.table())

How many devices play which part is ``split.py``'s.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.config import PipelineConfig
from trainer.pipeline.costs import Work, drafter_memory, target_memory
from trainer.pipeline.split import (
    Costs,
    Device,
    PlanError,
    SplitError,
    split_devices,
    stage_costs,
    used_devices,
)

MEMORY_SHARE = 0.92
"""Of a device: the rest is the driver's, the allocator's gaps and compiled kernels'."""

GRAPH_ADVICE = (
    "pipeline.cuda_graph lets the drafters sum their gradients after a step's last microbatch only;"
    " without it they do so while its backward pass goes on, which is faster where the kernels are"
    " long"
)


@dataclass(frozen=True)
class DrafterBytes:
    """What a drafter needs either way."""

    replica: int
    shard: int
    """One of ``shards``."""
    shards: int
    """Drafters of all nodes."""

    def line(self, sharded: bool) -> str:
        return (
            f"a drafter needs {self.replica / 1e9:.1f} GB whole and {self.shard / 1e9:.1f} GB as"
            f" one of {self.shards} shards (pipeline.shard_drafters); here it is"
            f" {'a shard' if sharded else 'whole'}"
        )


@dataclass(frozen=True)
class Plan:
    executor: str
    targets: tuple[str, ...]
    """Device of each target worker."""
    drafters: tuple[str, ...]
    queue_depth: int
    """Feature slots a drafter."""
    slot_shape: tuple[int, int, int]
    """[b, S, K·H_target]"""
    slot_bytes: int
    microbatches: int
    """Of a step, over all drafters of the run."""
    context_tokens: int
    """Of a microbatch, at most."""
    costs: Costs
    memory: Memory
    """(device, bytes needed, bytes there)."""
    reason: str
    """Why this split."""
    advice: tuple[str, ...] = ()
    stall_limit_s: float = 600.0
    check_equal_every: int = 100
    sharded: bool = False
    """All drafters of the run hold one together (``pipeline.shard_drafters``)."""
    drafter_bytes: DrafterBytes | None = None
    nodes: int = 1
    """That run this plan, each."""

    @property
    def tokens_per_s(self) -> float:
        """Context tokens a second if neither side loses anything."""
        period = self.costs.period(len(self.targets), len(self.drafters))
        if self.executor == "inline":
            period = self.costs.target_s + self.costs.drafter_s
        return self.context_tokens / period

    def as_data(self) -> dict[str, Any]:
        """For the ``plan`` event."""
        return dataclasses.asdict(self) | {"tokens_per_s": round(self.tokens_per_s, 1)}

    def table(self) -> str:
        """For people."""
        rows = [f"{'device':<10} {'part':<24} {'memory':>18}  {'a microbatch':>14}"]
        parts = _parts(self.targets, self.drafters)
        for device, needed, there in self.memory:
            cost = sum(
                self.costs.target_s if "target" in part else self.costs.drafter_s
                for part in parts[device]
            )
            limit = f" of {there / 1e9:.1f}" if there is not None else ""
            memory = f"{needed / 1e9:.1f}{limit} GB"
            name = ", ".join(parts[device])
            rows.append(f"{device:<10} {name:<24} {memory:>18}  {cost * 1e3:>11.1f} ms")
        b, s, width = self.slot_shape
        # Counted ones know neither of kept features nor of a sampled vocabulary, nor what a CPU can
        # do: the demo runs five times as fast.
        counted = self.costs.known == "counted"
        by = (
            "counted operations, for the split; no promise"
            if counted
            else "measured times, at most"
        )
        rows += [
            f"executor {self.executor}; {self.microbatches} microbatches a step, "
            f"{self.microbatches // (len(self.drafters) * self.nodes)} a drafter",
            f"{self.queue_depth} feature slots a drafter, {b} x {s} x {width} "
            f"({self.slot_bytes / 1e6:.1f} MB each)",
            f"expected {self.tokens_per_s:,.0f} context tok/s by {by}",
            f"split: {self.reason}",
            *([self.drafter_bytes.line(self.sharded)] if self.drafter_bytes else []),
            *(f"advice: {line}" for line in self.advice),
        ]
        return "\n".join(rows)


def visible_devices() -> list[Device]:
    """Every CUDA device of this process, else the CPU."""
    count = torch.cuda.device_count()
    if not count:
        return [Device("cpu", "cpu")]
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    return [Device(f"cuda:{i}", p.name, p.total_memory) for i, p in enumerate(found)]


def make_plan(
    pipeline: PipelineConfig,
    work: Work,
    devices: Sequence[Device] | None = None,
    nodes: int = 1,
) -> Plan:
    """``devices`` are those present (default: ``visible_devices()``); the config may name fewer, or
    one twice. ``nodes`` run the same plan. Raises PlanError."""
    present = {d.name: d for d in (visible_devices() if devices is None else devices)}
    used = used_devices(pipeline, present)
    costs = stage_costs(pipeline, work, used[0])
    targets, drafters, reason, advice = split_devices(pipeline, work, used, costs, nodes)
    shards = len(drafters) * nodes
    if work.microbatches % shards:
        where = f" on {nodes} nodes" if nodes > 1 else ""
        raise SplitError(
            f"optimization.microbatches is {work.microbatches}, not a multiple of"
            f" {shards} drafters{where}: they could not take the same number each",
            next_step=f"set it to {-(-work.microbatches // shards) * shards}, or"
            " pipeline.drafters to one of its divisors",
        )
    if pipeline.cuda_graph and shards > 1:
        advice += (GRAPH_ADVICE,)
    memory = _room(pipeline, work, (targets, drafters), present, shards)
    return Plan(
        executor=pipeline.executor,
        targets=targets,
        drafters=drafters,
        queue_depth=pipeline.queue_depth,
        slot_shape=(work.rows, work.length, work.drafter.feature_size),
        slot_bytes=work.feature_slot_bytes,
        microbatches=work.microbatches,
        context_tokens=work.context_tokens,
        costs=costs,
        memory=memory,
        reason=reason,
        advice=advice,
        stall_limit_s=pipeline.stall_limit_s,
        check_equal_every=pipeline.check_equal_every,
        sharded=pipeline.shard_drafters,
        drafter_bytes=_both_ways(pipeline, work, shards),
        nodes=nodes,
    )


def _parts(targets: Sequence[str], drafters: Sequence[str]) -> dict[str, list[str]]:
    """Device → its workers' names."""
    parts: dict[str, list[str]] = {}
    for i, device in enumerate(targets):
        parts.setdefault(device, []).append(f"target {i}")
    for i, device in enumerate(drafters):
        parts.setdefault(device, []).append(f"drafter {i}")
    return parts


Memory = tuple[tuple[str, int, int | None], ...]
"""``Plan.memory``."""


def _room(
    pipeline: PipelineConfig,
    work: Work,
    parts: tuple[Sequence[str], Sequence[str]],
    present: dict[str, Device],
    shards: int,
) -> Memory:
    """What each device needs, or PlanError. ``shards``: drafters that may hold one together."""
    if pipeline.shard_drafters and shards == 1:
        raise SplitError(
            "pipeline.shard_drafters lets several drafters hold one together, and there is one",
            next_step="ask for more by pipeline.drafters, or leave out shard_drafters",
        )
    whole, cut = (_memory(pipeline, work, parts, present, m) for m in (1, shards))
    memory = cut if pipeline.shard_drafters else whole
    short = _short(memory)
    if short is None:
        return memory
    name, needed, there = memory[short]
    step = (
        "lower optimization.rows, data.sequence_length or data.anchors, or give target and drafter"
        " devices of their own"
    )
    if not pipeline.shard_drafters and shards > 1 and _short(cut) is None:
        processes = "" if pipeline.executor == "processes" else "pipeline.executor: processes and "
        step = (
            f"set {processes}pipeline.shard_drafters: true; the {shards} drafters then hold one"
            f" together, and {name} needs about {cut[short][1] / 1e9:.1f} GB"
        )
    raise PlanError(
        f"{name} would need about {needed / 1e9:.1f} GB for"
        f" {' and '.join(_parts(*parts)[name])} and has {(there or 0) / 1e9:.1f} GB",
        next_step=step,
    )


def _short(memory: Memory) -> int | None:
    """The first device that has too little."""
    room = [there is None or needed <= MEMORY_SHARE * there for _, needed, there in memory]
    return None if all(room) else room.index(False)


def _both_ways(pipeline: PipelineConfig, work: Work, shards: int) -> DrafterBytes | None:
    if pipeline.executor != "processes" or shards == 1:
        return None
    replica, shard = (drafter_memory(work, pipeline.queue_depth, m) for m in (1, shards))
    return DrafterBytes(replica, shard, shards)


def _memory(
    pipeline: PipelineConfig,
    work: Work,
    parts: tuple[Sequence[str], Sequence[str]],
    present: dict[str, Device],
    shards: int,
) -> Memory:
    targets, drafters = parts
    # Within a process a target is loaded once a device; ranks share none.
    loaded: set[str] = set()
    need: Counter[str] = Counter()
    for device in targets:
        staging = any(d != device for d in drafters) and device != "cpu"
        need[device] += target_memory(work, staging=staging, beside=device in loaded)
        if pipeline.executor != "processes":
            loaded.add(device)
    for device in drafters:
        beside = device in loaded
        need[device] += drafter_memory(work, pipeline.queue_depth, shards, beside=beside)
    return tuple((name, size, present[name].memory_bytes) for name, size in need.items())
