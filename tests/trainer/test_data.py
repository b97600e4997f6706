"""Conversations, templates and packing: what goes into a batch, and what is left out and why."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_samples import samples_of, write_samples
from tiny_target import MARKED_TEMPLATE, TEMPLATE, make_tokenizer, run_config, write_chats

from trainer.config import parse_config
from trainer.data.conversation import (
    Conversation,
    Rejection,
    is_held_out,
    prompt_key,
    read_conversations,
)
from trainer.data.pack import PackedBatches, pack_rows
from trainer.data.sources import check_files
from trainer.data.store import Samples
from trainer.data.template import PROOFS, ChatTemplate, Encoded
from trainer.errors import DataError

pytestmark = pytest.mark.torch

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yes"}


def read(path: Path, *lines: str) -> list[Conversation | Rejection]:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return list(read_conversations(str(path)))


# -- lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "holds list"),
        ('{"text": "x"}', "neither `messages` nor a `prompt`"),
        ('{"messages": []}', "empty or no list"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "role is 'robot'"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "role is ['user']"),
        ('{"messages": [{"role": "user", "content": 7}]}', "content is no text"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "nobody asks"),
        # An emoji cut in two: JSON lets it through, no tokenizer takes it.
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "half a surrogate pair"),
        ('{"prompt": "\\ud83d"}', "half a surrogate pair"),
        ('{"prompt": ' + "9" * 5000 + "}", "not read"),
        ("[" * 100_000, "not read"),
    ],
)
def test_a_bad_line_is_left_out_with_its_number_and_reason(
    tmp_path: Path, line: str, reason: str
) -> None:
    good = json.dumps({"messages": [USER, ANSWER]})
    first, bad, last = read(tmp_path / "chats.jsonl", good, line, good)
    assert isinstance(first, Conversation)
    assert isinstance(last, Conversation)
    assert isinstance(bad, Rejection)
    assert bad.where == "chats.jsonl:2"
    assert reason in bad.reason


def test_gzip_and_bare_prompts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    with gzip.open(path, "wt") as stream:
        stream.write(json.dumps({"task_id": "1", "prompt": "def f():\n"}) + "\n")
    [found] = read_conversations(str(path), "Complete:\n{prompt}")
    assert isinstance(found, Conversation)
    assert found.messages == [{"role": "user", "content": "Complete:\ndef f():"}]


def test_a_cut_archive_and_an_absent_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress(b'{"prompt": "x"}\n' * 100)
    path.write_bytes(whole[:20] + b"\xff" * 8 + whole[28:])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz"):
        list(read_conversations(str(path)))
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz"):
        list(read_conversations(str(path)))
    with pytest.raises(DataError, match="no data file"):
        list(read_conversations(str(tmp_path / "absent.jsonl")))


def test_the_held_out_share_depends_on_the_prompt_alone() -> None:
    keys = [prompt_key([{"role": "user", "content": f"question {i}"}]) for i in range(2000)]
    held = {key for key in keys if is_held_out(key, 0.1)}
    assert 140 < len(held) < 260
    assert {key for key in reversed(keys) if is_held_out(key, 0.1)} == held
    assert held <= {key for key in keys if is_held_out(key, 0.2)}


# -- the loss mask --------------------------------------------------------------------------------


def supervised_text(template: str, messages: list[dict[str, str]]) -> str:
    tokenizer = make_tokenizer(template)
    encoded = ChatTemplate(tokenizer).encode(messages)
    return str(tokenizer.decode(encoded.tokens[encoded.supervised]))


@pytest.mark.parametrize("template", [TEMPLATE, MARKED_TEMPLATE], ids=["prefixes", "markers"])
def test_exactly_the_assistants_words_and_end_tokens_are_supervised(template: str) -> None:
    later = [USER, ANSWER, {"role": "user", "content": "and"}, {**ANSWER, "content": "no"}]
    assert supervised_text(template, later) == "yes</s>no</s>"


def test_both_ways_agree() -> None:
    templates = (TEMPLATE, MARKED_TEMPLATE)
    ways = [ChatTemplate(make_tokenizer(t)).encode([USER, ANSWER]) for t in templates]
    assert np.array_equal(ways[0].tokens, ways[1].tokens)
    assert np.array_equal(ways[0].supervised, ways[1].supervised)


def test_turns_that_the_template_rewrites_once_others_follow_are_context_alone() -> None:
    """As Qwen3's, which shows the thoughts of the last answer only."""
    thinking = TEMPLATE.replace(
        "{{ message['content'] }}",
        "{% if message['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ message['content'] }}",
    )
    assert thinking != TEMPLATE
    later = [USER, ANSWER, {"role": "user", "content": "and"}, {**ANSWER, "content": "no"}]
    assert supervised_text(thinking, later).endswith("no</s>")
    assert "yes" not in supervised_text(thinking, later)
    assert ChatTemplate(make_tokenizer(thinking)).encode(later).rewritten == 1
    assert ChatTemplate(make_tokenizer(TEMPLATE)).encode(later).rewritten == 0


