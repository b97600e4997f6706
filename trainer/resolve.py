"""A config and its target together: everything that must hold before a device is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError

from trainer.config import TrainConfig
from trainer.data.make import check_decoding
from trainer.data.template import ChatTemplate
from trainer.drafter.config import DrafterConfig, text_config
from trainer.drafter.model import Drafter
from trainer.errors import ConfigError
from trainer.target import (
    check_target,
    fit_tokenizer,
    load_hf_config,
    load_tokenizer,
)
from trainer.warm_start import check_start


@dataclass(frozen=True)
class Resolved:
    config: TrainConfig
    target: Any
    """transformers' configuration of the target."""
    tokenizer: Any
    drafter: DrafterConfig
    notes: list[str]
    """What was decided on the user's behalf."""


def resolve(config: TrainConfig) -> Resolved:
    """Raises ``ConfigError`` or ``TargetError`` with one message; reads no weights."""
    target = load_hf_config(config.target)
    tokenizer = load_tokenizer(config.target)
    text = text_config(target)
    fit_tokenizer(config.target, tokenizer, text.vocab_size)
    ChatTemplate(tokenizer).check(answers=bool(config.data.files))
    notes = []
    mask = config.drafter.mask_token_id
    if mask is None:
        mask, why = choose_mask_token(tokenizer, text.vocab_size)
        notes.append(f"mask token {mask}: {why}")
    try:
        drafter = DrafterConfig.for_target(target, mask_token_id=mask, **config.drafter.overrides())
    except ValidationError as error:
        problems = "; ".join(
            (".".join(map(str, item["loc"])) + ": " if item["loc"] else "")
            + item["msg"].removeprefix("Value error, ")
            for item in error.errors(include_url=False)
        )
        raise ConfigError(
            f"the drafter does not fit {config.target.model}: {problems}",
            next_step="mend the `drafter` section",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"the drafter does not fit {config.target.model}: {error}",
            next_step="state that in the `drafter` section where it has such a field, or choose a"
            " target with rotary position embeddings",
        ) from None
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and config.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length is {config.data.sequence_length}, the target's"
            f" max_position_embeddings {longest}",
            next_step=f"lower data.sequence_length to at most {longest}",
        )
    if config.data.sequence_length <= drafter.block_size:
        raise ConfigError(
            f"data.sequence_length is {config.data.sequence_length}, drafter.block_size"
            f" {drafter.block_size}: no row could hold a block and its context",
            next_step="raise data.sequence_length, or lower drafter.block_size",
        )
    if config.data.anchors > config.data.sequence_length:
        raise ConfigError(
            f"data.anchors is {config.data.anchors}, more than the {config.data.sequence_length}"
            " tokens of a row",
            next_step="lower data.anchors",
        )
    evaluation = config.evaluation
    if evaluation and evaluation.max_new_tokens >= drafter.max_position_embeddings:
        raise ConfigError(
            f"evaluation.max_new_tokens is {evaluation.max_new_tokens}, the target's"
            f" max_position_embeddings {drafter.max_position_embeddings}: no prompt has room",
            next_step="lower evaluation.max_new_tokens",
        )
    whole = check_target(config.target, target)
    if config.data.make is not None:
        check_decoding(config.data.make.response, whole)
    if config.drafter.start == "target":
        with torch.device("meta"):
            check_start(Drafter(drafter), whole)
    return Resolved(config, target, tokenizer, drafter, notes)


def choose_mask_token(tokenizer: Any, vocabulary: int) -> tuple[int, str]:
    """A row of the target's embedding that no text uses: (id, why)."""
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own < vocabulary:
        return int(own), "the tokenizer's own mask token"
    if len(tokenizer) < vocabulary:
        return vocabulary - 1, f"an embedding row beyond the tokenizer's {len(tokenizer)} tokens"
    template = str(tokenizer.chat_template or "")
    used = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
        text = str(token)
        if (
            token.special
            and token_id < vocabulary
            and token_id not in used
            and text not in template
        ):
            return int(token_id), f"{text}, a special token that the chat template does not use"
    raise ConfigError(
        "no unused token was found for the drafter's mask",
        next_step="state drafter.mask_token_id: a token that no text of yours contains",
    )
