"""Which device plays which part: pure data, from a config, a list of devices and stage costs.

    plan = make_plan(pipeline, work, devices)      # PlanError says why the impossible is impossible
    print(plan.table())

``auto`` takes the split with the least time a microbatch: N targets and M drafters hand one over
every max(target / N, drafter / M) seconds. Costs are counted operations; what the stages
take in truth, and the split that this asks for, is in each step's line (``gauge.py``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.config import PipelineConfig
from trainer.errors import TrainerError
from trainer.pipeline.costs import (
    Work,
    drafter_flop,
    drafter_memory,
    target_flop,
    target_memory,
)

RATES = {"H200": 560e12, "H100": 530e12, "A100": 210e12, "cpu": 5e10}
"""Operations a second that a stage reaches in bf16 (0.7 of what large products reach), by device
name; only ratios matter for a split. Unlisted devices count as an A100."""

MEMORY_SHARE = 0.92
"""Of a device: the rest is the driver's, the allocator's gaps and compiled kernels'."""

GRAPH_ADVICE = (
    "pipeline.cuda_graph lets the drafters sum their gradients after a step's last microbatch only;"
    " without it they do so while its backward pass goes on, which is faster where the kernels are"
    " long"
)


class PlanError(TrainerError):
    """The devices cannot run what the config asks for."""

    exit_code = 4


class SplitError(PlanError):
    """No devices could: the config contradicts itself."""

    exit_code = 2


@dataclass(frozen=True)
class Device:
    name: str
    """As torch spells it: ``cuda:0``, ``cpu``."""
    model: str = ""
    memory_bytes: int | None = None
    """Null where there is no limit worth planning with (a CPU)."""

    @property
    def rate(self) -> float:
        known = [rate for part, rate in RATES.items() if part in f"{self.model} {self.name}"]
        return known[0] if known else RATES["A100"]


