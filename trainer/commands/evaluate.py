"""`evaluate`: a checkpoint's drafter, decoding prompts speculatively."""

from __future__ import annotations

import math
import os
from argparse import Namespace

from trainer.checkpoint import drafter_folder
from trainer.config import EvaluationConfig, TargetConfig
from trainer.data.template import ChatTemplate, stop_tokens
from trainer.drafter import format as drafter_format
from trainer.drafter.model import Drafter
from trainer.errors import ConfigError, ResourceError
from trainer.evaluate import evaluate_prompts, load_prompts, summarize, table, write_report
from trainer.outlook import default_device
from trainer.speculate import Limits
from trainer.target import check_target, frozen_weights, load_hf_config, load_model, load_tokenizer
from trainer.telemetry import say


def evaluate(options: Namespace) -> int:
    """A checkpoint (or an exported drafter) on prompts from a file."""
    refuse_odd(options)
    folder, trained_for = drafter_folder(options.checkpoint)
    config, weights = drafter_format.load(folder)
    target = trained_for
    if options.target:
        # Perhaps the same one elsewhere: its template and type stay.
        known = {} if trained_for is None else trained_for.model_dump()
        target = TargetConfig.model_validate(known | {"model": options.target})
    if target is None:
        raise ConfigError(
            f"{options.checkpoint} does not say which target it was trained for",
            next_step="name it by --target",
        )
    hf_config = load_hf_config(target)
    misfits = config.misfits(hf_config)
    if misfits:
        raise ConfigError(
            f"this drafter does not fit {target.model}: {'; '.join(misfits)}",
            next_step="name the target that it was trained for by --target",
        )
    room = config.max_position_embeddings - options.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"--max-new-tokens is {options.max_new_tokens}, the drafter's max_position_embeddings"
            f" {config.max_position_embeddings}: no prompt has room",
            next_step="lower --max-new-tokens",
        )
    check_target(target, hf_config)
    device = default_device()
    wanted = EvaluationConfig(
        prompts=options.prompts, count=options.count, max_new_tokens=options.max_new_tokens
    )
    tokenizer = load_tokenizer(target)
    prompts = load_prompts(wanted, [], ChatTemplate(tokenizer), room)
    model = load_model(target, device)
    drafter = Drafter(config)
    drafter.load_state_dict(weights)
    drafter.to(device, model.dtype)
    frozen = frozen_weights(model).to(device, model.dtype)
    stop = frozenset(stop_tokens(tokenizer, model.generation_config))
    limits = Limits(options.max_new_tokens, stop, options.temperature)
    pairs = evaluate_prompts(model, drafter, frozen, prompts, limits, options.seed)
    summary = {"checkpoint": str(options.checkpoint), "target": target.model}
    summary |= summarize(pairs, config.block_size, limits, options.seed)
    say(table(summary))
    if options.json:
        try:
            write_report(options.json, summary)
        except OSError as error:
            raise ResourceError(
                f"--json: {options.json} cannot be written: {error.strerror}",
                next_step="free disk space there; the measures are above",
            ) from None
    return 0


def refuse_odd(options: Namespace) -> None:
    """Raises ``ConfigError`` for numbers out of range and for a report that has no place."""
    sane = options.temperature >= 0 and math.isfinite(options.temperature)
    if options.count < 1 or options.max_new_tokens < 2 or not sane:
        raise ConfigError("--count is at least 1, --max-new-tokens 2, --temperature 0")
    if not 0 <= options.seed < 2**31:
        raise ConfigError(f"--seed is {options.seed}; it is from 0 to {2**31 - 1}")
    if options.json and (options.json.is_dir() or not os.access(options.json.parent, os.W_OK)):
        raise ConfigError(
            f"--json: {options.json} cannot be written",
            next_step="name a file in a folder there is",
        )
