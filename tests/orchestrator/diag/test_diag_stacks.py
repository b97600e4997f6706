"""The odd one out of stacks, and of flight-recorder dumps."""

from __future__ import annotations

import json

from orchestrator.diag import Evidence, diagnose
from orchestrator.diag.flight import first_mismatch, read_dumps
from orchestrator.diag.probes import Probes
from orchestrator.diag.stacks import moved, odd_one_out, read_stacks, summary

DUMP = """Process 411: python train.py
Python v3.12.3 (/usr/bin/python3.12)

Thread 411 (idle): "MainThread"
    join (threading.py:1149)
    main (train.py:90)
Thread 420 (idle): "drafter-0"
    acquire (compile_lock.py:31)
    step (drafter.py:61)
Thread 421 (active+gil): "drafter-1"
    recv (ring.py:{line})
    step (drafter.py:50)
Thread 422 (idle): "drafter-2"
    acquire (compile_lock.py:31)
    step (drafter.py:61)
"""


def test_py_spy_threads() -> None:
    stacks = read_stacks(Probes({"py_spy": DUMP.format(line=77)}))

    assert [s.who for s in stacks] == [
        "PID 411 MainThread",
        "PID 411 drafter-0",
        "PID 411 drafter-1",
        "PID 411 drafter-2",
    ]
    assert stacks[2].frames == ("recv (ring.py:77)", "step (drafter.py:50)")


def test_faulthandler_threads() -> None:
    text = (
        "Current thread 0x00007f01 [MainThread] (most recent call first):\n"
        '  File "/w/t.py", line 3 in run\n  File "/w/t.py", line 9 in <module>\n'
    )

    (stack,) = read_stacks(Probes({"stacks": text}))

    assert stack.frames == ("run (/w/t.py:3)", "<module> (/w/t.py:9)")


def test_the_rank_outside_of_the_collective_is_odd() -> None:
    odd = odd_one_out(
        Probes(
            {
                "py_spy": "rank 0-2,4-7: all_reduce (c10d.py:1)\nrank 3: get (queue.py:171) <- "
                "f (a.py:1)"
            }
        )
    )

    assert odd is not None
    assert (odd.who, odd.where) == ("rank 3", "get (queue.py:171) ← f (a.py:1)")


def test_of_two_ranks_the_one_that_computes_is_odd() -> None:
    odd = odd_one_out(
        Probes({"py_spy": "rank 0: read (data.py:1)\nrank 1: all_reduce (c10d.py:1)"})
    )

    assert odd is not None and odd.who == "rank 0"


def test_a_main_thread_that_joins_is_not_the_odd_one() -> None:
    text = DUMP.format(line=77).replace("join (threading.py:1149)", "_shutdown (threading.py:1583)")

    odd = odd_one_out(Probes({"py_spy": text}))

    assert odd is not None and odd.who == "PID 411 drafter-1"


def test_ranks_come_from_the_process_and_the_fewest_are_told_first() -> None:
    ranks = "\n\n".join(
        f"Process {700 + rank}: python train.py (RANK={rank})\n"
        f'Thread {700 + rank} (idle): "MainThread"\n'
        + ("    read (ssl.py:1104)" if rank == 2 else "    all_reduce (c10d.py:2810)")
        for rank in range(4)
    )

    assert summary(Probes({"stacks_1": ranks})) == [
        "rank 2 MainThread: read (ssl.py:1104)",
        "rank 0 MainThread, rank 1 MainThread, rank 3 MainThread: all_reduce (c10d.py:2810)",
    ]


def test_equal_stacks_have_no_odd_one() -> None:
    assert odd_one_out(Probes({"py_spy": "rank 0-7: all_reduce (c10d.py:1)"})) is None


def test_two_samples_tell_who_moved() -> None:
    probes = Probes({"py_spy_1": DUMP.format(line=77), "py_spy_2": DUMP.format(line=78)})

    assert moved(read_stacks(probes)) == {
        "PID 411 MainThread": False,
        "PID 411 drafter-0": False,
        "PID 411 drafter-1": True,
        "PID 411 drafter-2": False,
    }


def entry(sequence: int, name: str = "nccl:all_reduce", sizes: int = 4096) -> dict[str, object]:
    return {
        "collective_seq_id": sequence,
        "profiling_name": name,
        "input_sizes": [[sizes]],
        "state": "completed",
        "process_group": ["0", "default_pg"],
        "frames": [{"filename": "/venv/torch/x.py", "line": 1}, {"filename": "/w/t.py", "line": 8}],
    }


def dump(*entries: dict[str, object], rank: int = 0) -> dict[str, object]:
    return {"version": "2.10", "rank": rank, "entries": list(entries)}


def test_a_missing_rank_is_named() -> None:
    dumps = read_dumps(
        Probes(
            {
                "flight_0": json.dumps(dump(entry(7), entry(8), rank=0)),
                "flight_1": json.dumps(dump(entry(7), rank=1)),
            }
        )
    )

    found = first_mismatch(dumps)

    assert found is not None
    assert found.text == "rank 1 never called all_reduce 4096, number 8 of group 0/default_pg"


def test_a_different_call_is_named_with_its_line() -> None:
    probes = Probes(
        {
            "nccl_dumps": {
                "0": dump(entry(7), rank=0),
                "1": dump(entry(7), rank=1),
                "2": dump(entry(7, "nccl:broadcast"), rank=2),
            }
        }
    )

    found = first_mismatch(read_dumps(probes))

    assert found is not None
    assert "rank 2 called broadcast 4096 at /w/t.py:8, others all_reduce 4096" in found.text


def test_equal_dumps_and_rings_of_unlike_length_match() -> None:
    dumps = read_dumps(
        Probes({"d": {"0": dump(entry(5), entry(6), rank=0), "1": dump(entry(6), rank=1)}})
    )

    assert first_mismatch(dumps) is None


def test_a_timeout_carries_what_the_recorder_saw() -> None:
    log = (
        "[rank0]:[E301 10:40:00.1 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE, Timeout(ms)=600000) ran for "
        "600012 "
        "milliseconds before timing out.\nexit 1"
    )
    probes = {"flight": {"0": dump(entry(7), entry(8)), "1": dump(entry(7), rank=1)}}

    report = diagnose(Evidence.from_text(log, probes))

    assert report.findings[0].code == "nccl.timeout"
    assert "rank 1 never called all_reduce" in report.findings[0].title


TORCHRUN = """Process 64: /opt/venv/bin/python -m torch.distributed.run --nproc-per-node 2 train.py
Thread 64 (idle): "MainThread"
    _invoke_run (torch/distributed/elastic/agent/server/api.py:923)

Process 70: /opt/venv/bin/python -u train.py (RANK=0)
Thread 70 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3006)

Process 71: /opt/venv/bin/python -u train.py (RANK=1)
Thread 71 (idle): "MainThread"
    load_batch (train.py:8)
"""


def test_torchruns_own_process_is_no_odd_one() -> None:
    """It stands in its own loop whatever the ranks do."""
    probes = Probes({"stacks_1": TORCHRUN, "stacks_2": TORCHRUN})

    odd = odd_one_out(probes)

    assert odd is not None
    assert (odd.who, odd.where) == ("rank 1 MainThread", "load_batch (train.py:8)")
    assert not any("_invoke_run" in line for line in summary(probes))
