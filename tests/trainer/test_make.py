"""Data made by the target: batched decoding is decoding, and a kill costs one line at most."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_target import make_model, make_tokenizer, run_config, save_target, write_chats

from trainer.config import parse_config
from trainer.data.conversation import Rejection, prompt_key
from trainer.data.decode import BatchDecoder, Completion, Request
from trainer.data.make import Journal, Maker, Say
from trainer.data.pack import PackedBatches
from trainer.data.prepare import feature_file, load_prepared, prepare
from trainer.data.settings import MakeConfig
from trainer.errors import DataError
from trainer.taps import TappedTarget

pytestmark = pytest.mark.torch
OTHER_KINDS = ("llama", "mistral")
"""Of attention like one of the first two's."""


def decode(model: Any, requests: list[Request], batch: int) -> dict[int, list[int]]:
    decoder = BatchDecoder(model, {2}, 0, batch)
    found = [c for c in decoder.run(requests) if isinstance(c, Completion)]
    assert len(found) == len(requests)
    return {c.key: c.tokens for c in found}


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 20, (count,), generator=generator).tolist()
    return [torch.randint(4, 200, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize(
    "kind", ["qwen3", "gemma3", *(pytest.param(k, marks=pytest.mark.slow) for k in OTHER_KINDS)]
)
def test_rows_that_join_and_leave_decode_as_they_would_alone(kind: str) -> None:
    # float64: otherwise rounding, which differs with the batch's shape, decides near ties.
    model = make_model(kind, dtype=torch.float64)
    requests = [Request(i, p, limit=3 + 5 * (i % 4)) for i, p in enumerate(prompts(11))]
    together = decode(model, requests, batch=4)
    for request in requests:
        alone = model.generate(
            torch.tensor([request.tokens]),
            max_new_tokens=request.limit,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
        )
        assert together[request.key] == alone[0, len(request.tokens) :].tolist(), request.key


def test_what_a_row_draws_does_not_depend_on_its_companions() -> None:
    model = make_model("llama", dtype=torch.float64)
    requests = [Request(i, p, 12, temperature=1.0, seed=5) for i, p in enumerate(prompts(6))]
    assert decode(model, requests, 2) == decode(model, requests, 6)


def test_a_deadline_cuts_rows_and_keeps_what_they_made() -> None:
    decoder = BatchDecoder(make_model("llama"), {2}, 0, 4)
    run = decoder.run([Request(0, [5, 6], 10_000)], deadline=0.0)
    done = [c for c in run if c is not None]
    assert [(c.key, c.ended) for c in done] == [(0, False)]
    assert done[0].tokens


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "j.jsonl")
    journal.append({"key": 1, "said": "a\u2028b"})
    journal.append({"key": 2})
    with (tmp_path / "j.jsonl").open("a") as stream:
        stream.write('{"key": 3, "te')
    again = Journal(tmp_path, "j.jsonl")
    assert list(again) == [1, 2]
    assert again[1]["said"] == "a\u2028b"
    again.append({"key": 4})
    assert list(Journal(tmp_path, "j.jsonl")) == [1, 2, 4]


@pytest.mark.parametrize("damaged", [b"\n", b"\0\0\0\n", b'{"key": 2, \xff\n', b"{}\n", b"2\n"])
def test_a_damaged_line_is_told_with_what_to_do(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "j.jsonl").write_bytes(b'{"key": 1}\n' + damaged + b'{"key": 3}\n')
    with pytest.raises(DataError, match=r"line 2 of .*j\.jsonl is damaged") as told:
        Journal(tmp_path, "j.jsonl")
    assert told.value.next_step == "delete that line; what it held is made again"


def make_maker(folder: Path, say: Say = lambda _: None, **response: float) -> Maker:
    config = MakeConfig.model_validate(
        {
            "prompts": [{"kind": "self", "count": 6, "max_new_tokens": 8}],
            "response": {"max_new_tokens": 8, "batch": 3, **response},
        }
    )
    model = make_model("llama")
    tokenizer = make_tokenizer()
    return Maker(model, tokenizer, config, folder, seed=1, held_out=0.0, say=say)


def journal(folder: Path, name: str | None, items: list[dict[str, Any]]) -> Journal:
    made = Journal(folder, name)
    for item in items:
        made.append(item)
    return made


def test_a_killed_run_makes_only_what_is_missing(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": f"n {i}"}] for i in range(5)]
    asked = journal(tmp_path, None, [{"key": prompt_key(m), "messages": m} for m in turns])
    whole = list(make_maker(tmp_path).responses(asked))
    assert [answer["messages"] for answer in whole] == turns
    path = tmp_path / "responses.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:2]) + "\n" + lines[2][:17])
    assert list(make_maker(tmp_path).responses(asked)) == whole
    assert path.read_text().splitlines()[:2] == lines[:2]
    assert len(path.read_text().splitlines()) == 5


def test_a_time_that_ran_out_is_told_with_what_it_left(tmp_path: Path) -> None:
    """`responses 3/5` alone reads as if two had failed."""
    turns = [[{"role": "user", "content": f"n {i}"}] for i in range(5)]
    asked = journal(tmp_path, None, [{"key": prompt_key(m), "messages": m} for m in turns])
    said: list[str] = []
    assert len(list(make_maker(tmp_path, said.append, seconds=1e-6).responses(asked))) == 3
    assert said[-2].startswith("data: responses 3/5 | ")
    assert said[-1] == (
        "data: the 1e-06 s for responses are over: the run goes on with these 3, without the other"
        " 2"
    )
    said.clear()
    assert len(list(make_maker(tmp_path, said.append, seconds=600).responses(asked))) == 5
    assert said[-1].startswith("data: responses 5/5 | ")


def found_prompts(folder: Path) -> tuple[list[str], list[str]]:
    """Texts, and the reasons of what was left out."""
    rejected: list[Rejection] = []
    found = make_maker(folder).prompts(rejected.append)
    return [found[key]["messages"][0]["content"] for key in found], [r.reason for r in rejected]


def test_self_made_prompts_are_repeatable_and_end_on_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    texts = []
    for name in ("a", "b"):
        try:
            found, _ = found_prompts(tmp_path / name)
        except DataError:
            found = []
        texts.append(found)
    assert texts[0] == texts[1]
    records = Journal(tmp_path / "a", "prompts-0.jsonl")
    assert len(records) == 6
    assert len(texts[0]) <= sum(records[key]["ended"] for key in records)


def test_a_self_made_prompt_that_did_not_end_is_left_out_and_counted(tmp_path: Path) -> None:
    records = [
        {"key": key, "text": text, "ended": ended}
        for key, text, ended in ((0, "cut sho", False), (1, "What is 2 + 2?", True), (2, "", True))
    ]
    records += [{"key": key, "text": "cut", "ended": False} for key in (3, 4, 5)]
    journal(tmp_path, "prompts-0.jsonl", records)

    found, reasons = found_prompts(tmp_path)

    assert found == ["What is 2 + 2?"]
    assert sorted(reasons) == [*["did not end within 8 tokens"] * 4, "is empty"]


def test_no_prompt_at_all_says_why_and_what_to_do(tmp_path: Path) -> None:
    records = [{"key": key, "text": "cut", "ended": False} for key in range(6)]
    journal(tmp_path, "prompts-0.jsonl", records)

    with pytest.raises(DataError, match=r"did not end within 8 tokens \(6\)") as told:
        found_prompts(tmp_path)

    assert "max_new_tokens" in told.value.next_step


def made_config(folder: Path, **data: Any) -> Any:
    tree = run_config(folder)
    tree["data"] = {
        "make": {
            "prompts": [{"kind": "file", "path": str(folder / "prompts.jsonl")}],
            "response": {"max_new_tokens": 12, "batch": 4},
        },
        "sequence_length": 64,
        "anchors": 8,
        "held_out": 0.3,
        **data,
    }
    return parse_config(tree, source="test", base=folder)


def test_prepared_data_is_the_targets_own_tokens_split_by_prompt(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    lines = [json.dumps({"prompt": f"question {i}"}) for i in range(12)] + ["{broken"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    config, tokenizer, said = made_config(tmp_path), make_tokenizer(), []
    folder = tmp_path / "data"
    found = prepare(config, folder, tokenizer, lambda: make_model("llama"), said.append)
    assert len(found.train) + len(found.held_out) == 12
    prompts = list(found.prompts())
    assert len(found.held_out) == len(prompts) > 0
    held = {prompt[0]["content"] + "</s>" for prompt in prompts}
    shown = {tokenizer.decode(found.train[i].tokens) for i in range(len(found.train))}
    assert not any(prompt in text for prompt in held for text in shown)
    assert found.report["rejected"]["count"] == 1
    assert any("not JSON" in line for line in said)
    sample = found.train[0]
    text = tokenizer.decode(sample.tokens[~sample.supervised])
    assert text.startswith("<s>user\nquestion")
    assert text.endswith("<s>assistant\n")
    # Again: nothing is made, the same data comes back.
    second = prepare(config, folder, tokenizer, lambda: pytest.fail("made again"), said.append)
    assert second.fingerprint == found.fingerprint


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_features_kept_while_writing_are_those_of_a_pass_of_its_own(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "q" * n}) + "\n" for n in range(1, 10))
    )
    model = make_model(kind, dtype=torch.float64)
    config = made_config(tmp_path, held_out=0.0, cache_features=True)
    layers = (1, 4)
    tokenizer, folder = make_tokenizer(), tmp_path / "data"
    found = prepare(config, folder, tokenizer, lambda: model, lambda _: None, layers)
    kept = feature_file(folder, model, layers)
    assert kept.fits()
    assert not feature_file(folder, model, (1, 3)).fits()
    stage = TappedTarget(model, layers, torch.device("cpu"))
    for index in range(len(found.train)):
        tokens = torch.from_numpy(found.train[index].tokens.astype("int64"))[None]
        wanted = stage.tap(tokens, torch.arange(tokens.shape[1])[None])[0]
        rows = kept.read(int(found.train.features[index]), tokens.shape[1])
        torch.testing.assert_close(rows[:-1], wanted[:-1])


def test_an_unfinished_folder_keeps_no_features_of_other_taps(tmp_path: Path) -> None:
    """What the journal says of places in the features would hold for others' rows."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "q" * n}) + "\n" for n in range(1, 10))
    )
    model = make_model("llama")
    config = made_config(tmp_path, held_out=0.0, cache_features=True)
    tokenizer, folder = make_tokenizer(), tmp_path / "data"
    first = prepare(config, folder, tokenizer, lambda: model, lambda _: None, (1, 4))
    (folder / "report.json").unlink()
    made = folder / "responses.jsonl"
    made.write_text("".join(made.read_text().splitlines(keepends=True)[:4]))
    second = prepare(config, folder, tokenizer, lambda: model, lambda _: None, (1, 3))
    assert second.fingerprint == first.fingerprint
    assert sorted(second.train.features == -1) == [False] * 4 + [True] * 5
    assert feature_file(folder, model, (1, 4)).fits()


def test_a_held_out_prompt_may_hold_any_character(tmp_path: Path) -> None:
    odd = "one\u2028two\x85three"
    turns = [{"role": "user", "content": odd}, {"role": "assistant", "content": "yes indeed"}]
    write_chats(tmp_path / "chats.jsonl", 20)
    with (tmp_path / "chats.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
    tree = run_config(tmp_path, data={"held_out": 0.9})
    config = parse_config(tree, source="t", base=tmp_path)
    found = prepare(config, tmp_path / "d", make_tokenizer(), lambda: None, lambda _: None)
    assert turns[:1] in list(found.prompts())
    (tmp_path / "d" / "held_out.jsonl").unlink()
    with pytest.raises(DataError, match=r"held_out\.jsonl"):
        list(found.prompts())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        """Bytes, while so many chats of 2,000 tokens are prepared."""
        home = tmp_path / f"{count}-{len(list(tmp_path.iterdir()))}"
        home.mkdir()
        answer = {"role": "assistant", "content": "word " * 400}
        with (home / "chats.jsonl").open("w") as stream:
            for number in range(count):
                turns = [{"role": "user", "content": f"n {number}"}, answer]
                stream.write(json.dumps({"messages": turns}) + "\n")
        config = parse_config(run_config(home), source="t", base=home)
        # What others left is not to be collected, and counted, under way.
        gc.collect()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        prepare(config, home / "d", make_tokenizer(), lambda: None, lambda _: None)
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        peak(9)
        grown = min(peak(40), peak(40)) - max(peak(10), peak(10))
    finally:
        tracemalloc.stop()
    # 30 chats are 540 kB of tokens, marks and labels.
    assert grown < 100_000


def test_prompts_may_be_supervised_too_but_not_the_templates_opening(tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 3)
    tree = run_config(tmp_path, data={"held_out": 0.0, "supervise": "everything"})
    config = parse_config(tree, source="t", base=tmp_path)
    tokenizer = make_tokenizer()
    found = prepare(config, tmp_path / "d", tokenizer, lambda: None, lambda _: None)
    for index in range(len(found.train)):
        sample = found.train[index]
        assert tokenizer.decode(sample.tokens[~sample.supervised]) == "<s>user\n"


def test_labels_may_be_the_targets_first_choice_given_the_text_before(tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 6)
    model, tokenizer = make_model("llama"), make_tokenizer()
    tree = run_config(tmp_path, objective={"labels": "target"}, data={"held_out": 0.0})
    config = parse_config(tree, source="t", base=tmp_path)
    found = prepare(config, tmp_path / "d", tokenizer, lambda: model, lambda _: None)
    batch = PackedBatches(found.train, config, 0)(0, 0)
    assert batch.labels is not None
    for row in range(batch.rows):
        tokens = batch.tokens[row][batch.document[row] == 0]
        labels = batch.labels[row][batch.document[row] == 0]
        best = model(input_ids=tokens[None]).logits[0].argmax(-1)
        assert labels[1:].tolist() == best[:-1].tolist()
        assert labels[1:].tolist() != tokens[1:].tolist()


def test_the_target_labels_no_more_of_a_long_sample_than_a_row_holds(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "long " * 80}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    model, read = make_model("llama"), []
    model.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    tree = run_config(tmp_path, objective={"labels": "target"}, data={"held_out": 0.0})
    config = parse_config(tree, source="t", base=tmp_path)
    found = prepare(config, tmp_path / "d", make_tokenizer(), lambda: model, lambda _: None)
    assert read == [config.data.sequence_length]
    assert len(found.train.labels) == len(found.train.tokens) > 400


def test_a_kill_before_the_folder_was_marked_is_no_other_config(tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 6)
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "key").touch()
    config = parse_config(run_config(tmp_path), source="t", base=tmp_path)
    prepare(config, folder, make_tokenizer(), lambda: None, lambda _: None)
    assert (folder / "key").read_text()


def test_a_folder_that_another_process_prepares_is_refused_until_that_ends(tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 6)
    folder = tmp_path / "d"
    folder.mkdir()
    config = parse_config(run_config(tmp_path), source="t", base=tmp_path)
    script = (
        f"from trainer.telemetry import claimed_elsewhere; key = open({str(folder / 'key')!r}, 'a')"
        "; claimed_elsewhere(key); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(DataError, match="another process is preparing data in"):
            prepare(config, folder, make_tokenizer(), lambda: None, lambda _: None)
        other.kill()
    prepare(config, folder, make_tokenizer(), lambda: None, lambda _: None)


def test_a_folder_of_another_config_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    folder = tmp_path / "data"
    first = made_config(tmp_path, held_out=0.0)
    prepare(first, folder, make_tokenizer(), lambda: make_model("llama"), lambda _: None)
    with pytest.raises(DataError, match="another config"):
        load_prepared(made_config(tmp_path, held_out=0.0, sequence_length=48), folder)


def test_an_empty_loss_mask_stops_before_any_step(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    config = parse_config(run_config(tmp_path), source="t", base=tmp_path)
    with pytest.raises(DataError, match="ends without an answer"):
        prepare(config, tmp_path / "d", make_tokenizer(), lambda: None, lambda _: None)
