"""What the trainer wrote and reads again may hold anything by then: it is used, or told by file,
line and next step, never a traceback."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_job import drafter_config
from tiny_target import make_model, make_tokenizer, run_config, write_chats

from trainer.checkpoint import CheckpointStore, drafter_folder
from trainer.config import CheckpointConfig, TrainConfig, load_config, parse_config
from trainer.data.features import FeatureFile
from trainer.data.prepare import load_prepared, prepare
from trainer.drafter import format as drafter_format
from trainer.drafter.model import Drafter
from trainer.errors import CheckpointError, ConfigError, DataError, TrainerError
from trainer.records import Report, Response, read_object
from trainer.telemetry import read_events, read_steps

pytestmark = pytest.mark.torch

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 7, 2**31, 10**30, 2.5, float("nan"), float("inf"), "", "x"]),
)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)
TEXTS = ["", "[]", "1", "null", '"x"', "{}", "{", "[" * 100_000, "9" * 5000, "\udcff"]
"""The last is a byte that is no UTF-8."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inside:
        yield (*path, key)
        if isinstance(part, (dict, list)):
            yield from places(part, (*path, key))


@st.composite
def spoilt(draw: st.DrawFn, whole: dict[str, Any]) -> str:
    """The same but for one value, or something else altogether; as it may stand in a file."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(TEXTS))
    found = copy.deepcopy(whole)
    *way, last = draw(st.sampled_from(list(places(whole))))
    inside: Any = found
    for key in way:
        inside = inside[key]
    if draw(st.booleans()):
        del inside[last]
    else:
        inside[last] = draw(ANYTHING)
    return json.dumps(found)


def write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))


def told_well(error: TrainerError, path: Path) -> None:
    """In one line, with the file and what to do."""
    assert path.name in error.what
    assert "\n" not in error.what and len(error.what) < 600
    assert error.next_step


# -- prepared data --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    """A config and the folder prepared by it: the target wrote some prompts and all answers."""
    home = tmp_path_factory.mktemp("made")
    write_chats(home / "chats.jsonl", 8)
    prompts = [
        {"kind": "self", "count": 3, "max_new_tokens": 8},
        {"kind": "file", "path": str(home / "chats.jsonl")},
    ]
    response = {"max_new_tokens": 6, "batch": 4}
    data = {"make": {"prompts": prompts, "response": response}, "files": [], "held_out": 0.3}
    config = parse_config(run_config(home, data=data), source="a test", base=home)
    make_again(config, home / "data")
    return config, home / "data"


def make_again(config: TrainConfig, folder: Path) -> None:
    model = make_model("llama")
    found = prepare(config, folder, make_tokenizer(), lambda: model, lambda _: None)
    assert list(found.prompts())


def copied(made: tuple[TrainConfig, Path]) -> Path:
    folder = made[1].parent / "spoilt"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made[1], folder)
    return folder


@pytest.mark.parametrize("name", ["responses.jsonl", "prompts-0.jsonl"])
def test_a_journals_line_is_used_or_told(made: tuple[TrainConfig, Path], name: str) -> None:
    """And once the line is deleted, what it held is made again, as the message says."""
    config, whole = made
    first, *others = (whole / name).read_text().splitlines()

    @examples(24)
    @given(spoilt(json.loads(first)))
    def tried(line: str) -> None:
        folder = copied(made)
        (folder / "report.json").unlink()
        write(folder / name, "\n".join([others[0], line, *others[1:]]) + "\n")
        try:
            make_again(config, folder)
        except DataError as error:
            told_well(error, folder / name)
            assert f"line 2 of {folder / name} is damaged: " in error.what
            assert error.next_step == "delete that line; what it held is made again"
            write(folder / name, "\n".join(others) + "\n")
            make_again(config, folder)
            assert load_prepared(config, folder) is not None

    tried()


@pytest.mark.parametrize("name", ["report.json", "held_out.jsonl"])
def test_a_prepared_folder_is_used_or_told_and_made_again_as_it_says(
    made: tuple[TrainConfig, Path], name: str
) -> None:
    config, whole = made
    first = (whole / name).read_text().splitlines() if name.endswith("l") else None
    content = json.loads(first[0] if first else (whole / name).read_text())

    @examples(24)
    @given(spoilt(content))
    def tried(text: str) -> None:
        folder = copied(made)
        write(folder / name, text + "\n")
        try:
            make_again(config, folder)
        except DataError as error:
            told_well(error, folder / name)
            if "another config" in error.what:
                return
            assert error.next_step.startswith("delete report.json of the data's folder")
            (folder / "report.json").unlink()
            make_again(config, folder)
            again, before = load_prepared(config, folder), load_prepared(config, whole)
            assert again is not None and before is not None
            assert again.fingerprint == before.fingerprint

    tried()


@pytest.mark.parametrize("name", ["tokens", "supervised", "offsets", "features", "labels"])
@pytest.mark.parametrize(
    "array",
    [
        np.zeros(0, np.int32),
        np.zeros((2, 2), np.int32),
        np.zeros(5),
        np.array(3),
        np.array(["x"]),
        np.arange(9)[::-1].astype(np.int64),
    ],
    ids=["empty", "two dimensions", "floats", "none", "words", "falling"],
)
def test_an_array_of_another_shape_is_told(
    made: tuple[TrainConfig, Path], name: str, array: np.ndarray
) -> None:
    folder = copied(made)
    np.save(folder / "train" / f"{name}.npy", array)
    with pytest.raises(DataError, match=str(folder / "train")) as told:
        load_prepared(made[0], folder)
    assert told.value.next_step.startswith("delete report.json")


def test_an_array_of_no_bytes_is_told(made: tuple[TrainConfig, Path]) -> None:
    folder = copied(made)
    (folder / "train" / "features.npy").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        load_prepared(made[0], folder)


def test_a_key_that_is_no_text_is_another_configs(made: tuple[TrainConfig, Path]) -> None:
    folder = copied(made)
    (folder / "report.json").unlink()
    (folder / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="unfinished data of another config"):
        make_again(made[0], folder)


def test_features_cut_short_are_told_and_a_description_of_another_kind_is_passed_over(
    tmp_path: Path,
) -> None:
    kept = FeatureFile(tmp_path, (1, 4), 6, torch.float32)
    assert kept.begin()
    rows = torch.arange(12.0).view(2, 6)
    start = kept.append(rows)
    assert torch.equal(kept.read(start, 2), rows)
    for count in (4, 10**12):
        with pytest.raises(DataError, match=r"features\.bin is absent or cut short") as told:
            kept.read(start, count)
        assert str(tmp_path / "features.json") in told.value.next_step
    for text in TEXTS:
        write(tmp_path / "features.json", text)
        assert not kept.fits()


def test_what_is_wrong_is_named_by_its_place() -> None:
    line: dict[str, Any] = {
        "key": "k",
        "messages": [{"role": "user", "content": "hi"}],
        "prompt_tokens": [1],
        "ended": True,
        "features": -1,
    }
    with pytest.raises(ValueError, match=r"^response_tokens: missing$"):
        read_object(json.dumps(line), Response)
    with pytest.raises(ValueError, match=r"^response_tokens\.1: .* \(it is 'x'\)$"):
        read_object(json.dumps(line | {"response_tokens": [2, "x"]}), Response)
    with pytest.raises(ValueError, match=r"^messages\.0\.content: missing$"):
        read_object(json.dumps(line | {"messages": [{"role": "user"}]}), Response)
    with pytest.raises(ValueError, match="it holds list, not an object"):
        read_object("[]", Report)


# -- checkpoints and drafters ---------------------------------------------------------------------


def test_a_checkpoints_state_is_used_or_told(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(2)}
    state = {"master": tensors, "average": tensors, "square": tensors, "skipped": 0}
    known = {"seed": 1, "target.model": "m"}
    store = CheckpointStore(
        tmp_path / "c", CheckpointConfig(keep_last=1), known, lambda folder, _: folder.mkdir()
    )
    path = store.save(3, state, best=0.5)
    whole = json.loads((path / "state.json").read_text())

    @examples(40)
    @given(spoilt(whole))
    def tried(text: str) -> None:
        write(path / "state.json", text)
        for look in (store.check, lambda: store.load(path), lambda: drafter_folder(path)):
            try:
                look()
            except CheckpointError as error:
                if "made by another config" not in error.what:
                    told_well(error, path / "state.json")

    tried()


def test_folders_that_no_run_named_are_no_checkpoints(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(2)}
    state = {"master": tensors, "average": tensors, "square": tensors, "skipped": 0}
    store = CheckpointStore(
        tmp_path, CheckpointConfig(keep_last=1), {}, lambda folder, _: folder.mkdir()
    )
    store.save(3, state)
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-mine")
    (tmp_path / "best").symlink_to("step-mine")
    store.save(4, state)
    assert store.steps() == [4]
    assert (tmp_path / "step-mine" / "state.json").is_file()


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
def test_a_drafters_config_is_used_or_told(tmp_path: Path, form: drafter_format.Form) -> None:
    config = drafter_config()
    drafter_format.save(tmp_path, config, Drafter(config).state_dict(), form=form)
    path = tmp_path / "config.json"

    @examples(60)
    @given(spoilt(json.loads(path.read_text())))
    def tried(text: str) -> None:
        write(path, text)
        try:
            drafter_format.load(tmp_path)
        except CheckpointError as error:
            assert str(tmp_path) in error.what
            assert error.next_step

    tried()


# -- what people write, and telemetry -------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "seed: 2001-13-45",
        "seed: !!int x",
        "seed: !!int ''",
        "seed: !!bool x",
        "seed: !!timestamp x",
        "seed: 0x_",
        "seed: " + "9" * 5000,
        "[" * 5000,
        "? [a]\n: b",
        "1: 2",
    ],
)
def test_yaml_that_python_refuses_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_config(path)


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_a_line_of_telemetry_that_is_none_is_passed_over(text: str) -> None:
    assert list(read_steps(text + "\n")) == []
    assert list(read_events(text + "\n")) == []
