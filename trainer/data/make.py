"""Data made by the target itself: prompts from its chat template, then its own responses.

Both are append-only JSONL with one completed item a line, so a killed run continues where it
stopped; a torn last line is cut off and made again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainer.data.conversation import (
    Conversation,
    Rejection,
    is_held_out,
    prompt_key,
    read_conversations,
)
from trainer.data.decode import BatchDecoder, Request
from trainer.data.features import NONE, FeatureFile
from trainer.data.settings import FilePrompts, MakeConfig, ResponseConfig, SelfPrompts
from trainer.data.template import ChatTemplate, stop_tokens
from trainer.errors import DataError
from trainer.telemetry import compact, duration

if TYPE_CHECKING:
    from trainer.data.slots import SlotDecoder

Say = Callable[[str], None]

PROGRESS_EVERY_S = 5.0


class Journal:
    """Append-only JSONL whose lines are dictionaries with a ``key``. Stays open: a small target on
    a GPU makes thousands of lines a second, and opening the file was two thirds of each's cost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: TextIO | None = None

    def read(self) -> list[dict[str, Any]]:
        """Whole lines; a torn last one is cut off the file."""
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with self.path.open("r+b") as stream:
                stream.truncate(len(whole))
        return [json.loads(line) for line in whole.splitlines()]

    def append(self, items: Iterable[dict[str, Any]]) -> None:
        """Written through at once: a kill costs a torn line at most."""
        text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        if self._stream is None:
            self._stream = self.path.open("a", encoding="utf-8")
        self._stream.write(text)
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


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
        self.template = ChatTemplate(tokenizer)
        self.config = config
        self.folder = folder
        self.seed = seed
        self.held_out = held_out
        self.say = say
        self.features = features
        self.stop = stop_tokens(tokenizer, model.generation_config)

    def prompts(self) -> tuple[list[Conversation], list[Rejection]]:
        """All prompts of all sources, each once."""
        found: dict[str, Conversation] = {}
        rejected: list[Rejection] = []
        for number, source in enumerate(self.config.prompts):
            if isinstance(source, FilePrompts):
                items: Iterable[Conversation | Rejection] = read_conversations(
                    source.path, source.template, source.limit
                )
            else:
                items = self._self_made(source, number)
            for item in items:
                if isinstance(item, Rejection):
                    rejected.append(item)
                elif (refusal := self.template.refusal(item.prompt)) is not None:
                    rejected.append(Rejection(item.where, refusal))
                elif item.key in found:
                    rejected.append(Rejection(item.where, "the same prompt as an earlier one"))
                else:
                    found[item.key] = Conversation(item.prompt, item.where)
        if not found:
            reasons = Counter(r.reason for r in rejected).most_common(3)
            told = "; ".join(f"{reason} ({count})" for reason, count in reasons)
            raise DataError(
                f"data.make.prompts gave no usable prompt: {told or 'its files are empty'}",
                next_step="kind: self needs max_new_tokens and seconds enough to end a prompt (one"
                " that was cut is left out); kind: file needs `messages` or `prompt` in each line",
            )
        return list(found.values()), rejected

    def _self_made(self, source: SelfPrompts, number: int) -> Iterator[Conversation | Rejection]:
        """Let the target continue ``…user\\n{opening}`` until it ends the user's turn."""
        journal = Journal(self.folder / f"prompts-{number}.jsonl")
        known = {item["key"]: item for item in journal.read()}
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
                item = {"key": completion.key, "text": text.strip(), "ended": completion.ended}
                known[completion.key] = item
                journal.append([item])
            progress.update(len(known), decoder.generated)
        journal.close()
        if requests:
            progress.end(len(known), decoder.generated)
        for key in sorted(known):
            where = f"self-made:{number}:{key}"
            # A prompt cut by the limit is half a question: it would teach the target's half answer.
            if not known[key]["ended"]:
                yield Rejection(where, f"did not end within {source.max_new_tokens} tokens")
            elif not known[key]["text"]:
                yield Rejection(where, "is empty")
            else:
                message = {"role": "user", "content": known[key]["text"]}
                yield Conversation([message], where)
        if not known:
            yield Rejection(f"self-made:{number}", "none was written in its seconds")

    def responses(self, prompts: list[Conversation]) -> list[dict[str, Any]]:
        """``{"key", "messages", "prompt_tokens", "response_tokens", "ended", "features"}`` for each
        prompt, in the prompts' order; fewer if the time ran out."""
        settings: ResponseConfig = self.config.response
        layer_ids = None
        if self.features is not None:
            self.features.create()
            layer_ids = self.features.layer_ids
        journal = Journal(self.folder / "responses.jsonl")
        made = {item["key"]: item for item in journal.read()}
        keys = [prompt_key(p.messages) for p in prompts]
        encoded = self.template.prompts([p.messages for p in prompts])
        missing = [index for index, key in enumerate(keys) if key not in made]
        # By hash, so that a run cut by time has some of every source; held-out prompts come last:
        # their responses only validate.
        missing.sort(key=lambda i: (is_held_out(keys[i], self.held_out), keys[i]))
        requests = [
            Request(
                index,
                encoded[index],
                settings.max_new_tokens,
                settings.temperature,
                settings.top_p,
                self.seed,
            )
            for index in missing
        ]
        decoder = self._decoder(self.stop, layer_ids)
        progress = Progress("responses", len(prompts), self.say, settings.seconds)
        for completion in decoder.run(requests, _deadline(settings.seconds)):
            if completion is not None:
                index = completion.key
                offset = NONE
                if self.features is not None and completion.features is not None:
                    offset = self.features.append(completion.features)
                made[keys[index]] = item = {
                    "key": keys[index],
                    "messages": prompts[index].messages,
                    "prompt_tokens": encoded[index],
                    "response_tokens": completion.tokens,
                    "ended": completion.ended,
                    "features": offset,
                }
                journal.append([item])
            progress.update(len(made), decoder.generated)
        journal.close()
        if requests:
            progress.end(len(made), decoder.generated)
        return [made[key] for key in keys if key in made]

    def _decoder(
        self, stop: set[int], layer_ids: tuple[int, ...] | None = None
    ) -> BatchDecoder | SlotDecoder:
        settings = self.config.response
        pad = self.tokenizer.pad_token_id
        pad = int(pad if pad is not None else next(iter(self.stop)))
        if settings.fixed_slots:
            # With it comes the whole of transformers' modeling, for 2 s of which few have need.
            from trainer.data.slots import SlotDecoder

            return SlotDecoder(self.model, stop, pad, settings.batch)
        return BatchDecoder(self.model, stop, pad, settings.batch, layer_ids)


def _deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds
