"""From a config to a prepared folder: made or read, tokenized, split, reported.

    folder/prompts-N.jsonl, responses.jsonl   what the target made (append-only)
    folder/train/, folder/held_out/           tokenized samples
    folder/held_out.jsonl                     the held-out prompts, for evaluation
    folder/report.json                        written last: the folder is complete

A complete folder of the same config is used as it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.config import TrainConfig, digest
from trainer.data.conversation import (
    Conversation,
    Messages,
    Rejection,
    is_held_out,
    read_conversations,
)
from trainer.data.features import NONE, FeatureFile
from trainer.data.make import Maker, Progress, Say
from trainer.data.store import Samples
from trainer.data.template import ChatTemplate, Encoded, RefusedError
from trainer.drafter.config import text_config
from trainer.errors import DataError
from trainer.objective import anchor_candidates

REPORT = "report.json"
HELD_OUT_PROMPTS = "held_out.jsonl"


@dataclass(frozen=True)
class Prepared:
    train: Samples
    held_out: Samples
    prompts: list[Messages]
    """Held-out prompts."""
    report: dict[str, Any]

    @property
    def fingerprint(self) -> dict[str, Any]:
        found: dict[str, Any] = self.report["train"]
        return found


@dataclass
class _Sample:
    where: str
    key: str
    prompt: Messages
    encoded: Encoded
    features: int = NONE
    labels: np.ndarray | None = None


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
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {folder / REPORT}: {error}",
            next_step="delete the folder; it is made again",
        ) from None
    if report.get("key") != data_key(config):
        raise DataError(
            f"{folder} holds data prepared by another config (its key is {report.get('key')},"
            f" this config's {data_key(config)})",
            next_step="choose another data.folder, or delete that one",
        )
    with (folder / HELD_OUT_PROMPTS).open(encoding="utf-8") as lines:
        prompts = [json.loads(line)["messages"] for line in lines]
    return Prepared(
        Samples.load(folder / "train"), Samples.load(folder / "held_out"), prompts, report
    )


def prepare(
    config: TrainConfig,
    folder: Path,
    tokenizer: Any,
    model: Callable[[], Any],
    say: Say,
    layer_ids: tuple[int, ...] = (),
) -> Prepared:
    """Make the folder complete and load it. ``model`` loads the whole target; it is called only if
    the target has something to write, and then keeps its features of ``layer_ids`` too, if the
    config wants features kept."""
    found = load_prepared(config, folder)
    if found is not None:
        say(f"data: {folder} is complete: {_line(found.report)}")
        return found
    check_sources(config)
    _make_folder(folder, config)
    rejected: list[Rejection] = []
    samples = list(_from_files(config, tokenizer, rejected))
    asked = {sample.key: sample.prompt for sample in samples}
    if config.data.make is not None:
        target = model()
        # Slots keep none: what they decode is read again in the first epoch.
        kept = (
            config.data.cache_features and layer_ids and not config.data.make.response.fixed_slots
        )
        maker = Maker(
            target,
            tokenizer,
            config.data.make,
            folder,
            seed=config.seed,
            held_out=config.data.held_out,
            say=say,
            features=feature_file(folder, target, layer_ids) if kept else None,
        )
        prompts, bad = maker.prompts()
        rejected += bad
        samples += [_from_response(item) for item in maker.responses(prompts)]
        asked |= {prompt.key: prompt.messages for prompt in prompts}
    usable = _usable(samples, rejected, config, tokenizer)
    if not usable:
        reasons = Counter(r.reason for r in rejected).most_common(3)
        shown = "; ".join(f"{count} × {reason}" for reason, count in reasons)
        raise DataError(
            f"no sample has anything to learn: {shown or 'the sources are empty'}",
            next_step="`python -m trainer data check CONFIG` shows each rejected line",
        )
    if config.objective.labels == "target":
        relabel(usable, model(), say, config.data.sequence_length)
    _write_prompts(folder, asked, config.data.held_out)
    _write(config, folder, usable, rejected)
    prepared = load_prepared(config, folder)
    assert prepared is not None
    say(f"data: {_line(prepared.report)}")
    # Not in the report of an earlier version.
    if turns := prepared.report.get("rewritten_turns"):
        say(f"data: {turns} earlier turns are context alone: the chat template rewrites them")
    for reason, count in list(prepared.report["rejected"]["reasons"].items())[:5]:
        say(f"data: left out {count}: {reason}")
    return prepared


def check_sources(config: TrainConfig) -> None:
    """Raises ``DataError`` for a file that cannot be read, before the target writes for hours."""
    made = config.data.make.prompts if config.data.make else []
    asked = [config.evaluation.prompts] if config.evaluation else []
    prompts = [source.path for source in made if source.kind == "file"]
    for path in [*config.data.files, *prompts, *asked]:
        if path is not None:
            next(read_conversations(path), None)


def feature_file(folder: Path, model: Any, layer_ids: tuple[int, ...]) -> FeatureFile:
    """Of a prepared folder, for a target and its taps."""
    width = text_config(model.config).hidden_size * len(layer_ids)
    return FeatureFile(folder, layer_ids, width, model.dtype)


def _make_folder(folder: Path, config: TrainConfig) -> None:
    """A folder begun by another config is refused: its journals would be mixed into this one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / "key"
        known = marker.read_text(encoding="utf-8") if marker.exists() else ""
        # Empty: killed while it was written.
        if known not in ("", data_key(config)):
            raise DataError(
                f"{folder} holds unfinished data of another config",
                next_step="choose another data.folder, or delete that one",
            )
        if not known:
            marker.write_text(data_key(config), encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"cannot write to data.folder {folder}: {error.strerror}",
            next_step="free disk space there, or name another data.folder",
        ) from None


