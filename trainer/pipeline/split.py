"""How many devices play which part: the least time a microbatch, by counted or measured times.

N targets and M drafters hand one over every max(target / N, drafter / M) seconds. Times are counted
operations, or those of ``pipeline.stage_ms``: a run's lines hold what its stages took
(``target_ms``, ``drafter_ms``) and the split that this asks for (``gauge.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import PipelineConfig
from trainer.errors import TrainerError
from trainer.pipeline.costs import Work, drafter_flop, target_flop

RATES = {"H200": 560e12, "H100": 530e12, "A100": 210e12, "cpu": 5e10}
"""Operations a second that a stage reaches in bf16 (0.7 of what large products reach), by device
name; only ratios matter for a split. Unlisted devices count as an A100."""


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
    known: str = "measured"

    def period(self, targets: int, drafters: int) -> float:
        """Seconds from one microbatch to the next, with that many of each."""
        return max(self.target_s / targets, self.drafter_s / drafters)


def stage_costs(pipeline: PipelineConfig, work: Work, device: Device) -> Costs:
    if (times := pipeline.stage_ms) is not None:
        return Costs(times.target / 1e3, times.drafter / 1e3)
    target, drafter = target_flop(work), drafter_flop(work)[1]
    return Costs(target / device.rate, drafter / device.rate, "counted")


def recommend(costs: Costs, devices: int) -> tuple[int, int]:
    """(targets, drafters) of so many devices with the least time a microbatch; of equal ones the
    one with more drafters, which need not wait for features."""
    if devices < 2:
        return 1, 1
    splits = [(n, devices - n) for n in range(1, devices)]
    return min(splits, key=lambda split: (costs.period(*split), split[0]))


def used_devices(pipeline: PipelineConfig, present: dict[str, Device]) -> list[Device]:
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


def split_devices(
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
        f" {costs.drafter_s * 1e3:.1f} ms ({costs.known}), so one"
        f" is done every {costs.period(n, m) * 1e3:.1f} ms"
    )
    for other in others:
        reason += f"; {other[0]} + {other[1]} would take {costs.period(*other) * 1e3:.1f} ms"
    if costs.known == "counted":
        advice.append(
            "the split follows counted times; a run's lines have measured ones, target_ms and"
            " drafter_ms: give them as pipeline.stage_ms"
        )
    return tuple(names[:n]), tuple(names[n:]), reason, tuple(advice)
