"""From messages to tokens and the loss mask, by the target's own chat template.

Three ways to know which tokens the assistant wrote, in this order:

1. ``{% generation %}`` markers in the template;
2. rendered prefixes: what the template adds for a turn beyond the prompt that invites it. Turns
   that it rewrites once others follow (Qwen3's drops their thoughts) are context alone: as they
   stand, the target never wrote them;
3. neither holds: stop. An all-zero or all-one mask trains nothing or the wrong thing, silently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError

from trainer.data.conversation import Messages
from trainer.errors import DataError

MARKER = re.compile(r"\{%[-+]?\s*generation\b")
PROOFS = 64
"""Prompts on which a template's frame must prove literal."""


class RefusedError(DataError):
    """A template does not take one conversation; it may take others."""


@dataclass(frozen=True)
class Encoded:
    tokens: np.ndarray
    """i32 [L]"""
    supervised: np.ndarray
    """bool [L]: written by the assistant, its end-of-turn token included."""
    rewritten: int = 0
    """Turns of the assistant that are context alone, because the template rewrites them."""


class ChatTemplate:
    """A tokenizer's chat template. Raises ``DataError`` if the tokenizer has none."""

    def __init__(self, tokenizer: Any, rows: int | None = None) -> None:
        """``rows``: of the target's embedding. Conversations with a token beyond them are refused:
        on a GPU one ends the process, hours later and without its name."""
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "the target's tokenizer has no chat template",
                next_step="give one by target.chat_template, or choose an instruction-tuned target",
            )
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items() if rows is not None else ()
        self.rowless = [str(token) for number, token in added if number >= rows]
        self.has_markers = MARKER.search(str(tokenizer.chat_template)) is not None

    def check(self, *, answers: bool) -> None:
        """Raise ``DataError`` for a template that can encode no prompt, or (``answers``) no
        conversation."""
        user = {"role": "user", "content": "hi"}
        try:
            self._try([user], answers=answers)
        except RefusedError:
            # It may want a system's message first; each conversation is judged by itself.
            try:
                self._try([{"role": "system", "content": "be kind"}, user], answers=answers)
            except RefusedError as error:
                raise DataError(
                    f"{error.what}, whether a system's message begins it or a user's",
                    next_step="mend the template, or give another by target.chat_template",
                ) from None

    def _try(self, prompt: Messages, *, answers: bool) -> None:
        if not answers:
            self.prompt(prompt)
        elif not self.encode([*prompt, {"role": "assistant", "content": "yes"}]).supervised.any():
            raise DataError(
                "the chat template's {% generation %} markers surround no answer",
                next_step="mend them, or give another template by target.chat_template",
            )

    def prompt(self, messages: Messages) -> list[int]:
        """Tokens up to where the assistant begins."""
        self._refuse_rowless(messages)
        return self._tokens(self._render(messages, invite=True))

    def refusal(self, messages: Messages) -> str | None:
        """Why the template does not take a prompt; null if it does, as it does a user's words."""
        try:
            self._refuse_rowless(messages)
            if _only_words(messages) is None:
                self._render(messages, invite=True)
        except RefusedError as error:
            return error.what
        return None

    def prompts(self, many: Sequence[Messages]) -> list[list[int]]:
        """``prompt`` of each, many times as fast: the tokenizer takes them together, and a user's
        words alone are put between what the template puts round them, if it proves to do no more
        on the first of them (rendering took 60 µs each)."""
        if not many:
            return []
        alone = [_only_words(messages) for messages in many]
        texts = [self._render(m, invite=True) for m in many[:PROOFS]]
        frame = self._literal_frame(texts, alone)
        for messages, text in zip(many[PROOFS:], alone[PROOFS:], strict=True):
            if frame is None or text is None:
                texts.append(self._render(messages, invite=True))
            else:
                texts.append(frame[0] + text + frame[1])
        return list(self.tokenizer(texts, add_special_tokens=False)["input_ids"])

    def _literal_frame(
        self, rendered: list[str], alone: list[str | None]
    ) -> tuple[str, str] | None:
        """``user_frame``, unless one of the rendered prompts is more than words within it."""
        try:
            before, after = self.user_frame()
        except DataError:
            return None
        pairs = zip(rendered, alone, strict=False)
        literal = all(text is None or before + text + after == shown for shown, text in pairs)
        return (before, after) if literal else None

    def encode(self, messages: Messages) -> Encoded:
        """A whole conversation. Raises ``DataError`` when the loss mask cannot be known."""
        self._refuse_rowless(messages)
        return self._by_markers(messages) if self.has_markers else self._by_prefixes(messages)

    def user_frame(self) -> tuple[str, str]:
        """The template's text before and after a user's words, up to the assistant's turn."""
        marker = "\u2402user\u2402"
        text = self._render([{"role": "user", "content": marker}], invite=True)
        before, found, after = text.partition(marker)
        if not found:
            raise DataError(
                "the chat template does not show the user's words as they are",
                next_step="give one that does by target.chat_template",
            )
        return before, after

    def opening_length(self) -> int:
        """Tokens before the first user's words, in a conversation without a system message."""
        return len(self._tokens(self.user_frame()[0]))

    def _by_markers(self, messages: Messages) -> Encoded:
        made = self._apply(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = np.asarray(made["assistant_masks"], dtype=bool)
        return Encoded(np.asarray(made["input_ids"], dtype=np.int32), mask)

    def _by_prefixes(self, messages: Messages) -> Encoded:
        text = self._render(messages, invite=False)
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = np.asarray(made["input_ids"], dtype=np.int32)
        starts = np.asarray([start for start, _ in made["offset_mapping"]], dtype=np.int64)
        supervised = np.zeros(tokens.size, dtype=bool)
        rewritten = 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            begin = self._render(messages[:index], invite=True)
            end = self._render(messages[: index + 1], invite=False)
            if not text.startswith(begin) or not text.startswith(end) or len(end) <= len(begin):
                if index + 1 < len(messages):
                    rewritten += 1
                    continue
                raise DataError(
                    "the chat template has no {% generation %} markers and rewrites what came"
                    " before the last answer, so its tokens cannot be told from the rest",
                    next_step="give a template with {% generation %} by target.chat_template",
                )
            span = (starts >= len(begin)) & (starts < len(end))
            supervised |= self._without_tail(tokens, span)
        return Encoded(tokens, supervised, rewritten)

    def _without_tail(self, tokens: np.ndarray, span: np.ndarray) -> np.ndarray:
        """Cut what the template adds behind the end-of-turn token (often a newline): the target
        never generates it."""
        ends = np.flatnonzero(span & np.isin(tokens, list(self.tokenizer.all_special_ids)))
        if ends.size:
            span = span.copy()
            span[ends[-1] + 1 :] = False
        return span

    def _refuse_rowless(self, messages: Messages) -> None:
        for token in self.rowless:
            if any(token in message["content"] for message in messages):
                raise RefusedError(
                    f"{token} is a token that the target's embedding has no row for",
                    next_step="leave the conversation out",
                )

    def _render(self, messages: Messages, *, invite: bool) -> str:
        text = self._apply(messages, tokenize=False, add_generation_prompt=invite)
        assert isinstance(text, str)
        return text

    def _apply(self, messages: Messages, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is no valid Jinja: {error.message}, in line {error.lineno}",
                next_step="mend it, or give another by target.chat_template",
            ) from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            # Others than its own: a template may add a number to a text that is not there.
            raise RefusedError(
                f"the chat template refuses the conversation: {error}",
                next_step="leave it out, or give another template by target.chat_template",
            ) from None

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def stop_tokens(tokenizer: Any, generation_config: Any) -> set[int]:
    """Ids that end a response: the model's and the tokenizer's ends."""
    ends = getattr(generation_config, "eos_token_id", None)
    found = set(ends if isinstance(ends, (list, tuple)) else [ends])
    found.add(tokenizer.eos_token_id)
    return {int(token) for token in found if token is not None}


def _only_words(messages: Messages) -> str | None:
    """A user's words where they are all there is."""
    only = messages[0]
    if len(messages) > 1 or only["role"] != "user" or set(only) != {"role", "content"}:
        return None
    return only["content"]
