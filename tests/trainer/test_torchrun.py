"""When a run starts its own ranks, and the exact command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_target import run_config

from trainer.__main__ import main
from trainer.config import TrainConfig, parse_config
from trainer.pipeline.torchrun import command, needs_ranks
from trainer.torchrun import exit_code

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
        *(sys.executable, "-m", "trainer.torchrun", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", "8", "-m", "trainer", "train", "a.yaml"),
    ]


def test_several_nodes_meet_where_launch_says() -> None:
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "4711"}
    assert command(["train", "a.yaml"], 3, variables) == [
        *(sys.executable, "-m", "trainer.torchrun"),
        *("--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", "10.0.0.5", "--master-port", "4711"),
        *("--nproc-per-node", "3", "-m", "trainer", "train", "a.yaml"),
    ]


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([-9, 1, 1], 1),  # one was killed, the others lost their peer
        ([1, 4, 1], 4),  # the disk is full
        ([2, 143], 2),  # a config was refused; torchrun ended the others
        ([1, 143], 1),
        ([143, 143], 143),  # all left after a signal
        ([130, 130], 130),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_is_the_cause(ranks: list[int], code: int) -> None:
    assert exit_code(ranks) == code


def test_a_rank_that_failed_ends_before_its_groups_are_destroyed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    assert main(["train", "absent.yaml"]) == 2
    assert ended == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    main(["train", "absent.yaml"])
    assert ended == [2]
    assert "cannot read the config absent.yaml" in capsys.readouterr().err
