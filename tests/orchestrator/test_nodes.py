"""Where nodes meet, and what each is told; and the program that tries it, on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator import meeting
from orchestrator.errors import RefusedError
from orchestrator.inventory import Inventory
from orchestrator.launch import Order
from orchestrator.nodes import Meeting, common, node_orders
from orchestrator.target import Target, resolve

FIRST, SECOND, THIRD = (
    resolve(Inventory(), host="pve", ct=number)[0] for number in (200, 201, 202)
)
PLACE = Meeting("10.0.0.1", 29500, ("eth0", "eth1"))
RUN = "night-20260101-000000-ab12"


def order(target: Target, **changes: Any) -> Order:
    command = (target.settings.python, "-m", "trainer", "train", "c.yaml")
    return Order(run_id=RUN, name="night", command=command, **{"config": "c.yaml", **changes})


def answer(*reached: str, **failed: str) -> dict[str, Any]:
    return {"reached": dict.fromkeys(reached, "eth0"), "failed": failed}


def test_the_nodes_meet_at_the_first_address_that_all_of_them_reached() -> None:
    addresses = ["192.168.0.1", "10.0.0.1", "10.0.0.2"]
    answers = [answer("10.0.0.1", "10.0.0.2"), answer("192.168.0.1", "10.0.0.1")]
    assert common(FIRST, [SECOND, THIRD], addresses, answers) == "10.0.0.1"


def test_a_node_that_reaches_nothing_is_named_with_the_reason() -> None:
    with pytest.raises(RefusedError) as caught:
        common(
            FIRST, [SECOND], ["10.0.0.1"], [{"reached": {}, "failed": {"10.0.0.1": "timed out"}}]
        )
    assert caught.value.ct == 201
    assert "cannot reach the first node, pve/200 (10.0.0.1: timed out)" in caught.value.what


def test_nodes_without_an_address_in_common_are_refused() -> None:
    with pytest.raises(RefusedError, match="reached by all other nodes"):
        common(FIRST, [SECOND, THIRD], ["a", "b"], [answer("a"), answer("b")])


def test_the_trainer_goes_through_torchrun_on_every_node() -> None:
    first, second = node_orders([order(FIRST), order(SECOND)], PLACE, [8, 4])
    assert second.command == (
        *("python3", "-m", "trainer.torchrun"),
        *("--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4"),
        *("--master-addr", "10.0.0.1", "--master-port", "29500"),
        *("-m", "trainer", "train", "c.yaml"),
    )
    assert first.run_id == "night-n0-20260101-000000-ab12"
    assert second.run_id == "night-n1-20260101-000000-ab12"
    assert second.nodes == {
        "rank": 1,
        "of": 2,
        "run_ids": [first.run_id, second.run_id],
        "meet": "10.0.0.1",
    }


def test_another_command_is_left_as_it_is_and_finds_its_place_in_variables() -> None:
    own = order(SECOND, config=None, environment={"NCCL_SOCKET_IFNAME": "ib0"})
    (_, found) = node_orders([own, own], PLACE, [1, 1])
    assert found.command == own.command
    assert found.environment == {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "NNODES": "2",
        "NODE_RANK": "1",
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "eth1",
    }


def test_the_program_finds_which_addresses_answer_and_which_do_not() -> None:
    source = Path(meeting.__file__).read_text(encoding="utf-8")
    argv = [sys.executable, "-I", "-c", source]
    with subprocess.Popen([*argv, "listen", "30"], stdout=subprocess.PIPE, text=True) as door:
        assert door.stdout
        port = json.loads(door.stdout.readline())["port"]
        for _ in range(2):
            done = subprocess.run(
                [*argv, "visit", str(port), "5", "127.0.0.1", "127.0.0.2", "nowhere.invalid"],
                capture_output=True,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout)
            assert set(found["reached"]) == {"127.0.0.1", "127.0.0.2"}
            assert set(found["failed"]) == {"nowhere.invalid"}
        door.terminate()
