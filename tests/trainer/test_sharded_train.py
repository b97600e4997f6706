"""Whole runs whose drafters hold one together, by command under torchrun; on a CPU."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from test_pipeline_train import (  # noqa: E402
    STEPS,
    TORCHRUN,
    events,
    finish_without,
    run,
    start,
    steps,
    two_nodes,
    write_config,
)
from tiny_target import make_home  # noqa: E402
from warm_trainer import Trainer, wait_for  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SHARDED = {"executor": "processes", "targets": 1, "drafters": 2, "shard_drafters": True}
EVALUATED = {"count": 2, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def whole(home: Path) -> list[float | None]:
    """Losses of a run with one whole drafter, whose checkpoints are all kept."""
    run(config(home, "whole"))
    return [line.loss for line in steps(home / "whole")]


def config(home: Path, name: str, **changes: Any) -> Path:
    return write_config(home, name, checkpoint={"every": 20, "keep_every": 20}, **changes)


def hand_over(home: Path, giver: str, taker: str, step: int) -> None:
    """Nothing but one checkpoint of one run, as the start of another."""
    name = f"step-{step:08d}"
    shutil.copytree(home / giver / "checkpoints" / name, home / taker / "checkpoints" / name)


def test_a_run_goes_from_whole_to_shards_is_killed_goes_back_and_is_exported(
    home: Path, whole: list[float | None]
) -> None:
    hand_over(home, "whole", "shards", 20)
    folder = home / "shards"
    process = start(
        config(home, "shards", pipeline=SHARDED, evaluation=EVALUATED),
        *(*TORCHRUN[:-1], "3", "--max-restarts", "1"),
    )
    # The drafter that does not write.
    said = finish_without(process, "2", folder / "checkpoints" / "step-00000040")
    assert "resumed step-00000020" in said
    losses = {line.step: line.loss for line in steps(folder)}
    assert [losses[i + 1] for i in range(20, STEPS)] == pytest.approx(whole[20:], rel=1e-4)
    seen = events(folder)
    # Every checkpoint was measured on held-out samples, and the best decoded at the end.
    assert seen.count("resumed") == 2 and "validating" in seen and seen[-1] == "finished"
    assert (folder / "checkpoints" / "best").is_symlink()
    assert "tau" in said and "here it is a shard" in said

    hand_over(home, "shards", "again", 100)
    assert "resumed step-00000100" in run(config(home, "again"))
    losses = {line.step: line.loss for line in steps(home / "again")}
    assert [losses[i + 1] for i in range(100, STEPS)] == pytest.approx(whole[100:], rel=1e-4)

    checkpoint = folder / "checkpoints" / f"step-{STEPS:08d}"
    with Trainer(home / "export.log", "export", checkpoint, home / "exported") as export:
        assert export.wait() == 0, export.said()
    assert (home / "exported" / "model.safetensors").is_file()


def test_drafters_of_two_nodes_hold_one_and_stop_together(
    home: Path, whole: list[float | None]
) -> None:
    """One drafter on each: it is all of them that share, not a node's."""
    pipeline = {**SHARDED, "drafters": 1}
    path = write_config(home, "nodes", pipeline=pipeline, checkpoint={"every": 10_000})
    first = home / "node-0"
    with two_nodes(home, path) as ranks:
        wait_for(lambda: (first / "metrics.jsonl").exists() and len(steps(first)) >= 3)
        # The node that does not write is asked.
        for rank in ranks[2:]:
            rank.signal(signal.SIGINT)
        assert [rank.wait() for rank in ranks] == [130] * 4, [rank.said() for rank in ranks]
    assert "here it is a shard" in ranks[1].said()
    losses = [line.loss for line in steps(first)]
    assert 3 <= len(losses) < STEPS
    assert losses == pytest.approx(whole[: len(losses)], rel=1e-4)
    name = f"step-{len(losses):08d}"
    assert [p.name for p in (first / "checkpoints").glob("step-*")] == [name]
    weights = load_file(first / "checkpoints" / name / "master.safetensors")
    other = load_file(home / "whole" / "checkpoints" / "step-00000020" / "master.safetensors")
    assert {n: w.shape for n, w in weights.items()} == {n: w.shape for n, w in other.items()}