def test_a_template_that_rewrites_earlier_turns_stops_clearly(tmp_path: Path) -> None:
    rewriting = "{{ messages | length }} {% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="generation"):
        ChatTemplate(make_tokenizer(rewriting)).encode([USER, ANSWER])
    # And with the line, which may be the only one of its kind.
    write_chats(tmp_path / "chats.jsonl", 1)
    config = parse_config(run_config(tmp_path), source="t", base=tmp_path)
    with pytest.raises(DataError, match=r"chats\.jsonl:1: .*rewrites what came"):
        check_files(config, make_tokenizer(rewriting), lambda _: None)


@pytest.mark.parametrize("marker", ["{%generation %}", "{%-   generation -%}", "{%+ generation %}"])
def test_markers_are_seen_however_they_are_written(marker: str) -> None:
    template = MARKED_TEMPLATE.replace("{% generation %}", marker)
    assert supervised_text(template, [USER, ANSWER]) == "yes</s>"
    assert ChatTemplate(make_tokenizer(template)).has_markers


@pytest.mark.parametrize("template", [TEMPLATE, MARKED_TEMPLATE], ids=["prefixes", "markers"])
@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        ("raise_exception('no system')", "no system"),
        ("messages[0]['content'] + 1", 'can only concatenate str (not "int") to str'),
        ("1 / 0", "division by zero"),
    ],
)
def test_a_conversation_that_the_template_refuses_is_left_out_with_its_line(
    tmp_path: Path, template: str, refusal: str, says: str
) -> None:
    strict = f"{{% if messages[0]['role'] == 'system' %}}{{{{ {refusal} }}}}{{% endif %}}"
    tokenizer = make_tokenizer(strict + template)
    lines = [[USER, ANSWER], [{"role": "system", "content": "be kind"}, USER, ANSWER]]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in lines))
    tree = run_config(tmp_path, data={"files": [str(path)]})
    rejected: list[Rejection] = []
    config = parse_config(tree, source="t", base=tmp_path)
    report = check_files(config, tokenizer, rejected.append)
    assert report["samples"]["samples"] == 1
    reason = f"the chat template refuses the conversation: {says}"
    assert rejected == [Rejection("chats.jsonl:2", reason)]
    # And as a prompt, which the target would be asked.
    refusals = [ChatTemplate(tokenizer).refusal(messages[:-1]) for messages in lines]
    assert refusals == [None, reason]


def test_a_conversation_with_a_token_that_the_target_has_no_row_for_is_left_out(
    tmp_path: Path,
) -> None:
    tokenizer = make_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<image>"])
    lines = [[USER, ANSWER], [{**USER, "content": "what is <image>?"}, ANSWER]]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in lines))
    tree = run_config(tmp_path, data={"files": [str(path)]})
    config = parse_config(tree, source="t", base=tmp_path)
    rejected: list[Rejection] = []
    assert check_files(config, tokenizer, rejected.append, rows)["samples"]["samples"] == 1
    reason = "<image> is a token that the target's embedding has no row for"
    assert rejected == [Rejection("chats.jsonl:2", reason)]
    # And as a prompt, which the target would be asked.
    template = ChatTemplate(tokenizer, rows)
    assert [template.refusal(messages[:-1]) for messages in lines] == [None, reason]
    with pytest.raises(DataError, match="<image>"):
        template.prompt(lines[1][:-1])


