"""Checkpoints are whole or not there, of this config or refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint import (
    CheckpointStore,
    drafter_folder,
    fitting,
    newest_of_run,
    newest_step,
)
from trainer.config import CheckpointConfig, TargetConfig
from trainer.errors import CheckpointError, ResourceError

pytestmark = pytest.mark.torch


def state(value: float) -> dict[str, Any]:
    tensors = {"a.weight": torch.full((3, 2), value), "norm": torch.arange(4.0) * value}
    return {"master": tensors, "average": tensors, "square": tensors, "skipped": int(value)}


def export(folder: Path, master: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(str(len(master)))


def make_store(folder: Path, fingerprint: Any = None, **config: Any) -> CheckpointStore:
    checkpoint = CheckpointConfig.model_validate(config)
    return CheckpointStore(folder, checkpoint, fingerprint or {"seed": 1}, export)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    store = make_store(tmp_path / "c")
    path = store.save(7, state(2.0), best=1.5)
    assert store.newest() == path
    loaded = store.load(path)
    assert (loaded.step, loaded.best, loaded.state["skipped"]) == (7, 1.5, 2)
    for kind in ("master", "average", "square"):
        for name, value in state(2.0)[kind].items():
            assert torch.equal(loaded.state[kind][name], value)
    assert (path / "drafter" / "config.json").read_text() == "2"


def test_last_best_and_every_nth_are_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path / "c", keep_last=2, keep_every=40)
    for step in range(10, 101, 10):
        store.save(step, state(1.0))
        if step == 30:
            store.mark_best(step)
    assert store.steps() == [30, 40, 80, 90, 100]
    assert (tmp_path / "c" / "best").resolve().name == "step-00000030"


def test_another_config_is_refused_with_the_field_and_both_values(tmp_path: Path) -> None:
    path = make_store(tmp_path / "c", {"seed": 1, "drafter.num_layers": 5}).save(3, state(1.0))
    other = make_store(tmp_path / "c", {"seed": 1, "drafter.num_layers": 2, "new": True})
    with pytest.raises(CheckpointError) as caught:
        other.load(path)
    message = str(caught.value)
    assert "drafter.num_layers: 5 in the checkpoint, 2 in the config" in message
    assert "new: 'absent' in the checkpoint, True in the config" in message
    assert "seed" not in message


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path / "c")
    path = store.save(3, state(1.0))
    tensors = path / "square.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"square\.safetensors is damaged or cut short"):
        store.load(path)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        store.load(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"w": torch.zeros(1, 2)}, r"w of average\.safetensors has shape \(1, 2\).* is \(3, 2\)"),
        ({}, r"w of average\.safetensors is absent in the checkpoint"),
    ],
)
def test_tensors_of_another_shape_are_named_and_not_spread_over_the_drafters(
    tensors: dict[str, torch.Tensor], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        fitting({"average": tensors}, "average", "w", (3, 2))


NO_FIELDS = '{"step": 3, "skipped": 0, "fingerprint": []}'


@pytest.mark.parametrize("text", ["{}", "[1]", '{"step": 3}', "{", NO_FIELDS])
def test_a_record_that_is_no_checkpoints_is_named(tmp_path: Path, text: str) -> None:
    store = make_store(tmp_path / "c")
    path = store.save(3, state(1.0))
    (path / "state.json").write_text(text)
    for look in (store.check, lambda: store.load(path), lambda: drafter_folder(path)):
        with pytest.raises(CheckpointError, match=r"state\.json"):
            look()


def test_a_save_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    store = make_store(tmp_path / "c")
    store.save(10, state(1.0))

    def full(path: Path, master: dict[str, torch.Tensor]) -> None:
        path.mkdir()
        raise OSError(28, "No space left on device")

    store.export = full
    with pytest.raises(ResourceError, match="No space left"):
        store.save(20, state(2.0))
    assert store.steps() == [10]
    assert not list((tmp_path / "c").glob("*.part"))


def test_the_environment_chooses_what_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "c")
    first, second = store.save(1, state(1.0)), store.save(2, state(1.0))
    assert store.newest() == second
    monkeypatch.setenv("DFLASH_RESUME", str(first))
    assert store.newest() == first
    monkeypatch.setenv("DFLASH_RESUME", "no")
    assert store.newest() is None
    assert os.environ["DFLASH_RESUME"] == "no"


def test_steps_of_the_run_gone_on_from_count_until_there_are_own_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make_store(tmp_path / "before").save(40, state(1.0))
    own = tmp_path / "own"
    assert newest_step(own) == 0
    monkeypatch.setenv("DFLASH_RESUME", str(before))
    assert newest_step(own) == 40
    make_store(own).save(60, state(1.0))
    assert newest_step(own) == 60
    monkeypatch.setenv("DFLASH_RESUME", str(tmp_path / "absent"))
    assert newest_step(tmp_path / "none") == 0


def test_a_run_that_goes_back_keeps_what_it_writes_and_resumes_from_that(tmp_path: Path) -> None:
    store = make_store(tmp_path / "c", keep_last=2)
    for step in (800, 900, 1000):
        store.save(step, state(1.0))
    store.mark_best(1000)
    assert store.abandon_beyond(1000) is None
    aside = store.abandon_beyond(0)
    assert aside is not None
    assert sorted(p.name for p in aside.iterdir()) == ["step-00000900", "step-00001000"]
    assert not (tmp_path / "c" / "best").is_symlink(), "it would name nothing"
    fresh = store.save(500, state(2.0))
    assert store.steps() == [500]
    assert store.newest() == fresh
    store.save(900, state(2.0))
    assert store.abandon_beyond(500) == aside, "a second time over the first"
    assert store.load(aside / "step-00000900").state["skipped"] == 2


def test_what_a_run_ends_with_is_its_own_not_what_it_went_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make_store(tmp_path / "before").save(40, state(1.0))
    own = make_store(tmp_path / "own")
    monkeypatch.setenv("DFLASH_RESUME", str(before))
    assert newest_of_run(own.folder) == before
    made = own.save(60, state(1.0))
    assert newest_of_run(own.folder) == made
    assert own.newest() == before


def test_a_checkpoint_says_which_target_it_was_trained_for_and_with_which_template(
    tmp_path: Path,
) -> None:
    target = TargetConfig(model="some/target", chat_template=Path("/its/own.jinja"))
    fields = {f"target.{name}": value for name, value in target.model_dump(mode="json").items()}
    path = make_store(tmp_path / "c", {"seed": 1} | fields).save(3, state(1.0))
    assert drafter_folder(path) == (path / "drafter", target)
    assert drafter_folder(path / "drafter") == (path / "drafter", None)
    with pytest.raises(CheckpointError, match="there is no folder"):
        drafter_folder(tmp_path / "absent")
    unknown = make_store(tmp_path / "u", {"seed": 1}).save(3, state(1.0))
    with pytest.raises(CheckpointError, match=r"target\.model: Field required"):
        drafter_folder(unknown)


@pytest.mark.parametrize("asked", ["an earlier one", "no"])
def test_ranks_that_torchrun_starts_again_go_on_from_what_they_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    store = make_store(tmp_path / "c", keep_last=2)
    for step in (10, 20, 90):
        store.save(step, state(1.0))
    wanted = store.folder / "step-00000020" if asked != "no" else None
    monkeypatch.setenv("DFLASH_RESUME", str(wanted or "no"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert store.newest() == wanted
    # They end before their first checkpoint: the later one is still another course's.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert store.newest() == wanted
    store.abandon_beyond(20 if wanted else 0)
    for step in (30, 40):
        made = store.save(step, state(2.0))
    assert store.newest() == made
    assert not (store.folder / "step-00000020").exists(), "what is asked for may be gone"
