"""Which cards a run has, by what its host or its container says."""

from __future__ import annotations

from typing import Any

from orchestrator.gpu_use import by_container, by_host, mean_use

A, B = "night-20260101-000000-aaaa", "night-20260101-000000-bbbb"


def gpu(index: int, use: int | None = 0) -> dict[str, Any]:
    rest = {"name": "H200", "memory_used_mb": 5, "memory_total_mb": 9}
    return {"index": index, "uuid": f"GPU-{index}", "utilization": use, **rest, "pids": [1]}


def indices(cards: list[dict[str, Any]]) -> list[int]:
    return [card["index"] for card in cards]


def test_a_host_knows_a_runs_cards_by_its_processes_and_its_leases() -> None:
    answer = {
        "gpus": [gpu(0, 90), gpu(1), gpu(2, 30)],
        "processes": [
            {"gpu_uuid": "GPU-0", "run_id": A, "ct": 200},
            {"gpu_uuid": "GPU-2", "run_id": None, "ct": 200},
        ],
    }
    leases = [
        {"gpu": "GPU-0", "run_id": A, "stale": False},
        {"gpu": "GPU-1", "run_id": A, "stale": False},
        {"gpu": "GPU-2", "run_id": B, "stale": True},
    ]
    found = by_host([A, B], answer, leases)
    assert indices(found[A]) == [0, 1] and found[B] == []
    assert set(found[A][0]) == {
        *("index", "uuid", "name", "utilization", "memory_used_mb", "memory_total_mb")
    }


def test_a_container_knows_what_its_runs_were_given() -> None:
    answer = {"gpus": [gpu(0), gpu(1), gpu(2)], "processes": []}
    found = by_container({A: [0, 2], B: ["GPU-1"]}, answer)
    assert (indices(found[A]), indices(found[B])) == ([0, 2], [1])


def test_a_run_that_was_given_none_by_name_has_all_that_are_visible() -> None:
    assert indices(by_container({A: ()}, {"gpus": [gpu(0), gpu(1)]})[A]) == [0, 1]


def test_without_a_driver_there_are_no_cards() -> None:
    answer = {"gpus": [], "processes": [], "error": "nvidia-smi: not found"}
    assert by_host([A], answer, []) == {A: []} == by_container({A: [0]}, answer)


def test_use_is_the_mean_of_the_cards_that_tell() -> None:
    assert mean_use([gpu(0, 90), gpu(1, 70), gpu(2, None)]) == 80
    assert mean_use([]) is None
