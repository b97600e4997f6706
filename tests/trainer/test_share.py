"""Data of several nodes: made once, copied, or refused by name. The copying itself between real
nodes: ``test_pipeline_train.py``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from tiny_target import make_tokenizer, run_config, write_chats  # noqa: E402

from trainer.config import TrainConfig, digest, parse_config  # noqa: E402
from trainer.data.prepare import Prepared, prepare  # noqa: E402
from trainer.data.share import MADE, LeaderGoneError, file_names, share_data  # noqa: E402
from trainer.errors import ConfigError, DataError  # noqa: E402
from trainer.pipeline.place import Place  # noqa: E402
from trainer.pipeline.processes import refuse_other_data  # noqa: E402

pytestmark = pytest.mark.torch

SECOND = Place(rank=3, world=4, local_rank=1, targets=1, drafters=1)
"""The first drafter of the second of two nodes."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """torchrun's, as the second node's rank finds it."""
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(made.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    return made


def prepared(home: Path, folder: str, chats: int) -> tuple[TrainConfig, Prepared]:
    write_chats(home / "chats.jsonl", chats)
    config = parse_config(run_config(home, data={"held_out": 0.0}), source="t", base=home)
    made = prepare(config, home / folder, make_tokenizer(), lambda: None, lambda _: None)
    return config, made


def test_a_node_with_other_data_is_refused_with_both_counts(
    tmp_path: Path, store: dist.TCPStore
) -> None:
    config, first = prepared(tmp_path, "first", 12)
    _, second = prepared(tmp_path, "second", 9)
    told = {"key": digest(first.fingerprint), "report": first.fingerprint, "files": {}}
    dist.PrefixStore("dflash-data/0", store).set(MADE, json.dumps(told))
    with pytest.raises(DataError, match=r"second on node 1 holds other data") as error:
        share_data(config, tmp_path / "second", SECOND, None)
    for made in (first, second):
        assert f"{made.fingerprint['samples']} samples" in str(error.value)
    assert not dist.is_initialized()


def test_a_leading_node_that_goes_away_is_named(tmp_path: Path, store: dist.TCPStore) -> None:
    config, _ = prepared(tmp_path, "first", 9)
    dist.PrefixStore("dflash-data/0", store).set(MADE, "")

    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nmore")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.data.share.dist.PrefixStore", lambda *_: Gone())
        with pytest.raises(LeaderGoneError, match="went away before the data was made: Connection"):
            share_data(config, tmp_path / "second", SECOND, None)


def test_the_report_is_copied_last(tmp_path: Path) -> None:
    prepared(tmp_path, "first", 9)
    names = file_names(tmp_path / "first")
    assert names[-1] == "report.json"
    assert "train/tokens.npy" in names and "held_out/tokens.npy" in names


def test_ranks_with_another_config_are_named_by_node() -> None:
    refuse_other_data(SECOND, ["a"] * 4)
    with pytest.raises(ConfigError, match="node 1 has another config or other data than node 0"):
        refuse_other_data(SECOND, ["a", "a", "a", "b"])
