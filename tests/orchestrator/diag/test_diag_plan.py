"""The rate against the trainer's plan: told always, an alarm only where the stages have shown
that they can do more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.diag import Evidence, Report, diagnose
from trainer.pipeline.plan import Plan
from trainer.pipeline.split import Costs


def make(targets: tuple[str, ...] = ("cuda:0",), drafters: tuple[str, ...] = ("cuda:1",)) -> Plan:
    """One target and one drafter, 50 and 100 ms a microbatch: 40,960 tok/s."""
    return Plan(
        executor="threads",
        targets=targets,
        drafters=drafters,
        queue_depth=2,
        slot_shape=(1, 4096, 40),
        slot_bytes=1,
        microbatches=1,
        context_tokens=4096,
        costs=Costs(0.05, 0.1, "counted"),
        memory=(),
        reason="1 + 1",
    )


def plan(
    targets: tuple[str, ...] = ("cuda:0",), drafters: tuple[str, ...] = ("cuda:1",), **changes: Any
) -> str:
    """Its event."""
    made = make(targets, drafters)
    assert made.tokens_per_s == 40_960
    event = {"time": 1.0, "event": "plan", "detail": made.as_data() | changes}
    return "\n".join([json.dumps({"time": 0.5, "event": "started"}), json.dumps(event)])


def metrics(rate: float, count: int = 30, **values: float) -> str:
    return "\n".join(
        json.dumps(
            {"time": 9.0 * i, "step": i, "steps": 400, "loss": 8 - i / 50, "tokens_per_s": rate}
            | values
        )
        for i in range(1, count + 1)
    )


def report(log: str = "", **probes: Any) -> Report:
    return diagnose(Evidence.from_text(log, {"run_state": "training", **probes}))


def test_counted_costs_raise_nothing_and_are_told() -> None:
    """SmolLM2's stages on an H200, bound by launches, reach a tenth of what is counted."""
    found = report(
        events=plan(), metrics=metrics(4_000, target_capacity=4_200, drafter_capacity=30_000)
    )

    (finding,) = found.findings
    assert found.healthy
    assert "planned 41.0k (counted costs, an upper bound); the target is farth" in finding.title


@pytest.mark.parametrize(
    "events",
    [
        plan(targets=("cpu",), drafters=("cpu",)),
        plan(context_tokens=None),
        plan()[:-40],
        '{"event": "plan"}\n{"event": "plan", "detail": null}\n["plan"]',
    ],
    ids=["of a CPU", "of another trainer", "torn", "other things"],
)
def test_a_plan_that_tells_nothing(events: str) -> None:
    assert report(events=events, metrics=metrics(40)).findings == ()


def test_warm_up_is_not_measured() -> None:
    assert report(events=plan(), metrics=metrics(2_000, count=5)).findings == ()


@pytest.mark.parametrize(("rate", "healthy"), [(4_000, False), (7_200, True)])
def test_stages_that_both_wait(rate: float, healthy: bool) -> None:
    """Each alone takes 12,000; threads that launch small kernels reach 0.60 of that and are sound.
    One card shared by both stages cannot do both at once."""
    shown = metrics(
        rate, target_capacity=13e3, drafter_capacity=12e3, target_idle=0.7, drafter_idle=0.65
    )

    found = report(events=plan(), metrics=shown)

    assert found.healthy is healthy
    assert healthy or "at fault is neither stage" in found.findings[0].title
    assert report(events=plan(targets=("cuda:1",)), metrics=shown).healthy


def test_a_printed_plan() -> None:
    """As the trainer prints it: the regular expression once waited for words that no table had."""
    log = f"{make().table()}\n" + "".join(
        f"step {i:>6}/400 | loss {8 - i / 50:.4f} | acc 0.040 | 12.0k tok/s\n" for i in range(1, 30)
    )

    (finding,) = (found := report(log)).findings

    assert "planned 41.0k (counted costs, an upper bound)" in finding.title
    assert found.healthy