@dataclass(frozen=True)
class Costs:
    """Seconds of one microbatch."""

    target_s: float
    drafter_s: float

    def period(self, targets: int, drafters: int) -> float:
        """Seconds from one microbatch to the next, with that many of each."""
        return max(self.target_s / targets, self.drafter_s / drafters)


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
            limit = f"{there / 1e9:.1f} GB" if there is not None else "-"
            memory = f"{needed / 1e9:.1f} of {limit}"
            name = ", ".join(parts[device])
            rows.append(f"{device:<10} {name:<24} {memory:>18}  {cost * 1e3:>11.1f} ms")
        b, s, width = self.slot_shape
        rows += [
            f"executor {self.executor}; {self.microbatches} microbatches a step, "
            f"{self.microbatches // (len(self.drafters) * self.nodes)} a drafter; "
            f"{self.queue_depth} feature slots a drafter, {b} x {s} x {width} "
            f"({self.slot_bytes / 1e6:.1f} MB each)",
            f"expected {self.tokens_per_s:,.0f} context tok/s at most (counted costs)",
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


def counted_costs(work: Work, device: Device) -> Costs:
    return Costs(target_flop(work) / device.rate, drafter_flop(work)[1] / device.rate)


def make_plan(
    pipeline: PipelineConfig,
    work: Work,
    devices: Sequence[Device] | None = None,
    nodes: int = 1,
) -> Plan:
    """``devices`` are those present (default: ``visible_devices()``); the config may name fewer, or
    one twice. ``nodes`` run the same plan. Raises PlanError."""
    present = {d.name: d for d in (visible_devices() if devices is None else devices)}
    used = _devices(pipeline, present)
    costs = counted_costs(work, used[0])
    targets, drafters, reason, advice = _split(pipeline, work, used, costs, nodes)
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


def recommend(costs: Costs, devices: int) -> tuple[int, int]:
    """(targets, drafters) of so many devices with the least time a microbatch; of equal ones the
    one with more drafters, which need not wait for features."""
    if devices < 2:
        return 1, 1
    splits = [(n, devices - n) for n in range(1, devices)]
    return min(splits, key=lambda split: (costs.period(*split), split[0]))


def _devices(pipeline: PipelineConfig, present: dict[str, Device]) -> list[Device]:
    if pipeline.devices == "auto":
        found = list(present.values())
        return found[:1] if pipeline.executor == "inline" else found
    missing = [name for name in pipeline.devices if name not in present and name != "cpu"]
    if missing:
        raise PlanError(
            f"pipeline.devices names {', '.join(missing)}; present: {', '.join(present) or 'none'}",
            next_step="name devices that are there, or say auto",
        )
    if not pipeline.devices:
        raise SplitError("pipeline.devices is empty", next_step="name a device, or say auto")
    present.setdefault("cpu", Device("cpu", "cpu"))
    return [present[name] for name in pipeline.devices]


Split = tuple[tuple[str, ...], tuple[str, ...], str, tuple[str, ...]]


def _split(
    pipeline: PipelineConfig, work: Work, used: list[Device], costs: Costs, nodes: int
) -> Split:
    names = [d.name for d in used]
    fixed_targets = None if pipeline.targets == "auto" else pipeline.targets
    fixed_drafters = None if pipeline.drafters == "auto" else pipeline.drafters
    if pipeline.executor == "inline":
        if (fixed_targets or 1, fixed_drafters or 1) != (1, 1):
            raise SplitError(
                f"executor inline runs one target and one drafter, not {fixed_targets or 1} and"
                f" {fixed_drafters or 1}",
                next_step="set pipeline.executor to threads or processes",
            )
        where = tuple(names[:1]), tuple(names[-1:])
        return *where, "inline: one after the other", ()
    if len(names) == 1:
        n, m = fixed_targets or 1, fixed_drafters or 1
        return tuple(names * n), tuple(names * m), f"all {n + m} workers share {names[0]}", ()
    if fixed_targets is not None and fixed_drafters is not None:
        n, m = fixed_targets, fixed_drafters
        if n + m > len(names):
            raise PlanError(
                f"{n} targets and {m} drafters need {n + m} devices; there are {len(names)}",
                next_step="list a device twice in pipeline.devices to share it, or ask for fewer",
            )
        return tuple(names[:n]), tuple(names[n : n + m]), "as configured", ()
    return _choose(names, work.microbatches, costs, (fixed_targets, fixed_drafters), nodes)


def _choose(
    names: list[str],
    microbatches: int,
    costs: Costs,
    fixed: tuple[int | None, int | None],
    nodes: int,
) -> Split:
    targets, drafters = fixed
    splits = [
        (n, len(names) - n)
        for n in range(1, len(names))
        if targets in (None, n) and drafters in (None, len(names) - n)
    ]
    if not splits:
        raise PlanError(
            f"{len(names)} devices leave no room for"
            f" {f'{targets} targets' if targets else f'{drafters} drafters'} and the other part",
            next_step="ask for fewer, or list a device twice to share it",
        )

    def period(split: tuple[int, int]) -> tuple[float, int]:
        return costs.period(*split), split[0]

    allowed = [s for s in splits if microbatches % (s[1] * nodes) == 0]
    best = min(splits, key=period)
    n, m = min(allowed or splits, key=period)
    advice = []
    if allowed and best != (n, m):
        gain = costs.period(n, m) / costs.period(*best)
        advice.append(
            f"{best[0]} + {best[1]} would be {gain:.2f} times as fast; it needs"
            f" optimization.microbatches to be a multiple of {best[1] * nodes}"
        )
    others = sorted((s for s in splits if s != (n, m)), key=period)[:2]
    reason = (
        f"{n} + {m}: a microbatch costs a target {costs.target_s * 1e3:.1f} ms and a drafter"
        f" {costs.drafter_s * 1e3:.1f} ms (counted), so one"
        f" is done every {costs.period(n, m) * 1e3:.1f} ms"
    )
    for other in others:
        reason += f"; {other[0]} + {other[1]} would take {costs.period(*other) * 1e3:.1f} ms"
    return tuple(names[:n]), tuple(names[n:]), reason, tuple(advice)


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
