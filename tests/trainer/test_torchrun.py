"""When a run starts its own ranks, and the exact command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_target import run_config

from trainer.config import TrainConfig, parse_config
from trainer.pipeline.torchrun import command, needs_ranks

pytestmark = pytest.mark.torch


def config(executor: str) -> TrainConfig:
    tree = run_config(Path("/x"), pipeline={"executor": executor})
    return parse_config(tree, source="t", base=Path("/"))


def test_only_processes_outside_torchrun_need_ranks() -> None:
    assert needs_ranks(config("processes"), {})
    assert not needs_ranks(config("processes"), {"LOCAL_WORLD_SIZE": "2"})
    assert not needs_ranks(config("threads"), {})


def test_one_node_stands_alone() -> None:
    assert command(["train", "a.yaml"], 8, {}) == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", "8", "-m", "trainer", "train", "a.yaml"),
    ]


def test_several_nodes_meet_where_launch_says() -> None:
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "4711"}
    assert command(["train", "a.yaml"], 3, variables) == [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", "10.0.0.5", "--master-port", "4711"),
        *("--nproc-per-node", "3", "-m", "trainer", "train", "a.yaml"),
    ]
