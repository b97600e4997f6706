"""From a config to a prepared folder: made or read, tokenized, split, reported; one sample at a
time, so that memory does not grow with the data but by some hundred bytes a prompt.

    folder/prompts-N.jsonl, responses.jsonl   what the target made (append-only)
    folder/train/, folder/held_out/           tokenized samples
    folder/held_out.jsonl                     the held-out prompts, for evaluation
    folder/report.json                        written last: the folder is complete

A complete folder of the same config is used as it is.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from trainer.config import TrainConfig, digest
from trainer.data.conversation import (
    Messages,
    is_held_out,
)
from trainer.data.features import FeatureFile
from trainer.data.labels import relabel
from trainer.data.make import Journal, Maker, Reject, Say
from trainer.data.sources import Rejections, Sample, from_lines, lines_of, look, usable
from trainer.data.store import MADE_AGAIN, Samples, SampleWriter
from trainer.data.template import ChatTemplate, Encoded
from trainer.drafter.config import text_config
from trainer.errors import DataError, ResourceError
from trainer.records import HeldOut, Report, read_object
from trainer.telemetry import claimed_elsewhere

REPORT = "report.json"
HELD_OUT_PROMPTS = "held_out.jsonl"
PARTS = ("train", "held_out")


@dataclass(frozen=True)
class Prepared:
    folder: Path
    train: Samples
    held_out: Samples
    report: dict[str, Any]

    @property
    def fingerprint(self) -> dict[str, Any]:
        found: dict[str, Any] = self.report["train"]
        return found

    def prompts(self) -> Iterator[Messages]:
        """The held-out ones."""
        path, read = self.folder / HELD_OUT_PROMPTS, 0
        try:
            with path.open("rb") as lines:
                for line in lines:
                    yield read_object(line, HeldOut)["messages"]
                    read += 1
        except (OSError, ValueError) as error:
            raise DataError(
                f"cannot read {path} after line {read}: {error}", next_step=MADE_AGAIN
            ) from None


def data_key(config: TrainConfig) -> str:
    """What prepared data depends on."""
    data = config.data.model_dump(
        mode="json", include={"files", "make", "held_out", "sequence_length", "supervise"}
    )
    target = config.target.model_dump(mode="json", include={"model", "chat_template"})
    labels = config.objective.labels
    return digest({"data": data, "target": target, "labels": labels, "seed": config.seed})


def load_prepared(config: TrainConfig, folder: Path) -> Prepared | None:
    """The folder's contents if it is complete and of this config."""
    try:
        report = read_object((folder / REPORT).read_bytes(), Report)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise DataError(
            f"data.folder {folder} is a file", next_step="name a folder, there or to be made"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {folder / REPORT}: {error}", next_step=MADE_AGAIN) from None
    if report["key"] != data_key(config):
        raise DataError(
            f"{folder} holds data prepared by another config (its key is {report['key']},"
            f" this config's {data_key(config)})",
            next_step="choose another data.folder, or delete that one",
        )
    return Prepared(
        folder, Samples.load(folder / "train"), Samples.load(folder / "held_out"), report
    )


def prepare(
    config: TrainConfig,
    folder: Path,
    tokenizer: Any,
    model: Callable[[], Any],
    say: Say,
    layer_ids: tuple[int, ...] = (),
    rows: int | None = None,
) -> Prepared:
    """Make the folder complete and load it. ``model`` loads the whole target; it is called only if
    the target has something to write, and then keeps its features of ``layer_ids`` too, if the
    config wants features kept. ``rows``: of its embedding."""
    found = load_prepared(config, folder)
    if found is not None:
        say(f"data: {folder} is complete: {_line(found.report)}")
        return found
    for note in look(config, tokenizer, rows):
        say(f"data: {note}")

    def maker() -> Maker:
        made, target = config.data.make, model()
        assert made is not None
        # Slots keep none: what they decode is read again in the first epoch.
        kept = config.data.cache_features and layer_ids and not made.response.fixed_slots
        return Maker(
            target,
            tokenizer,
            made,
            folder,
            seed=config.seed,
            held_out=config.data.held_out,
            say=say,
            features=feature_file(folder, target, layer_ids) if kept else None,
        )

    rejected = Rejections()
    try:
        with _claimed(folder, config):
            # Else another process completed it just now, and may have begun to train on it.
            if not (folder / REPORT).exists():
                rewritten = _fill(config, folder, tokenizer, rows, maker, rejected)
                if config.objective.labels == "target":
                    parts = [folder / name for name in PARTS]
                    relabel(parts, model(), say, config.data.sequence_length)
                _write_report(config, folder, rejected, rewritten)
    except OSError as error:
        raise ResourceError(
            f"cannot write to data.folder {folder}: {error.strerror or error}",
            next_step="free disk space there and start again, or name another data.folder",
        ) from None
    prepared = load_prepared(config, folder)
    assert prepared is not None
    say(f"data: {_line(prepared.report)}")
    # Not in the report of an earlier version.
    if turns := prepared.report.get("rewritten_turns"):
        say(f"data: {turns} earlier turns are context alone: the chat template rewrites them")
    for reason, count in list(prepared.report["rejected"]["reasons"].items())[:5]:
        say(f"data: left out {count}: {reason}")
    return prepared


def _fill(
    config: TrainConfig,
    folder: Path,
    tokenizer: Any,
    rows: int | None,
    maker: Callable[[], Maker],
    rejected: Rejections,
) -> int:
    """Samples and held-out prompts, on disk as they come; returns how many turns are context alone
    because the template rewrites them."""
    asked, rewritten = Journal(folder), 0
    template = ChatTemplate(tokenizer, rows)
    samples = from_lines(lines_of(config.data.files), config, template, rejected.add, asked)
    if config.data.make is not None:
        samples = itertools.chain(samples, _from_target(config, maker, rejected.add, asked))
    train, held_out = (SampleWriter(folder / name) for name in PARTS)
    with train, held_out:
        for sample in usable(samples, rejected.add, config, tokenizer):
            part = held_out if is_held_out(sample.key, config.data.held_out) else train
            part.add(sample.encoded, sample.features)
            rewritten += sample.encoded.rewritten
    if not train.samples:
        _refuse_none(config, held_out.samples, rejected)
    _write_prompts(folder, asked)
    return rewritten


def _refuse_none(config: TrainConfig, held_out: int, rejected: Rejections) -> NoReturn:
    if held_out:
        raise DataError(
            f"all {held_out} samples fall into the held-out share of {config.data.held_out}",
            next_step="give more data, or lower data.held_out",
        )
    shown = str(rejected) or "the sources are empty"
    raise DataError(
        f"no sample has anything to learn: {shown}",
        next_step="`python -m trainer data check CONFIG` shows each rejected line",
    )


def feature_file(folder: Path, model: Any, layer_ids: tuple[int, ...]) -> FeatureFile:
    """Of a prepared folder, for a target and its taps."""
    width = text_config(model.config).hidden_size * len(layer_ids)
    return FeatureFile(folder, layer_ids, width, model.dtype)


@contextmanager
def _claimed(folder: Path, config: TrainConfig) -> Iterator[None]:
    """The folder, this process's alone: the lines of two would lie in one journal, each at a place
    that the other does not know of. One begun by another config is refused: its journals would be
    mixed into this one."""
    folder.mkdir(parents=True, exist_ok=True)
    # What is no text is no key of ours.
    with (folder / "key").open("a+", encoding="utf-8", errors="replace") as marker:
        if claimed_elsewhere(marker):
            raise DataError(
                f"another process is preparing data in {folder}",
                next_step="start again when it is done, which uses its data, or name another"
                " data.folder",
            )
        marker.seek(0)
        known = marker.read()
        # Empty: killed while it was written.
        if known not in ("", data_key(config)):
            raise DataError(
                f"{folder} holds unfinished data of another config",
                next_step="choose another data.folder, or delete that one",
            )
        if not known:
            marker.write(data_key(config))
            marker.flush()
        yield


def _from_target(
    config: TrainConfig, maker: Callable[[], Maker], reject: Reject, asked: Journal
) -> Iterator[Sample]:
    """What the target writes; its held-out prompts, answered or not, go to ``asked``."""
    writing = maker()
    prompts = writing.prompts(reject)
    for key in prompts:
        if is_held_out(key, config.data.held_out):
            asked.append(prompts[key])
    for item in writing.responses(prompts):
        # Exactly the tokens that the target read and wrote; no text is tokenized again.
        prompt, response = item["prompt_tokens"], item["response_tokens"]
        tokens = np.array(prompt + response, np.int32)
        encoded = Encoded(tokens, np.arange(len(tokens)) >= len(prompt))
        key = item["key"]
        yield Sample(f"response to {key[:12]}", key, encoded, item["features"])


def _write_prompts(folder: Path, asked: Journal) -> None:
    """In the order of their hashes: any first few of them are of every source."""
    with (folder / HELD_OUT_PROMPTS).open("w", encoding="utf-8") as stream:
        for key in sorted(asked):
            line = {"messages": asked[key]["messages"]}
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")


def _write_report(config: TrainConfig, folder: Path, rejected: Rejections, rewritten: int) -> None:
    """Written last: the folder is complete."""
    report: dict[str, Any] = {"key": data_key(config)}
    for name in PARTS:
        report[name] = Samples.load(folder / name).fingerprint()
    report["rewritten_turns"] = rewritten
    report["rejected"] = {
        "count": rejected.reasons.total(),
        "reasons": dict(rejected.reasons.most_common()),
        "first": rejected.first,
    }
    beside = folder / (REPORT + ".part")
    beside.write_text(json.dumps(report, indent=2, ensure_ascii=False), encoding="utf-8")
    beside.replace(folder / REPORT)


def _line(report: dict[str, Any]) -> str:
    train = report["train"]
    share = train["supervised"] / max(1, train["tokens"])
    return (
        f"{train['samples']} samples, {train['tokens']} tokens ({share:.0%} supervised),"
        f" {report['held_out']['samples']} held out, {report['rejected']['count']} rejected"
    )