def test_an_answer_beyond_the_row_is_left_out_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    lines = [[{**USER, "content": "why " * words}, ANSWER] for words in (1, 90)]
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in lines))
    tree = run_config(tmp_path, data={"files": [str(path)], "sequence_length": 64})
    config = parse_config(tree, source="t", base=tmp_path)
    rejected: list[Rejection] = []
    report = check_files(config, make_tokenizer(TEMPLATE), rejected.append)
    assert report["samples"]["samples"] == 1
    assert rejected == [Rejection("chats.jsonl:2", "no supervised pair of tokens in reach")]


def test_a_tokenizer_without_a_template_stops_clearly() -> None:
    with pytest.raises(DataError, match="no chat template"):
        ChatTemplate(make_tokenizer(None))


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        TEMPLATE.replace("message['content']", "message['content'] | trim"),
        TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] }}{{ loop.index }}"),
    ],
    ids=["literal", "trims", "counts"],
)
def test_many_prompts_are_encoded_as_each_alone(template: str) -> None:
    chat = ChatTemplate(make_tokenizer(template))
    many = [[{"role": "user", "content": f" question {i} "}] for i in range(PROOFS + 5)]
    many.append([{"role": "system", "content": "be kind"}, {"role": "user", "content": "why?"}])
    many += [[*many[0], {"role": "assistant", "content": "so"}, *many[1]]]
    assert chat.prompts(many) == [chat.prompt(messages) for messages in many]
    assert chat.prompts([]) == []


def test_the_users_frame_surrounds_the_users_words() -> None:
    before, after = ChatTemplate(make_tokenizer()).user_frame()
    assert (before, after) == ("<s>user\n", "</s>\n<s>assistant\n")


# -- packing --------------------------------------------------------------------------------------


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=200),
    row=st.integers(16, 64),
    seed=st.integers(0, 5),
)
def test_every_sample_is_packed_once_and_no_row_overflows(
    lengths: list[int], row: int, seed: int
) -> None:
    rows = pack_rows(np.array(lengths), row, seed)
    assert sorted(sample for one in rows for sample in one) == list(range(len(lengths)))
    for one in rows:
        assert sum(min(lengths[sample], row) for sample in one) <= row


def make_batches(count: int = 23, **changes: object) -> PackedBatches:
    generator = np.random.default_rng(0)
    samples = []
    for _ in range(count):
        length = int(generator.integers(6, 40))
        tokens = generator.integers(4, 200, length).astype(np.int32)
        samples.append(Encoded(tokens, np.arange(length) >= 3))
    tree = run_config(Path("/x"), **changes)
    return PackedBatches(samples_of(samples), parse_config(tree, source="t", base=Path("/")), 0)


def test_a_batch_is_a_function_of_step_and_slot() -> None:
    ours, theirs = make_batches(), make_batches()
    for step in (7, 0, 3, 7):
        mine, other = ours(step, 0), theirs(step, 0)
        assert mine.sample_ids == other.sample_ids
        for name, value in mine.tensors().items():
            assert torch.equal(value, other.tensors()[name]), name


def test_rows_hold_whole_documents_and_anchors_lie_in_their_supervised_part() -> None:
    batches = make_batches()
    for step in range(6):
        batch = batches(step, 0)
        for row, ids in enumerate(batch.sample_ids):
            for document, sample in enumerate(ids):
                here = batch.document[row] == document
                wanted = batches.samples[sample]
                assert batch.tokens[row][here].tolist() == wanted.tokens.tolist()
                assert batch.position[row][here].tolist() == list(range(len(wanted.tokens)))
                valid = batch.anchors[row][batch.anchor_valid[row]]
                assert (batch.document[row][valid] == document).any(), "no document starves"
            valid = batch.anchors[row][batch.anchor_valid[row]]
            assert valid.tolist() == sorted(set(valid.tolist()))
            assert batch.supervised[row][valid].all()
            assert batch.supervised[row][valid + 1].all()
            assert (batch.document[row][valid] == batch.document[row][valid + 1]).all()


