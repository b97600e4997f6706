"""Samples of chat files: read, encoded, left out with line and reason. And a first look at the
files, before anything long begins."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trainer.config import TrainConfig
from trainer.data.conversation import (
    Conversation,
    Rejection,
    is_held_out,
    read_conversations,
)
from trainer.data.features import NONE
from trainer.data.make import Journal, Reject
from trainer.data.store import describe
from trainer.data.template import ChatTemplate, Encoded, RefusedError
from trainer.errors import DataError
from trainer.objective import anchor_candidates

LOOKED_AT = 1000
"""Lines of a file, at most, that ``look`` reads in search of one that can be used."""
Lines = Iterable[Conversation | Rejection]


@dataclass(frozen=True)
class Sample:
    where: str
    key: str
    encoded: Encoded
    features: int = NONE


@dataclass
class Rejections:
    """What the report says of them."""

    reasons: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    def add(self, item: Rejection) -> None:
        self.reasons[item.reason] += 1
        if len(self.first) < 20:
            self.first.append(f"{item.where}: {item.reason}")

    def __str__(self) -> str:
        return "; ".join(f"{count} × {reason}" for reason, count in self.reasons.most_common(3))


@dataclass
class _Look:
    """At one file, up to its first line that can be used."""

    path: str
    read: int = 0
    good: bool = False
    more: bool = False
    """Lines beyond those that were read."""
    rejected: Rejections = field(default_factory=Rejections)

    @classmethod
    def at(cls, path: str, lines: Lines, use: Callable[[Lines, Reject], Iterable[object]]) -> _Look:
        found, left = cls(path), iter(lines)

        def counted() -> Iterator[Conversation | Rejection]:
            for line in itertools.islice(left, LOOKED_AT):
                found.read += 1
                yield line

        found.good = any(True for _ in use(counted(), found.rejected.add))
        found.more = next(left, None) is not None
        return found

    def __str__(self) -> str:
        if not self.read:
            return f"no line in {self.path}"
        which = f"first {self.read}" if self.more else str(self.read)
        return f"none of the {which} lines in {self.path} can be used: {self.rejected}"


def look(config: TrainConfig, tokenizer: Any, rows: int | None) -> list[str]:
    """Raises ``DataError`` for a file that cannot be read, and where no line of any can be used,
    before the target writes for hours. Returns what is said of single files."""
    template = ChatTemplate(tokenizer, rows)

    def samples(lines: Lines, reject: Reject) -> Iterable[object]:
        return usable(from_lines(lines, config, template, reject), reject, config, tokenizer)

    def prompts(lines: Lines, reject: Reject) -> Iterable[object]:
        return usable_prompts(lines, template, reject)

    made = config.data.make.prompts if config.data.make else []
    looks = [_Look.at(path, read_conversations(path), samples) for path in config.data.files]
    looks += [
        _Look.at(
            source.path, read_conversations(source.path, source.template, source.limit), prompts
        )
        for source in made
        if source.kind == "file"
    ]
    if not any(found.good or found.more for found in looks) and all(s.kind == "file" for s in made):
        anything = any(found.read for found in looks)
        raise DataError(
            "; ".join(map(str, looks)),
            next_step="`python -m trainer data check CONFIG` shows each rejected line"
            if anything
            else "name files that hold conversations",
        )
    if config.evaluation and (path := config.evaluation.prompts) is not None:
        asked = _Look.at(path, read_conversations(path), prompts)
        if not asked.good and not asked.more:
            raise DataError(str(asked), next_step="name another file by evaluation.prompts")
        looks.append(asked)
    return [str(found) for found in looks if not found.good]


def lines_of(files: Iterable[str]) -> Iterator[Conversation | Rejection]:
    return itertools.chain.from_iterable(map(read_conversations, files))


def from_lines(
    lines: Lines,
    config: TrainConfig,
    template: ChatTemplate,
    reject: Reject,
    asked: Journal | None = None,
) -> Iterator[Sample]:
    """Those of whole conversations; their held-out prompts go to ``asked``."""
    for item in lines:
        if isinstance(item, Rejection):
            reject(item)
        elif item.messages[-1]["role"] != "assistant":
            reject(Rejection(item.where, "ends without an answer"))
        else:
            try:
                encoded = template.encode(item.messages)
            except RefusedError as error:
                reject(Rejection(item.where, error.what))
            except DataError as error:
                raise DataError(f"{item.where}: {error.what}", next_step=error.next_step) from None
            else:
                key = item.key
                if asked is not None and is_held_out(key, config.data.held_out):
                    asked.append({"key": key, "messages": item.prompt})
                yield Sample(item.where, key, encoded)


def usable_prompts(lines: Lines, template: ChatTemplate, reject: Reject) -> Iterator[Conversation]:
    """Those that the target can be asked."""
    for line in lines:
        if isinstance(line, Rejection):
            reject(line)
        elif (refusal := template.refusal(line.prompt)) is not None:
            reject(Rejection(line.where, refusal))
        else:
            yield line


def usable(
    samples: Iterable[Sample], reject: Reject, config: TrainConfig, tokenizer: Any
) -> Iterator[Sample]:
    """Samples, supervised as the config says, with something to learn within a row."""
    everything = config.data.supervise == "everything"
    # The template's opening is the same in all samples.
    opening = ChatTemplate(tokenizer).opening_length() if everything else 0
    for sample in samples:
        encoded = sample.encoded
        if everything:
            told = np.arange(len(encoded.tokens)) >= opening
            encoded = Encoded(encoded.tokens, told | encoded.supervised)
        if anchor_candidates(encoded.supervised[: config.data.sequence_length]).size:
            yield replace(sample, encoded=encoded)
        else:
            reject(Rejection(sample.where, "no supervised pair of tokens in reach"))


def check_files(
    config: TrainConfig, tokenizer: Any, reject: Reject, rows: int | None = None
) -> dict[str, Any]:
    """Read and encode everything that needs no target at work; returns the report."""
    lengths, supervised, rewritten = array("q"), 0, 0
    template = ChatTemplate(tokenizer, rows)
    samples = from_lines(lines_of(config.data.files), config, template, reject)
    for sample in usable(samples, reject, config, tokenizer):
        lengths.append(len(sample.encoded.tokens))
        supervised += int(sample.encoded.supervised.sum())
        rewritten += sample.encoded.rewritten
    prompts = 0
    for source in config.data.make.prompts if config.data.make else []:
        if source.kind == "file":
            lines = read_conversations(source.path, source.template, source.limit)
            prompts += sum(1 for _ in usable_prompts(lines, template, reject))
    return {
        "samples": describe(lengths, supervised),
        "rewritten_turns": rewritten,
        "prompts": prompts,
    }
