"""Whole runs on several workers, by command: threads, torchrun, a kill, a signal. On a CPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import yaml  # noqa: E402
from tiny_target import run_config, save_target, write_chats  # noqa: E402

from trainer.telemetry import StepLine, read_events, read_steps  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
STEPS = 120
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    save_target(folder / "target")
    write_chats(folder / "chats.jsonl", 40)
    return folder


def write_config(home: Path, name: str, **changes: Any) -> Path:
    path = home / f"{name}.yaml"
    settings = {
        "optimization": {"microbatches": 2, "steps": STEPS},
        "checkpoint": {"every": 20},
        "log_every": 1,
        "folder": str(home / name),
    }
    path.write_text(yaml.safe_dump(run_config(home, **{**settings, **changes})))
    return path


def start(config: Path, *launcher: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "trainer", "train", str(config)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        said, _ = process.communicate(timeout=150)
        return said
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def steps(folder: Path) -> list[StepLine]:
    return list(read_steps((folder / "metrics.jsonl").read_text()))


def events(folder: Path) -> list[str]:
    return [e.event for e in read_events((folder / "events.jsonl").read_text())]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def inline(home: Path) -> list[float | None]:
    process = start(write_config(home, "inline"))
    said = finish(process)
    assert process.returncode == 0, said
    return [line.loss for line in steps(home / "inline")]


def test_threads_write_the_plan_and_reach_the_same_losses(
    home: Path, inline: list[float | None]
) -> None:
    pipeline = {"executor": "threads", "targets": 2, "drafters": 2, "check_equal_every": 5}
    process = start(write_config(home, "threads", pipeline=pipeline))
    said = finish(process)
    assert process.returncode == 0, said
    assert "target 0, target 1, drafter 0, drafter 1" in said
    assert "plan" in events(home / "threads")
    lines = steps(home / "threads")
    assert [line.loss for line in lines] == pytest.approx(inline, rel=1e-4)
    assert lines[-1].target_idle is not None and lines[-1].drafter_idle is not None
    assert lines[-1].recompiles == 0


def test_a_killed_rank_restarts_all_from_the_newest_checkpoint(
    home: Path, inline: list[float | None]
) -> None:
    pipeline = {"executor": "processes", "targets": 1, "drafters": 1}
    config = write_config(home, "ranks", pipeline=pipeline)
    process = start(config, *TORCHRUN, "--max-restarts", "1")
    folder = home / "ranks"
    wait_for(lambda: (folder / "checkpoints" / "step-00000020").exists())
    os.kill(rank_process(process.pid, "0"), signal.SIGKILL)
    said = finish(process)
    assert process.returncode == 0, said
    assert "resumed step-" in said
    losses = {line.step: line.loss for line in steps(folder)}
    assert [losses[i + 1] for i in range(STEPS)] == pytest.approx(inline, rel=1e-4)
    assert events(folder)[-1] == "finished"
    # The other rank keeps its events apart, and no steps.
    (other,) = (folder / "ranks").iterdir()
    assert other.name == "0000-target-0"
    assert steps(other) == []


def test_without_torchrun_it_starts_its_own_ranks(home: Path, inline: list[float | None]) -> None:
    pipeline = {"executor": "processes", "targets": 1, "drafters": 1}
    process = start(write_config(home, "own-ranks", pipeline=pipeline))
    said = finish(process)
    assert process.returncode == 0, said
    assert "starting 1 targets and 1 drafters by torchrun" in said
    lines = steps(home / "own-ranks")
    assert [line.loss for line in lines] == pytest.approx(inline, rel=1e-4)
    assert lines[-1].recommended_targets is not None


def test_a_signal_to_torchrun_saves_one_checkpoint_that_all_leave_after(home: Path) -> None:
    pipeline = {"executor": "processes", "targets": 1, "drafters": 1}
    optimization = {"microbatches": 2, "steps": 2000}
    config = write_config(
        home, "signal", pipeline=pipeline, optimization=optimization, checkpoint={"every": 10_000}
    )
    process = start(config, *TORCHRUN)
    folder = home / "signal"
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(steps(folder)) >= 3)
    # As `stop` does: to the whole tree at once.
    os.killpg(process.pid, signal.SIGINT)
    said = finish(process)
    assert process.returncode != 0
    last = steps(folder)[-1].step
    assert (folder / "checkpoints" / f"step-{last:08d}").exists(), said
    assert events(folder)[-1] == "stopped"
    assert events(folder / "ranks" / "0000-target-0")[-1] == "stopped"


def rank_process(torchrun: int, rank: str) -> int:
    """The child of torchrun that is this rank, by its environment."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            # It ended while we looked.
            continue
        if parent == str(torchrun) and f"RANK={rank}".encode() in environment:
            return int(entry.name)
    raise AssertionError("no such rank")


# -- two nodes, each with a folder of its own -----------------------------------------------------


def start_node(home: Path, config: Path, rank: int, port: int) -> subprocess.Popen[str]:
    """One of two nodes: torchrun as ``dflashctl launch`` starts it, in a run folder of its own."""
    folder = home / f"node-{rank}"
    variables = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(port), "DFLASH_RUN_DIR": str(folder)}
    return start(config, **variables)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_two_nodes_make_the_data_once_stop_together_and_resume_from_the_first(
    home: Path, inline: list[float | None]
) -> None:
    config = write_config(
        home,
        "nodes",
        pipeline={"executor": "processes", "targets": 1, "drafters": 1},
        checkpoint={"every": 10_000},
    )
    first, second = home / "node-0", home / "node-1"
    port = free_port()
    nodes = [start_node(home, config, rank, port) for rank in range(2)]
    wait_for(lambda: (first / "metrics.jsonl").exists() and len(steps(first)) >= 3)
    # One node is asked, both leave.
    os.killpg(nodes[1].pid, signal.SIGINT)
    said = [finish(node) for node in nodes]
    done = steps(first)[-1].step
    assert done < STEPS, said
    assert [p.name for p in (first / "checkpoints").glob("step-*")] == [f"step-{done:08d}"]
    assert not (second / "checkpoints").exists()
    reports = [(folder / "data" / "report.json").read_text() for folder in (first, second)]
    assert reports[0] == reports[1]

    port = free_port()
    nodes = [start_node(home, config, rank, port) for rank in range(2)]
    said = [finish(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert f"resumed step-{done:08d}" in said[0]
    losses = {line.step: line.loss for line in steps(first)}
    assert [losses[i + 1] for i in range(STEPS)] == pytest.approx(inline, rel=1e-4)
    other = events(second / "ranks" / "0003-drafter-1")
    assert other.count("resumed") == 1
