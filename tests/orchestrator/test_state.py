"""What the laptop remembers, written by many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchestrator.paths import LaptopPaths
from orchestrator.state import LaptopState


def test_containers_that_answer_at_once_are_all_remembered(tmp_path: Path) -> None:
    state = LaptopState(LaptopPaths({"HOME": str(tmp_path)}))
    places = [f"pve1/{number}" for number in range(50)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda place: state.know_agent(place, "digest"), places))
    assert [state.agent_of(place) for place in places] == ["digest"] * 50
