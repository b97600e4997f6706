"""The simulator against cases that can be reckoned by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from pipeline_sim import Fabric, Layout, Times, simulate

FREE = Fabric(gradient_bytes=0, inside=1, network=1)


def times(target: float, drafter: float, update: float = 0.0) -> Times:
    return Times(target, drafter, update, copy=0.0, batch=0.0, spread=0.0)


@pytest.mark.parametrize(
    ("targets", "drafters", "target", "drafter", "share", "step"),
    [
        (1, 1, 1.0, 3.0, 2, 6.0),  # the drafter is slower: two of its microbatches
        (1, 1, 3.0, 1.0, 2, 6.0),  # the target is slower
        (2, 1, 4.0, 1.0, 2, 4.0),  # two targets share
        (3, 5, 49.0, 74.0, 3, 245.0),  # 15 microbatches over 3 targets at 49 each
        (5, 3, 166.0, 110.0, 5, 550.0),  # 5 drafts of 110; targets need 3 rounds of 166
    ],
)
def test_the_slower_side_sets_the_pace(
    targets: int, drafters: int, target: float, drafter: float, share: int, step: float
) -> None:
    outcome = simulate(Layout(1, targets, drafters, share), times(target, drafter), FREE)
    assert outcome.step_s == pytest.approx(step, rel=0.01)


@pytest.mark.parametrize(
    ("drafter", "exposed"),
    [
        (2.5, 2.0),  # backward hides 0.4 · 2.5 of it
        (10.0, 0.36),  # it would hide all, but 0.12 of the gradient comes last
    ],
)
def test_update_and_what_backward_does_not_hide_of_the_sum_come_on_top(
    drafter: float, exposed: float
) -> None:
    fabric = Fabric(gradient_bytes=10.0, inside=10.0, network=5.0)
    # 2·10·(1/2)/10 within a node, 2·10·(1/2)/5 between two nodes.
    assert fabric.sum_s(drafters=2, nodes=2) == pytest.approx(1.0 + 2.0)
    outcome = simulate(Layout(2, 2, 2, 1), times(0.1, drafter, update=1.0), fabric)
    step = drafter + 1.0 + exposed
    assert outcome.step_s == pytest.approx(step)
    assert outcome.sum_share == pytest.approx(exposed / step)


def test_deeper_rings_absorb_spread() -> None:
    uneven = Times(1.0, 1.0, 0.0, copy=0.0, batch=0.0, spread=0.3)
    shallow, deep = (
        simulate(Layout(1, 4, 4, 4, depth), uneven, FREE, steps=200).step_s for depth in (1, 8)
    )
    assert deep < shallow
