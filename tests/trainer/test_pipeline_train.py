"""Whole runs on several workers, by command: threads, torchrun, a kill, a signal. On a CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import yaml  # noqa: E402
from tiny_target import make_home, run_config  # noqa: E402
from warm_trainer import ROOT, Trainer, wait_for  # noqa: E402

from trainer.telemetry import StepLine, read_events, read_steps  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
STEPS = 120
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("pipeline"))


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


def start(config: Path, *launcher: str) -> subprocess.Popen[str]:
    """From nothing, perhaps through torchrun."""
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "trainer", "train", str(config)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
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


def finish_without(process: subprocess.Popen[str], rank: str, checkpoint: Path) -> str:
    """Kill a rank once ``checkpoint`` is there; what all of them said to their good end."""
    wait_for(checkpoint.exists)
    os.kill(rank_process(process.pid, rank), signal.SIGKILL)
    said = finish(process)
    assert process.returncode == 0, said
    return said


def steps(folder: Path) -> list[StepLine]:
    return list(read_steps((folder / "metrics.jsonl").read_text()))


def events(folder: Path) -> list[str]:
    return [e.event for e in read_events((folder / "events.jsonl").read_text())]


def run(config: Path) -> str:
    """To its good end; what it said."""
    with Trainer(config.with_suffix(".log"), "train", config) as process:
        assert process.wait() == 0, process.said()
    return process.said()


@pytest.fixture(scope="module")
def inline(home: Path) -> list[float | None]:
    run(write_config(home, "inline"))
    return [line.loss for line in steps(home / "inline")]


def test_threads_write_the_plan_and_reach_the_same_losses(
    home: Path, inline: list[float | None]
) -> None:
    pipeline = {"executor": "threads", "targets": 2, "drafters": 2, "check_equal_every": 5}
    said = run(write_config(home, "threads", pipeline=pipeline))
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
    said = finish_without(process, "0", folder / "checkpoints" / "step-00000020")
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
    assert lines[-1].target_ms and lines[-1].drafter_ms


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


@contextmanager
def two_nodes(home: Path, config: Path) -> Iterator[list[Trainer]]:
    """A target and a drafter on each, with the variables and the store that torchrun has for them;
    ``tests/lab/test_multi_node_training.py`` has torchrun itself."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    with ExitStack() as running:
        yield [
            running.enter_context(
                Trainer(
                    home / f"rank-{rank}.log",
                    *("train", config),
                    **variables,
                    RANK=str(rank),
                    LOCAL_RANK=str(rank % 2),
                    DFLASH_RUN_DIR=str(home / f"node-{rank // 2}"),
                )
            )
            for rank in range(4)
        ]


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
    with two_nodes(home, config) as ranks:
        wait_for(lambda: (first / "metrics.jsonl").exists() and len(steps(first)) >= 3)
        # One node is asked, both leave.
        for rank in ranks[2:]:
            rank.signal(signal.SIGINT)
        assert [rank.wait() for rank in ranks] == [130] * 4, [rank.said() for rank in ranks]
    done = steps(first)[-1].step
    assert done < STEPS
    assert [p.name for p in (first / "checkpoints").glob("step-*")] == [f"step-{done:08d}"]
    assert not (second / "checkpoints").exists()
    reports = [(folder / "data" / "report.json").read_text() for folder in (first, second)]
    assert reports[0] == reports[1]

    with two_nodes(home, config) as ranks:
        assert [rank.wait() for rank in ranks] == [0] * 4, [rank.said() for rank in ranks]
    assert f"resumed step-{done:08d}" in ranks[1].said()
    losses = {line.step: line.loss for line in steps(first)}
    assert [losses[i + 1] for i in range(STEPS)] == pytest.approx(inline, rel=1e-4)
    other = events(second / "ranks" / "0003-drafter-1")
    assert other.count("resumed") == 1