def test_every_epoch_visits_every_sample_once_in_another_order_with_other_anchors() -> None:
    batches = make_batches(optimization={"rows": 1, "steps": 999})
    count = len(batches.packed)
    epochs = [[batches(e * count + i, 0) for i in range(count)] for e in range(2)]
    seen = [[sample for b in epoch for sample in b.sample_ids[0]] for epoch in epochs]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(23))
    assert seen[0] != seen[1]
    first = {b.sample_ids: b.anchors.tolist() for b in epochs[0]}
    assert any(first[b.sample_ids] != b.anchors.tolist() for b in epochs[1])


def test_how_a_step_is_cut_into_microbatches_does_not_change_its_rows() -> None:
    whole = make_batches(optimization={"rows": 4, "microbatches": 1})
    parts = make_batches(optimization={"rows": 1, "microbatches": 4})
    for step in range(3):
        rows = [parts(step, slot).tokens[0] for slot in range(4)]
        assert torch.equal(whole(step, 0).tokens, torch.stack(rows))


@pytest.mark.parametrize("changed", ["tokens", "supervised", "labels"])
def test_a_fingerprint_changes_with_any_value(changed: str) -> None:
    samples = make_batches().samples
    values = getattr(samples, changed).copy()
    values[5] = ~values[5]
    other = replace(samples, **{changed: values})
    assert samples.fingerprint()["sha256"] != other.fingerprint()["sha256"]


def test_a_fingerprint_stays_what_it_was_when_checkpoints_were_made() -> None:
    """It is part of every checkpoint, which another one makes useless."""
    assert make_batches().samples.fingerprint() == {
        "samples": 23,
        "tokens": 509,
        "supervised": 440,
        "longest": 39,
        "lengths": {"<= 8": 2, "<= 16": 4, "<= 32": 12, "<= 64": 5},
        "sha256": "5d75da8b04260752",
    }


def test_the_loss_may_ask_for_supervised_tokens_alone() -> None:
    sample = Encoded(np.array([9, 7, 5, 7, 3], np.int32), np.array([0, 1, 0, 1, 1], bool))
    assert samples_of([sample, sample]).answers().tolist() == [3, 7]


def test_prepared_data_cut_short_is_refused(tmp_path: Path) -> None:
    sample = Encoded(np.arange(9, dtype=np.int32), np.ones(9, bool))
    samples = write_samples(tmp_path, [sample] * 3)
    np.save(tmp_path / "supervised.npy", samples.supervised[:-3])
    with pytest.raises(DataError, match="cut short"):
        Samples.load(tmp_path)
    (tmp_path / "tokens.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match="cannot be read"):
        Samples.load(tmp_path)


def test_parquet_without_its_reader_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "chats.parquet").touch()
    with pytest.raises(DataError, match=r"chats\.parquet is parquet, which is read") as told:
        list(read_conversations(str(tmp_path / "chats.parquet")))
    assert "pip install datasets" in told.value.next_step


def test_parquet_is_read_like_jsonl(tmp_path: Path) -> None:
    """Runs where the extra ``parquet`` is installed."""
    datasets = pytest.importorskip("datasets")
    write_chats(tmp_path / "chats.jsonl", 5)
    table = datasets.Dataset.from_json(
        str(tmp_path / "chats.jsonl"), cache_dir=str(tmp_path / "cache")
    )
    table.to_parquet(str(tmp_path / "chats.parquet"))
    wanted = [c.messages for c in read_conversations(str(tmp_path / "chats.jsonl"))]
    found = list(read_conversations(str(tmp_path / "chats.parquet")))
    assert [c.messages for c in found] == wanted
    assert [c.where for c in found] == [f"chats.parquet:{i}" for i in range(1, 6)]
    limited = list(read_conversations(str(tmp_path / "chats.parquet"), limit=2))
    assert len(limited) == 2
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "chats.parquet").read_bytes()[:200])
    with pytest.raises(DataError, match=r"torn\.parquet"):
        list(read_conversations(str(tmp_path / "torn.parquet")))
