"""One message for everything wrong with a config, before anything long begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_target import (
    SHAPE,
    TEMPLATE,
    VOCABULARY,
    make_home,
    make_tokenizer,
    run_config,
    save_target,
    write_chats,
)
from transformers import AutoModelForCausalLM, FalconConfig, GPT2Config, LlamaConfig

from trainer.__main__ import main
from trainer.config import load_config, parse_config
from trainer.data.sources import LOOKED_AT
from trainer.errors import ConfigError, TrainerError
from trainer.resolve import resolve

pytestmark = pytest.mark.torch


def make_prompts(path: str) -> dict[str, Any]:
    return {"prompts": [{"kind": "self", "count": 4}, {"kind": "file", "path": path}]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    save_target(folder / "target", "qwen3")
    write_chats(folder / "chats.jsonl", 3)
    return folder


def message(folder: Path, **changes: Any) -> str:
    with pytest.raises(TrainerError) as caught:
        resolve(parse_config(run_config(folder, **changes), source="c.yaml", base=folder))
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimization": {"learnin_rate": 1}}, "optimization.learnin_rate: unknown key; did you"),
        ({"drafter": {"dflash2": {"selector_rnk": 2}}}, "did you mean `selector_rank`?"),
        (
            {"data": {"make": {"prompts": [{"kind": "self", "cuont": 4, "count": 4}]}}},
            "data.make.prompts.0.cuont: unknown key; did you mean `count`?",
        ),
        ({"optimization": {"epochs": 2}}, "state either steps or epochs"),
        ({"optimization": {"rows": 0}}, "optimization.rows: Input should be greater than or equal"),
        ({"data": {"files": []}}, "nothing to learn from"),
        ({"nonsense": 3}, "nonsense: unknown key"),
        ({"pipeline": {"targets": 0}}, "targets is 0"),
        ({"optimization": {"learning_rate": float("inf")}}, "learning_rate: Input should be a fin"),
    ],
)
def test_every_problem_is_named_with_its_field(
    home: Path, changes: dict[str, Any], says: str
) -> None:
    assert says in message(home, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"drafter": {"mask_token_id": 9999}}, "mask_token_id 9999 is outside the vocabulary"),
        ({"drafter": {"target_layer_ids": [2, 40]}}, "outside the target's 6 layers"),
        ({"drafter": {"num_heads": 3}}, "num_heads 3 is not a multiple"),
        ({"data": {"sequence_length": 4096}}, "max_position_embeddings 256"),
        ({"data": {"anchors": 500}}, "data.anchors is 500"),
        ({"target": {"model": "/nowhere"}}, "no file or folder /nowhere"),
    ],
)
def test_what_does_not_fit_the_target_is_named_with_both_values(
    home: Path, changes: dict[str, Any], says: str
) -> None:
    assert says in message(home, **changes)


FEW = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("target", "drafter", "says"),
    [
        (GPT2Config(**FEW), {}, "no rope_theta in the target's GPT2Config"),
        (
            FalconConfig(**FEW, alibi=False),
            {"intermediate_size": None},
            "its FalconConfig states no intermediate_size",
        ),
        (LlamaConfig(**FEW), {"num_layers": 9}, "fewer num_layers for the target's 6 layers"),
    ],
)
def test_a_target_of_another_build_is_told_apart_by_what_it_lacks(
    tmp_path: Path, target: Any, drafter: dict[str, Any], says: str
) -> None:
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    assert says in message(tmp_path, drafter=drafter)


def test_what_the_target_does_not_state_the_config_may(tmp_path: Path) -> None:
    falcon = AutoModelForCausalLM.from_config(FalconConfig(**FEW, alibi=False))
    falcon.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    tree = run_config(tmp_path, drafter={"intermediate_size": 48})
    drafter = resolve(parse_config(tree, source="c.yaml", base=tmp_path)).drafter
    assert (drafter.hidden_size, drafter.intermediate_size) == (32, 48)


@pytest.mark.parametrize(
    ("pipeline", "optimization", "says"),
    [
        ({}, {}, "executor is 'inline': set it to processes"),
        ({"executor": "threads"}, {}, "executor is 'threads': set it to processes"),
        (
            {"executor": "processes", "cuda_graph": True},
            {},
            "which no cuda_graph records; leave out one of them",
        ),
        (
            {"executor": "processes"},
            {"optimizer": "muon"},
            "optimizer muon needs whole matrices, and under pipeline.shard_drafters no drafter has"
            " one; use adamw",
        ),
        ({"executor": "processes"}, {"fp8": "head+mlp"}, "use fp8: head, or leave out shard_draft"),
    ],
)
def test_what_shards_cannot_do_is_refused_with_the_way_out(
    home: Path, pipeline: dict[str, Any], optimization: dict[str, Any], says: str
) -> None:
    sharded = {**pipeline, "shard_drafters": True}
    assert says in message(home, pipeline=sharded, optimization=optimization)


def test_several_problems_come_in_one_message(home: Path) -> None:
    text = message(home, optimization={"rows": 0, "clop": 1.0})
    assert "optimization.rows" in text
    assert "did you mean `clip`?" in text


def test_paths_are_relative_to_the_config(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "c.yaml"
    path.parent.mkdir()
    path.write_text("target: {model: m}\ndata: {files: [a.jsonl]}\noptimization: {steps: 1}\n")
    assert load_config(path).data.files == [str(path.parent / "a.jsonl")]


@pytest.mark.parametrize("text", ["a: [", "- 1", "\x00"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(path)


def test_a_fingerprint_ignores_where_and_how_often_but_not_what(home: Path) -> None:
    def fingerprint(**changes: Any) -> dict[str, Any]:
        tree = run_config(home, **changes)
        return parse_config(tree, source="t", base=home).fingerprint()

    same = fingerprint(checkpoint={"every": 3}, log_every=1, folder="/other")
    assert same == fingerprint()
    assert fingerprint(drafter={"num_layers": 2}) != fingerprint()
    assert fingerprint(seed=5)["seed"] == 5


def test_the_command_prints_one_message_and_no_traceback(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / "bad.yaml"
    path.write_text("target: {modle: x}\n")
    assert main(["check", str(path)]) == 2
    found = capsys.readouterr()
    assert "did you mean `model`?" in found.err
    assert "Traceback" not in found.err
    assert found.err.count("error:") == 1
    assert main(["train", str(home / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err


def test_check_says_what_would_happen(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    path = home / "good.yaml"
    path.write_text(yaml.safe_dump(run_config(home)))
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    for part in (
        "DFlash, 1 layers",
        "mask token",
        "block 4",
        "inline",
        "nothing stands in the way",
    ):
        assert part in said, part


def test_a_mask_token_is_one_that_no_text_uses(home: Path) -> None:
    found = resolve(parse_config(run_config(home), source="t", base=home))
    assert found.drafter.mask_token_id == found.tokenizer.mask_token_id


def test_data_without_a_line_is_no_good_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path / "target")
    (tmp_path / "chats.jsonl").write_text("")
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(run_config(tmp_path)))
    assert main(["data", "check", str(path)]) == 2
    assert "no line can be used" in capsys.readouterr().err
    for command in (["check"], ["data", "prepare"]):
        assert main([*command, str(path)]) == 2
        assert f"no line in {tmp_path / 'chats.jsonl'}" in capsys.readouterr().err


def check(home: Path, **changes: Any) -> int:
    path = home / "c.yaml"
    path.write_text(yaml.safe_dump(run_config(home, **changes)))
    return main(["check", str(path)])


def write_bad_chats(path: Path, count: int) -> Path:
    path.write_text('{"messages": []}\n' * count)
    return path


def test_check_refuses_files_of_which_no_line_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`data check` names each, `check` says so before anything long begins."""
    make_home(tmp_path)
    bad = write_bad_chats(tmp_path / "bad.jsonl", 3)
    unanswered = tmp_path / "unanswered.jsonl"
    unanswered.write_text('{"prompt": "what?"}\n{not json\n')

    def asking(path: Path) -> dict[str, Any]:
        return {"files": [], "make": {"prompts": [{"kind": "file", "path": str(path)}]}}

    for changes, says in [
        ({"data": {"files": [str(bad)]}}, f"none of the 3 lines in {bad} can be used: 3 × `mess"),
        (
            {"data": {"files": [str(unanswered)]}},
            f"none of the 2 lines in {unanswered} can be used",
        ),
        ({"data": asking(bad)}, f"none of the 3 lines in {bad} can be used"),
        ({"evaluation": {"prompts": str(bad)}}, f"none of the 3 lines in {bad} can be used"),
    ]:
        assert check(tmp_path, **changes) == 2
        told = capsys.readouterr()
        assert says in told.err
        assert "nothing stands in the way" not in told.out
    # What the one cannot be used for, the other can.
    assert check(tmp_path, data=asking(unanswered)) == 0


