"""Chat files: one conversation a line, read leniently, rejected with the line's number and reason.

A line is ``{"messages": [{"role": …, "content": …}, …]}`` or ``{"prompt": "…"}``; other keys are
left alone. HumanEval's own file is of the second kind.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import DataError, first_line
from trainer.packaged import PACKAGE, packaged_file

ROLES = {"system", "user", "assistant", "tool"}
Messages = list[dict[str, str]]
NO_TEXT = "holds half a surrogate pair, which no tokenizer takes"


@dataclass(frozen=True)
class Rejection:
    """``where`` is ``file:line``."""

    where: str
    reason: str


@dataclass(frozen=True)
class Conversation:
    messages: Messages
    where: str

    @property
    def prompt(self) -> Messages:
        """Everything before the last assistant turn."""
        last = self.messages[-1]
        return self.messages[:-1] if last["role"] == "assistant" else self.messages

    @property
    def key(self) -> str:
        """Hash of the prompt: what two answers to one question share."""
        return prompt_key(self.prompt)


def prompt_key(messages: Messages) -> str:
    text = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def is_held_out(key: str, share: float) -> bool:
    """By the prompt's hash, so that no order, shuffle or added file moves a prompt across."""
    return int(key[:8], 16) / 2**32 < share


def read_conversations(
    path: str, template: str = "{prompt}", limit: int | None = None
) -> Iterator[Conversation | Rejection]:
    """Every line of a JSONL (``.gz`` too) or parquet file, or of ``package:NAME/FILE``.

    Raises ``DataError`` when the file as a whole cannot be read.
    """
    file = packaged_file(path) if path.startswith(PACKAGE) else Path(path)
    if not file.is_file():
        raise DataError(f"no data file {path}", next_step="paths are relative to the config file")
    lines = _parquet_lines(file) if file.suffix == ".parquet" else _json_lines(file)
    found = 0
    for where, value in lines:
        parsed = value if isinstance(value, Rejection) else parse_line(value, where, template)
        yield parsed
        found += isinstance(parsed, Conversation)
        if limit is not None and found >= limit:
            return


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                where = f"{file.name}:{number}"
                if not line.strip():
                    continue
                try:
                    yield where, json.loads(line)
                except UnicodeDecodeError:
                    yield where, Rejection(where, "not UTF-8")
                except json.JSONDecodeError as error:
                    yield where, Rejection(where, f"not JSON: {error.msg} at column {error.colno}")
                except (ValueError, RecursionError) as error:
                    # Numbers of thousands of digits, brackets thousands deep.
                    yield where, Rejection(where, f"not read: {first_line(error)}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"cannot read {file} after line {number}: {error}",
            next_step="fetch or write the file again",
        ) from None


def _parquet_lines(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        # Of what it needs itself, too.
        raise DataError(
            f"{file} is parquet, which is read through `datasets`: {first_line(error)}",
            next_step="pip install datasets, or convert the file to JSONL",
        ) from None

    number = 0
    try:
        rows = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"{file.name}:{number}", row
    except (OSError, ValueError) as error:
        # pyarrow's errors about a file are both.
        raise DataError(
            f"cannot read {file} after row {number}: {first_line(error)}",
            next_step="fetch or write the file again",
        ) from None


def is_text(text: str) -> bool:
    """False for what JSON lets through and no encoder takes: an emoji cut in two, ``\\ud83d``."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_line(value: Any, where: str, template: str) -> Conversation | Rejection:
    """One parsed line as a conversation, or why not."""
    if not isinstance(value, dict):
        return Rejection(where, f"holds {type(value).__name__}, not an object")
    if "messages" not in value:
        prompt = value.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            return Rejection(where, "has neither `messages` nor a `prompt`")
        if not is_text(prompt):
            return Rejection(where, f"`prompt` {NO_TEXT}")
        user = template.replace("{prompt}", prompt.strip("\n"))
        return Conversation([{"role": "user", "content": user}], where)
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        return Rejection(where, "`messages` is empty or no list")
    clean: Messages = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            return Rejection(where, f"messages[{index}] is no object")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLES:
            return Rejection(where, f"messages[{index}].role is {role!r}")
        if not isinstance(content, str):
            return Rejection(where, f"messages[{index}].content is no text")
        if not is_text(content):
            return Rejection(where, f"messages[{index}].content {NO_TEXT}")
        clean.append({"role": role, "content": content})
    if all(m["role"] == "assistant" for m in clean):
        return Rejection(where, "nobody asks anything")
    return Conversation(clean, where)
