"""What the trainer writes as JSON and reads again, as models: a disk, a copy or an editor may have
changed it since, and a value of another kind would end in a traceback, perhaps hours later."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from trainer.config_errors import explain

Count = Annotated[int, Field(ge=0)]
Token = Annotated[int, Field(ge=0, lt=2**31)]


class Message(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


Messages = Annotated[list[Message], Field(min_length=1)]


class Line(BaseModel):
    """Of any journal."""

    key: int | str


class SelfMade(BaseModel):
    """Of ``prompts-N.jsonl``."""

    key: int
    text: str
    ended: bool


class Response(BaseModel):
    """Of ``responses.jsonl``."""

    key: str
    messages: Messages
    prompt_tokens: list[Token]
    response_tokens: list[Token]
    ended: bool
    features: int = Field(ge=-1)


class HeldOut(BaseModel):
    """Of ``held_out.jsonl``."""

    messages: Messages


class Part(BaseModel):
    samples: Count
    tokens: Count
    supervised: Count
    sha256: str


class Rejected(BaseModel):
    count: Count
    reasons: dict[str, Count]


class Report(BaseModel):
    """``report.json`` of prepared data."""

    key: str
    train: Part
    held_out: Part
    rejected: Rejected
    rewritten_turns: Count = 0


class CheckpointState(BaseModel):
    """``state.json`` of a checkpoint."""

    step: Count
    skipped: Count
    best: float | None = None
    asked: str | None = None
    fingerprint: dict[str, Any]


def read_object(text: str | bytes, shape: type[BaseModel]) -> dict[str, Any]:
    """What was written, as it stands. Raises ``ValueError``, in one line, unless it fits."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("brackets thousands deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds {type(found).__name__}, not an object")
    try:
        shape.model_validate(found, strict=True)
    except ValidationError as error:
        raise ValueError(explain(error.errors(include_url=False)[0], shape)) from None
    return found