def test_check_says_of_one_file_among_others_that_it_gives_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_home(tmp_path)
    bad = write_bad_chats(tmp_path / "bad.jsonl", 3)
    good = str(tmp_path / "chats.jsonl")
    assert check(tmp_path, data={"files": [str(bad), good]}) == 0
    said = capsys.readouterr().out
    assert f"note: none of the 3 lines in {bad} can be used: 3 × `messages` is empty" in said
    assert good not in said


def test_check_reads_a_file_up_to_its_first_good_line_and_no_further_than_a_thousand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes after a thousand bad ones may be good: it is said, and not refused."""
    make_home(tmp_path)
    long = write_bad_chats(tmp_path / "long.jsonl", LOOKED_AT + 1)
    assert check(tmp_path, data={"files": [str(long)]}) == 0
    said = capsys.readouterr().out
    assert f"note: none of the first 1000 lines in {long} can be used: 1000 × " in said
    late = write_bad_chats(tmp_path / "late.jsonl", LOOKED_AT - 1)
    with late.open("a") as stream:
        stream.write((tmp_path / "chats.jsonl").read_text())
    assert check(tmp_path, data={"files": [str(late)]}) == 0
    assert "note: " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"evaluation": {"prompts": "gone.jsonl"}}, 2, "no data file"),
        ({"evaluation": {}, "data": {"held_out": 0.0}}, 2, "no prompt to evaluate on"),
        ({"evaluation": {"max_new_tokens": 300}}, 2, "evaluation.max_new_tokens"),
        ({"evaluation": {"prompts": "empty.jsonl"}}, 2, "no prompt to evaluate on"),
        ({"data": {"files": ["gone.jsonl"]}}, 2, "no data file"),
        ({"data": {"folder": __file__}}, 2, "is a file"),
        ({"folder": "/proc/run"}, 4, "cannot write to the run's folder"),
        ({"data": {"make": make_prompts("gone.jsonl")}}, 2, "no data file"),
        ({"optimization": {"rows": 10**7}}, 4, "would need about"),
    ],
)
def test_what_would_fail_at_the_end_fails_before_the_first_step(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    code: int,
    says: str,
) -> None:
    make_home(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(run_config(tmp_path, **changes)))
    assert main(["train", str(path)]) == code
    caught = capsys.readouterr()
    assert says in caught.err
    assert "step " not in caught.out
    assert not (tmp_path / "run" / "data").exists()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (b"{% for m in messages %}", "the chat template is no valid Jinja"),
        (b"\xff", "target.chat_template: cannot read"),
        (b"{{ messages | length }}", "has no {% generation %} markers and rewrites"),
        (b"{% generation %}{% endgeneration %}hi", "markers surround no answer"),
        (b"{{ messages[0]['content'] + 1 }}", "refuses the conversation: can only concatenate"),
        (b"{{ raise_exception('never') }}", "refuses the conversation: never, whether"),
    ],
)
def test_a_template_that_shows_no_answer_is_refused_before_a_line_is_read(
    home: Path, template: bytes, says: str
) -> None:
    path = home / "odd.jinja"
    path.write_bytes(template)
    assert says in message(home, target={"chat_template": str(path)})


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    make_home(tmp_path)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "vocab_size": 200}))
    model.save_pretrained(tmp_path / "target")
    assert "its tokenizer knows 260 tokens, its config.json 200" in message(tmp_path)


def test_a_pad_token_that_the_target_has_no_row_for_pads_nothing(tmp_path: Path) -> None:
    make_home(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<extra-{i}>" for i in range(VOCABULARY - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == VOCABULARY
    tokenizer.save_pretrained(tmp_path / "target")
    resolved = resolve(parse_config(run_config(tmp_path), source="t", base=tmp_path))
    assert resolved.tokenizer.pad_token_id == resolved.tokenizer.eos_token_id


def test_a_template_may_want_a_system_message(home: Path) -> None:
    strict = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    path = home / "strict.jinja"
    path.write_text(strict + TEMPLATE)
    tree = run_config(home, target={"model": str(home / "target"), "chat_template": str(path)})
    resolve(parse_config(tree, source="t", base=home))


def test_check_names_a_data_file_that_is_not_there(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / "gone.yaml"
    path.write_text(yaml.safe_dump(run_config(home, data={"files": ["gone.jsonl"]})))
    assert main(["check", str(path)]) == 2
    assert "no data file" in capsys.readouterr().err
