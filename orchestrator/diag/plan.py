"""What the trainer planned, and what its stages have shown that they can.

The plan's rate counts every context token of a full microbatch and neither side's waits, so it is
an upper bound. Its costs are counted (operations by a device's usual rate), of use for a split
only: SmolLM2's stages, bound by kernel launches, take 4 to 12 times as long on a sound H200. So it
is told and raises nothing; what the stages have shown that they can is judged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from orchestrator.diag.evidence import Evidence
from orchestrator.diag.steps import Step
from orchestrator.diag.text import Line

STAGES = ("target", "drafter")
_TABLE = re.compile(r"^expected ([\d,]+) context tok/s (?:by|at most)\b")


@dataclass(frozen=True)
class Plan:
    """Rates in context tokens a second."""

    rate: float
    line: Line
    stages: dict[str, float] = field(default_factory=dict)
    """What all targets, all drafters could take; empty if nobody tells."""
    apart: bool = False
    """No device is target and drafter at once, so neither stage slows the other."""
    on_cpu: bool = False
    """Of which one rate stands for every machine: the plan says nothing."""


def plan_of(e: Evidence) -> Plan | None:
    """Of the trainer's last ``plan`` event, else of the table that it prints."""
    for probe in e.probes:
        for line in reversed(probe.lines):
            if '"plan"' in line.raw and (plan := _of_event(line)) is not None:
                return plan
    for line in reversed(e.lines):
        if (match := _TABLE.match(line.text)) is not None:
            return Plan(float(match[1].replace(",", "")), line)
    return None


def _of_event(line: Line) -> Plan | None:
    try:
        event = json.loads(line.raw)
        if event.get("event") != "plan":
            return None
        told: dict[str, Any] = event["detail"]
        devices = {stage: [str(d) for d in told[f"{stage}s"]] for stage in STAGES}
        tokens, costs = float(told["context_tokens"]), told["costs"]
        return Plan(
            float(told["tokens_per_s"]),
            line,
            {s: tokens * len(devices[s]) / float(costs[f"{s}_s"]) for s in STAGES},
            not set(devices["target"]) & set(devices["drafter"]),
            {"cpu"} == {d for names in devices.values() for d in names},
        )
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        # Torn, or of a trainer that plans otherwise.
        return None


def capacities(steps: Sequence[Step]) -> dict[str, float]:
    """What each stage would take if it never waited, as the trainer measured over ``steps``."""
    of: dict[str, Callable[[Step], float | None]] = {
        "target": lambda step: step.target_capacity,
        "drafter": lambda step: step.drafter_capacity,
    }
    told = {s: [v for step in steps if (v := of[s](step))] for s in STAGES}
    return {stage: median(values) for stage, values in told.items() if len(values) >= 3}


def behind(plan: Plan, steps: Sequence[Step]) -> str:
    """The stage that is farthest behind its part of the plan; empty if nobody tells. A counted
    plan's common factor, the device's rate, does not matter here."""
    shares = {s: v / plan.stages[s] for s, v in capacities(steps).items() if plan.stages.get(s)}
    return min(shares, key=lambda stage: shares[stage]) if len(shares) == len(STAGES) else ""