def _from_files(
    config: TrainConfig, tokenizer: Any, rejected: list[Rejection]
) -> Iterable[_Sample]:
    if not config.data.files:
        return
    template = ChatTemplate(tokenizer)
    for path in config.data.files:
        for item in read_conversations(path):
            if isinstance(item, Rejection):
                rejected.append(item)
            elif item.messages[-1]["role"] != "assistant":
                rejected.append(Rejection(item.where, "ends without an answer"))
            else:
                try:
                    encoded = template.encode(item.messages)
                except RefusedError as error:
                    rejected.append(Rejection(item.where, error.what))
                except DataError as error:
                    raise DataError(
                        f"{item.where}: {error.what}", next_step=error.next_step
                    ) from None
                else:
                    yield _Sample(item.where, item.key, item.prompt, encoded)


def _from_response(item: dict[str, Any]) -> _Sample:
    """Exactly the tokens that the target read and wrote; no text is tokenized again."""
    prompt, response = item["prompt_tokens"], item["response_tokens"]
    mask = np.zeros(len(prompt) + len(response), dtype=bool)
    mask[len(prompt) :] = True
    encoded = Encoded(np.array(prompt + response, np.int32), mask)
    where = f"response to {item['key'][:12]}"
    return _Sample(where, item["key"], item["messages"], encoded, item["features"])


def _usable(
    samples: list[_Sample], rejected: list[Rejection], config: TrainConfig, tokenizer: Any
) -> list[_Sample]:
    """Samples, supervised as the config says, with something to learn within a row."""
    if config.data.supervise == "everything":
        samples = supervise_everything(samples, ChatTemplate(tokenizer))
    kept = []
    for sample in samples:
        if anchor_candidates(sample.encoded.supervised[: config.data.sequence_length]).size:
            kept.append(sample)
        else:
            rejected.append(Rejection(sample.where, "no supervised pair of tokens in reach"))
    return kept


def supervise_everything(samples: list[_Sample], template: ChatTemplate) -> list[_Sample]:
    """Every token but the template's opening, which is the same in all samples."""
    opening = template.opening_length()
    changed = []
    for sample in samples:
        mask = np.arange(len(sample.encoded.tokens)) >= opening
        encoded = Encoded(sample.encoded.tokens, mask | sample.encoded.supervised)
        changed.append(replace(sample, encoded=encoded))
    return changed


def relabel(samples: list[_Sample], model: Any, say: Say, length: int) -> None:
    """The target's first choice at each place, given the sample's own tokens before it. What lies
    beyond a row's ``length`` is never asked for, and the logits of a book would fit nowhere."""
    progress = Progress("labels", len(samples), say)
    tokens = 0
    for done, sample in enumerate(samples, start=1):
        own = sample.encoded.tokens
        read = torch.from_numpy(own[:length].astype(np.int64))[None].to(model.device)
        with torch.inference_mode():
            best = model(input_ids=read, use_cache=False).logits[0].argmax(-1).cpu().numpy()
        sample.labels = np.concatenate([own[:1], best[:-1], own[length:]]).astype(np.int32)
        tokens += len(best)
        progress.update(done, tokens)


def _write_prompts(folder: Path, asked: dict[str, Messages], share: float) -> None:
    """The held-out ones, answered or not, in the order of their hashes: any first few of them are
    of every source."""
    lines = [
        json.dumps({"messages": asked[key]}, ensure_ascii=False) + "\n"
        for key in sorted(asked)
        if is_held_out(key, share)
    ]
    (folder / HELD_OUT_PROMPTS).write_text("".join(lines), encoding="utf-8")


def _write(
    config: TrainConfig, folder: Path, samples: list[_Sample], rejected: list[Rejection]
) -> None:
    held = [s for s in samples if is_held_out(s.key, config.data.held_out)]
    train = [s for s in samples if not is_held_out(s.key, config.data.held_out)]
    if not train:
        raise DataError(
            f"all {len(samples)} samples fall into the held-out share of {config.data.held_out}",
            next_step="give more data, or lower data.held_out",
        )
    report: dict[str, Any] = {"key": data_key(config)}
    for name, part in (("train", train), ("held_out", held)):
        labels = [s.encoded.tokens if s.labels is None else s.labels for s in part]
        arrays = Samples.of((s.encoded for s in part), [s.features for s in part], labels)
        arrays.save(folder / name)
        report[name] = arrays.fingerprint()
    report["rewritten_turns"] = sum(s.encoded.rewritten for s in samples)
    reasons = Counter(r.reason for r in rejected)
    report["rejected"] = {
        "count": len(rejected),
        "reasons": dict(reasons.most_common()),
        "first": [f"{r.where}: {r.reason}" for r in rejected[:20]],
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


def check_files(config: TrainConfig, tokenizer: Any) -> tuple[dict[str, Any], list[Rejection]]:
    """Read and encode everything that needs no target at work: (report, rejected lines)."""
    rejected: list[Rejection] = []
    samples = _usable(list(_from_files(config, tokenizer, rejected)), rejected, config, tokenizer)
    prompts = 0
    for source in config.data.make.prompts if config.data.make else []:
        if source.kind == "file":
            for item in read_conversations(source.path, source.template, source.limit):
                if isinstance(item, Conversation):
                    prompts += 1
                else:
                    rejected.append(item)
    report = {
        "samples": Samples.of(s.encoded for s in samples).fingerprint(),
        "rewritten_turns": sum(s.encoded.rewritten for s in samples),
        "prompts": prompts,
    }
    return report, rejected
