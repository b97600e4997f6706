"""Flight-recorder dumps of torch, read without running anything that lies in them."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.flight import ENTRIES, dumps
from orchestrator.agent.looking import Failed
from orchestrator.diag.flight import first_mismatch, read_dumps
from orchestrator.diag.probes import Probes
from orchestrator.paths import FLIGHT_VARIABLES, RunPaths


def entry(number: int, name: str = "nccl:all_reduce") -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": ((4096,),),
        "process_group": ("0", "default_pg"),
        "state": "scheduled",
        "time_created_ns": 1,
        "frames": [{"filename": "/venv/torch/distributed/c.py", "line": 1, "name": "f"}],
    }


def write(path: Path, *entries: dict[str, Any]) -> None:
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": list(entries)}, protocol=2))


@pytest.mark.parametrize("variable", FLIGHT_VARIABLES)
def test_dumps_are_found_where_the_run_writes_them(tmp_path: Path, variable: str) -> None:
    write(tmp_path / "x_0", entry(7), entry(8))
    write(tmp_path / "x_1", entry(7))
    write(tmp_path / "x_old", entry(1))

    found = dumps(None, {variable: f"{tmp_path}/x_"}, since=0)

    assert sorted(found) == ["0", "1"]
    told = first_mismatch(read_dumps(Probes({"nccl_flight": found})))
    assert told is not None
    assert told.text == "rank 1 never called all_reduce 4096, number 8 of group 0/default_pg"


def test_dumps_lie_in_the_runs_folder_unless_told_otherwise(tmp_path: Path) -> None:
    run = RunPaths(str(tmp_path))
    Path(run.stacks).mkdir()
    write(Path(f"{run.flight_prefix}3"), entry(7))

    assert sorted(dumps(run, {}, since=0)) == ["3"]


def test_only_the_newest_entries_travel(tmp_path: Path) -> None:
    write(tmp_path / "r0", *(entry(n) for n in range(ENTRIES + 50)))

    (found,) = dumps(None, {FLIGHT_VARIABLES[0]: f"{tmp_path}/r"}, since=0).values()

    assert len(found["entries"]) == ENTRIES
    assert found["entries"][-1]["collective_seq_id"] == ENTRIES + 49
    assert "time_created_ns" not in found["entries"][0]


def test_a_dump_of_an_earlier_run_is_none(tmp_path: Path) -> None:
    write(tmp_path / "r0", entry(7))
    os.utime(tmp_path / "r0", (1_000, 1_000))

    with pytest.raises(Failed):
        dumps(None, {FLIGHT_VARIABLES[0]: f"{tmp_path}/r"}, since=2_000)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/dflashctl-evil",)


def odd(**fields: Any) -> bytes:
    return pickle.dumps({"entries": [entry(7) | fields]})


@pytest.mark.parametrize(
    "content",
    [
        *(pickle.dumps(Evil()), b"", b"\x80\x02]q\x00.", b"garbage", pickle.dumps({"entries": 3})),
        *(odd(input_sizes=7), odd(frames=7), odd(process_group=7)),
    ],
)
def test_a_hostile_or_torn_dump_runs_nothing_and_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r0").write_bytes(content)
    write(tmp_path / "r1", entry(7))

    found = dumps(None, {FLIGHT_VARIABLES[0]: f"{tmp_path}/r"}, since=0)

    assert found["0"]["error"]
    assert found["1"]["entries"]
    assert not Path("/tmp/dflashctl-evil").exists()


def test_odd_values_travel_as_plain_json_of_bounded_length(tmp_path: Path) -> None:
    values = {"profiling_name": b"\xff" * 9999, "state": {1, 2}, "collective_seq_id": "7"}
    (tmp_path / "r0").write_bytes(odd(**values, frames=[{"filename": "x" * 9999, "line": None}]))

    found = dumps(None, {FLIGHT_VARIABLES[0]: f"{tmp_path}/r"}, since=0)

    assert len(json.dumps(found)) < 1000
    assert read_dumps(Probes({"nccl_flight": found})) == {0: []}


def test_many_ranks_share_the_room_of_one_answer(tmp_path: Path) -> None:
    for rank in range(60):
        write(tmp_path / f"r{rank}", *(entry(n) for n in range(150)))

    found = dumps(None, {FLIGHT_VARIABLES[0]: f"{tmp_path}/r"}, since=0)

    assert {len(one["entries"]) for one in found.values()} == {100}


RANK = """
import os, sys
import torch
import torch.distributed as dist
from datetime import timedelta

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
x = torch.ones(16)
dist.all_reduce(x)
try:
    dist.broadcast(x, 0) if rank == 1 else dist.all_reduce(x)
    dist.all_reduce(x)
except RuntimeError:
    pass
dump = torch._C._distributed_c10d._dump_fr_trace(True, True, False)
with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
    file.write(dump)
os._exit(0)
"""


@pytest.mark.torch
@pytest.mark.slow
def test_real_dumps_name_the_rank_that_called_another_collective(tmp_path: Path) -> None:
    """torch 2.13's own format. gloo records like NCCL; NCCL writes the file by itself when a
    collective times out, gloo's is asked for here."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch has a flight recorder for NCCL only")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCH_FR_BUFFER_SIZE": "200",
                "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": "2",
                "RANK": str(rank),
            },
        )
        for rank in range(2)
    ]
    assert [one.wait(120) for one in ranks] == [0, 0]

    found = dumps(None, {FLIGHT_VARIABLES[0]: f"{tmp_path}/rank_"}, since=0)

    told = first_mismatch(read_dumps(Probes({"nccl_flight": found})))
    assert told is not None
    assert "collective 2 of group 0/default_pg differs" in told.text
    assert "broadcast" in told.text and "all_reduce" in told.text
