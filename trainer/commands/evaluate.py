"""`evaluate`: a checkpoint's drafter, decoding prompts speculatively."""

from __future__ import annotations

import math
from argparse import Namespace

from trainer.checkpoint import drafter_folder
from trainer.config import EvaluationConfig, TargetConfig
from trainer.data.template import ChatTemplate, stop_tokens
from trainer.drafter import format as drafter_format
from trainer.drafter.model import Drafter
from trainer.errors import ConfigError
from trainer.evaluate import evaluate_prompts, load_prompts, summarize, table, write_report
from trainer.outlook import default_device
from trainer.speculate import Limits
from trainer.target import check_target, frozen_weights, load_hf_config, load_model, load_tokenizer
from trainer.telemetry import say


def evaluate(options: Namespace) -> int:
    """A checkpoint (or an exported drafter) on prompts from a file."""
    sane = options.temperature >= 0 and math.isfinite(options.temperature)
    if options.count < 1 or options.max_new_tokens < 2 or not sane:
        raise ConfigError("--count is at least 1, --max-new-tokens 2, --temperature 0")
    if options.json and not (options.json.parent.is_dir() and not options.json.is_dir()):
        raise ConfigError(
            f"--json: {options.json} cannot be written",
            next_step="name a file in a folder there is",
        )
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
    check_target(target, hf_config)
    device = default_device()
    wanted = EvaluationConfig(
        prompts=options.prompts, count=options.count, max_new_tokens=options.max_new_tokens
    )
    tokenizer = load_tokenizer(target)
    room = config.max_position_embeddings - options.max_new_tokens
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
    if options.json:
        write_report(options.json, summary)
    say(table(summary))
    return 0
