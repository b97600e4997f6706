"""`check`: what a config would do, and the memory it needs."""

from __future__ import annotations

from argparse import Namespace

from trainer.config import load_config
from trainer.data.prepare import load_prepared
from trainer.data.sources import look
from trainer.outlook import data_folder, plan_run, refuse_too_little, run_folder
from trainer.resolve import Resolved, resolve
from trainer.telemetry import say
from trainer.trackers import check_trackers


def check(options: Namespace) -> int:
    """Everything that can be known without loading a weight."""
    resolved = resolve(load_config(options.config))
    for line in describe(resolved):
        say(line)
    folder = data_folder(resolved.config, run_folder(resolved.config))
    if load_prepared(resolved.config, folder) is None:
        for note in look(resolved.config, resolved.tokenizer, resolved.drafter.vocab_size):
            say(f"note: {note}")
    check_trackers(resolved.config.report_to)
    plan = plan_run(resolved)
    say(plan.table())
    refuse_too_little(plan)
    say("good: nothing stands in the way of `python -m trainer train`")
    return 0


def describe(resolved: Resolved) -> list[str]:
    """The decisions of a config, one a line."""
    config, drafter = resolved.config, resolved.drafter
    optimization = config.optimization
    length = (
        f"{optimization.steps} steps"
        if optimization.steps is not None
        else f"{optimization.epochs:g} epochs"
    )
    kinds = ", ".join(sorted(set(drafter.layer_types)))
    return [
        *resolved.notes,
        f"target: {config.target.model}, {drafter.num_target_layers} layers of"
        f" {drafter.target_hidden_size}, vocabulary {drafter.vocab_size}",
        f"drafter: {'DFlash2' if drafter.dflash2 else 'DFlash'}, {drafter.num_layers} layers"
        f" ({kinds}), MLP {drafter.intermediate_size}, block {drafter.block_size}, taps"
        f" {list(drafter.target_layer_ids)}, rope base {drafter.rope_theta:g}",
        f"objective: {config.objective.kind}, gamma"
        f" {config.objective.gamma_for(drafter.block_size):g}",
        f"steps: {length} of {optimization.microbatches} x {optimization.rows} rows of"
        f" {config.data.sequence_length} tokens, {config.data.anchors} anchors a row",
        f"pipeline: {config.pipeline.executor}",
        f"folder: {run_folder(config)}",
    ]
