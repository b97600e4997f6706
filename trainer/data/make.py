"""Data made by the target itself: prompts from its chat template, then its own responses.

Both are append-only JSONL with one completed item a line, so a killed run continues where it
stopped; a torn last line is cut off and made again.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pydantic import BaseModel

from trainer.data.conversation import (
    Conversation,
    Rejection,
    is_held_out,
    read_conversations,
)
from trainer.data.decode import BatchDecoder, Request, refuse_other_layers
from trainer.data.features import NONE, FeatureFile
from trainer.data.settings import FilePrompts, MakeConfig, ResponseConfig, SelfPrompts
from trainer.data.template import ChatTemplate, stop_tokens
from trainer.drafter.config import text_config
from trainer.errors import DataError, first_line
from trainer.records import Line, Response, SelfMade, read_object
from trainer.telemetry import compact, duration

if TYPE_CHECKING:
    from trainer.data.slots import SlotDecoder

Say = Callable[[str], None]
Reject = Callable[[Rejection], None]

PROGRESS_EVERY_S = 5.0
ENCODED_TOGETHER = 1024
"""Prompts: the tokenizer takes many at once, and not all of millions need be in memory."""


class Journal:
    """Append-only JSONL whose lines are dictionaries with a ``key``, of which keys and places alone
    are in memory. Stays open: a small target on a GPU makes thousands of lines a second, and
    opening the file was two thirds of each's cost."""

    def __init__(
        self, folder: Path, name: str | None = None, shape: type[BaseModel] = Line
    ) -> None:
        """Takes over the whole lines of a file that is there, if each has this shape; a torn last
        one is cut off it. Without a name it is empty, and gone with its process."""
        self._stream: IO[bytes] = (
            (folder / name).open("a+b") if name else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        )
        self._places: dict[Any, int] = {}
        self._end = 0
        self._stream.seek(0)
        for number, line in enumerate(self._stream, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                self._places[read_object(line, shape)["key"]] = self._end
            except ValueError as error:
                raise DataError(
                    f"line {number} of {folder / str(name)} is damaged: {first_line(error)}",
                    next_step="delete that line; what it held is made again",
                ) from None
            self._end += len(line)
        self._stream.truncate(self._end)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Any]:
        """The keys, in the order of their first lines."""
        return iter(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __getitem__(self, key: Any) -> dict[str, Any]:
        self._stream.seek(self._places[key])
        item: dict[str, Any] = json.loads(self._stream.readline())
        return item

    def append(self, item: dict[str, Any]) -> None:
        """Written through at once: a kill costs a torn line at most."""
        line = (json.dumps(item, ensure_ascii=False) + "\n").encode()
        self._stream.seek(self._end)
        self._stream.write(line)
        self._stream.flush()
        self._places[item["key"]] = self._end
        self._end += len(line)

    def close(self) -> None:
        self._stream.close()


class Progress:
    """A line every few seconds, such as
    ``data: responses 120/400 | 15.2k tokens | 240 tok/s | eta 1m20s``."""

    def __init__(self, what: str, total: int, say: Say, limit_s: float | None = None) -> None:
        self.what, self.total, self.say, self.limit_s = what, total, say, limit_s
        self.began = self.last = time.monotonic()
        self.first: int | None = None

    def update(self, done: int, tokens: int, *, force: bool = False) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = done
        if not force and now - self.last < PROGRESS_EVERY_S:
            return
        self.last = now
        spent = max(now - self.began, 1e-9)
        parts = [f"data: {self.what} {done}/{self.total}", f"{compact(tokens)} tokens"]
        parts.append(f"{compact(tokens / spent)} tok/s")
        fresh = done - self.first
        left = [self.limit_s - spent] if self.limit_s is not None else []
        if fresh:
            left.append((self.total - done) * spent / fresh)
        if left and not force:
            parts.append(f"eta {duration(min(left))}")
        self.say(" | ".join(parts))

    def end(self, done: int, tokens: int) -> None:
        """The last line, and why it is not all."""
        self.update(done, tokens, force=True)
        if self.limit_s is not None and done < self.total:
            self.say(
                f"data: the {self.limit_s:g} s for {self.what} are over: the run goes on with"
                f" these {done}, without the other {self.total - done}"
            )


class Maker:
    """The target at work on data. ``model`` is whole, with its head."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: MakeConfig,
        folder: Path,
        *,
        seed: int,
        held_out: float,
        say: Say,
        features: FeatureFile | None = None,
    ) -> None:
        """``features``: keep the target's features of what it writes there."""
        self.model = model
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, text_config(model.config).vocab_size)
        self.config = config
        self.folder = folder
        self.seed = seed
        self.held_out = held_out
        self.say = say
        self.features = features
        self.stop = stop_tokens(tokenizer, model.generation_config)

    def prompts(self, reject: Reject) -> Journal:
        """All prompts of all sources, each once: ``{"key", "messages"}``."""
        found = Journal(self.folder)
        reasons: Counter[str] = Counter()

        def leave_out(item: Rejection) -> None:
            reasons[item.reason] += 1
            reject(item)

        for number, source in enumerate(self.config.prompts):
            if isinstance(source, FilePrompts):
                items: Iterable[Conversation | Rejection] = read_conversations(
                    source.path, source.template, source.limit
                )
            else:
                items = self._self_made(source, number)
            for item in items:
                if isinstance(item, Rejection):
                    leave_out(item)
                elif (refusal := self.template.refusal(item.prompt)) is not None:
                    leave_out(Rejection(item.where, refusal))
                elif item.key in found:
                    leave_out(Rejection(item.where, "the same prompt as an earlier one"))
                else:
                    found.append({"key": item.key, "messages": item.prompt})
        if not found:
            told = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
            raise DataError(
                f"data.make.prompts gave no usable prompt: {told or 'its files are empty'}",
                next_step="kind: self needs max_new_tokens and seconds enough to end a prompt (one"
                " that was cut is left out); kind: file needs `messages` or `prompt` in each line",
            )
        return found

    def _self_made(self, source: SelfPrompts, number: int) -> Iterator[Conversation | Rejection]:
        """Let the target continue ``…user\\n{opening}`` until it ends the user's turn."""
        known = Journal(self.folder, f"prompts-{number}.jsonl", SelfMade)
        before, after = self.template.user_frame()
        start = self.tokenizer(before + source.opening, add_special_tokens=False)["input_ids"]
        end = self.tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        requests = [
            Request(
                key,
                list(start),
                source.max_new_tokens,
                source.temperature,
                source.top_p,
                self.seed + number,
            )
            for key in range(source.count)
            if key not in known
        ]
        decoder = self._decoder(self.stop | set(end))
        progress = Progress("prompts", source.count, self.say, source.seconds)
        for completion in decoder.run(requests, _deadline(source.seconds)):
            if completion is not None:
                tokens = completion.tokens[:-1] if completion.ended else completion.tokens
                text = source.opening + self.tokenizer.decode(tokens, skip_special_tokens=True)
                known.append(
                    {"key": completion.key, "text": text.strip(), "ended": completion.ended}
                )
            progress.update(len(known), decoder.generated)
        if requests:
            progress.end(len(known), decoder.generated)
        for key in sorted(known):
            where, item = f"self-made:{number}:{key}", known[key]
            # A prompt cut by the limit is half a question: it would teach the target's half answer.
            if not item["ended"]:
                yield Rejection(where, f"did not end within {source.max_new_tokens} tokens")
            elif not item["text"]:
                yield Rejection(where, "is empty")
            else:
                yield Conversation([{"role": "user", "content": item["text"]}], where)
        known.close()
        if not known:
            yield Rejection(f"self-made:{number}", "none was written in its seconds")

    def responses(self, prompts: Journal) -> Iterator[dict[str, Any]]:
        """``{"key", "messages", "prompt_tokens", "response_tokens", "ended", "features"}`` for each
        prompt, in the prompts' order; fewer if the time ran out. All are made before the first is
        read."""
        settings: ResponseConfig = self.config.response
        features = self.features if self.features is not None and self.features.begin() else None
        layer_ids = features.layer_ids if features is not None else None
        made = Journal(self.folder, "responses.jsonl", Response)
        keys = list(prompts)
        missing = [index for index, key in enumerate(keys) if key not in made]
        # By hash, so that a run cut by time has some of every source; held-out prompts come last:
        # their responses only validate.
        missing.sort(key=lambda i: (is_held_out(keys[i], self.held_out), keys[i]))
        decoder = self._decoder(self.stop, layer_ids)
        progress = Progress("responses", len(keys), self.say, settings.seconds)
        requests = self._requests(prompts, keys, missing)
        for completion in decoder.run(requests, _deadline(settings.seconds)):
            if completion is not None:
                offset = NONE
                if features is not None and completion.features is not None:
                    offset = features.append(completion.features)
                answer = {
                    "prompt_tokens": completion.request.tokens,
                    "response_tokens": completion.tokens,
                    "ended": completion.ended,
                    "features": offset,
                }
                made.append(prompts[keys[completion.key]] | answer)
            progress.update(len(made), decoder.generated)
        if missing:
            progress.end(len(made), decoder.generated)
        return (made[key] for key in keys if key in made)

    def _requests(self, prompts: Journal, keys: list[str], missing: list[int]) -> Iterator[Request]:
        """As the decoder takes them."""
        settings = self.config.response
        for start in range(0, len(missing), ENCODED_TOGETHER):
            indices = missing[start : start + ENCODED_TOGETHER]
            encoded = self.template.prompts([prompts[keys[i]]["messages"] for i in indices])
            for index, tokens in zip(indices, encoded, strict=True):
                yield Request(
                    index,
                    tokens,
                    settings.max_new_tokens,
                    settings.temperature,
                    settings.top_p,
                    self.seed,
                )

    def _decoder(
        self, stop: set[int], layer_ids: tuple[int, ...] | None = None
    ) -> BatchDecoder | SlotDecoder:
        settings = self.config.response
        pad = self.tokenizer.pad_token_id
        pad = int(pad if pad is not None else next(iter(self.stop)))
        if settings.fixed_slots:
            # With it comes the whole of transformers' modeling, for 2 s of which few have need.
            from trainer.data.slots import SlotDecoder

            return SlotDecoder(self.model, stop, pad, settings.batch, self.folder)
        return BatchDecoder(self.model, stop, pad, settings.batch, layer_ids)


def check_decoding(settings: ResponseConfig, model: Any) -> None:
    """Raise ``TargetError`` for a target that cannot decode as asked. Works on the meta device."""
    if settings.fixed_slots:
        from trainer.data.slots import refuse_unfit

        refuse_unfit(model)
    else:
        refuse_other_layers(model)


def _deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds
