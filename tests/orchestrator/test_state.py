"""What the laptop remembers, written by many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.errors import NotFoundError
from orchestrator.fleet import Fleet
from orchestrator.inventory import Inventory
from orchestrator.paths import LaptopPaths
from orchestrator.run import choose
from orchestrator.state import LaptopState
from orchestrator.target import resolve


def test_containers_that_answer_at_once_are_all_remembered(tmp_path: Path) -> None:
    state = LaptopState(LaptopPaths({"HOME": str(tmp_path)}))
    places = [f"pve1/{number}" for number in range(50)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda place: state.know_agent(place, "digest"), places))
    assert [state.agent_of(place) for place in places] == ["digest"] * 50


def test_a_name_means_the_newest_run_of_this_laptop_so_called(tmp_path: Path) -> None:
    """Nobody types out a whole id at night; a name of the inventory comes first."""
    state = LaptopState(LaptopPaths({"HOME": str(tmp_path)}))
    inventory = Inventory.model_validate(
        {"hosts": {"pve1": {}}, "containers": {"train-a": {"host": "pve1", "ct": 200}}}
    )
    (target,) = resolve(inventory, ["train-a"])
    newest, nodes = "demo-20261130-020000-bbbb", "wide-n{}-20261130-040000-dddd"
    ids = ("demo-20261130-010000-aaaa", newest, "demo-2-20261130-030000-cccc")
    for run_id in (*ids, nodes.format(0), nodes.format(1), "train-a-20261130-050000-eeee"):
        state.remember(run_id, target)

    def meant(word: str) -> list[str | None]:
        with Fleet(state) as fleet:
            return [ref.run_id for ref in choose(fleet, inventory, state, [word], None, None)]

    assert meant("demo") == [newest]
    assert meant("wide") == [nodes.format(0), nodes.format(1)]
    assert meant("train-a") == [None]
    with pytest.raises(NotFoundError, match="did you mean demo-"):
        meant("dem")
