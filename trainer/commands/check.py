"""`check`: what a config would do, and the memory it needs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trainer.config import load_config
from trainer.errors import ResourceError
from trainer.outlook import plan_run, run_folder
from trainer.resolve import Resolved, resolve
from trainer.telemetry import say


def check(options: Namespace) -> int:
    """Everything that can be known without loading a weight."""
    resolved = resolve(load_config(options.config))
    for line in describe(resolved):
        say(line)
    plan = plan_run(resolved)
    say(plan.table())
    for device, needed, there in plan.memory:
        free = available_memory() if there is None else there
        if needed > free:
            raise ResourceError(
                f"{device} would need about {needed / 1e9:.1f} GB and has {free / 1e9:.1f} GB",
                next_step="lower optimization.rows, data.sequence_length or data.anchors",
            )
    say("good: nothing stands in the way of `python -m trainer train`")
    return 0


def available_memory() -> int:
    """Bytes that the machine and this process's cgroup allow."""
    names = ("memory.max", "memory/memory.limit_in_bytes")
    limits = [Path("/sys/fs/cgroup") / name for name in names]
    texts = [path.read_text(encoding="ascii").strip() for path in limits if path.is_file()]
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = [int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:")]
    return min([*free, *(int(text) for text in texts if text.isdigit())])


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
