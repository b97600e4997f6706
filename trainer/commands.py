"""What each command of ``python -m trainer`` does."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

from trainer.checkpoint import STATE, read_record
from trainer.config import EvaluationConfig, TargetConfig, load_config
from trainer.data.prepare import check_files, load_prepared
from trainer.data.template import ChatTemplate, stop_tokens
from trainer.drafter import format as drafter_format
from trainer.drafter.model import Drafter
from trainer.errors import CheckpointError, ConfigError, DataError, ResourceError
from trainer.evaluate import evaluate_prompts, load_prompts, summarize, table, write_report
from trainer.objective import FrozenTarget
from trainer.pipeline.torchrun import become_torchrun, needs_ranks
from trainer.resolve import Resolved, resolve
from trainer.run import Targets, default_device, make_data, plan_run, run_folder, say
from trainer.speculate import Limits
from trainer.stopping import Stopped, StopSignals
from trainer.target import frozen_weights, load_model, load_tokenizer
from trainer.train import train as run_training


def train(options: Namespace) -> int:
    config = load_config(options.config)
    if needs_ranks(config, os.environ):
        traced = ["--trace-compile"] if options.trace_compile else []
        become_torchrun(config, ["train", str(options.config), *traced])
    return run_training(config)


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


def data(options: Namespace) -> int:
    resolved = resolve(load_config(options.config))
    if options.action == "check":
        return _check_data(resolved)
    folder = run_folder(resolved.config)
    with StopSignals():
        try:
            prepared = make_data(resolved, Targets(resolved), folder)
        except Stopped as stop:
            say(f"stopped by {stop}; the same command continues")
            return stop.exit_code
    say(json.dumps(prepared.report, indent=2))
    return 0


def _check_data(resolved: Resolved) -> int:
    """Every line read and encoded; the target itself does nothing."""
    config = resolved.config
    ChatTemplate(resolved.tokenizer)
    folder = config.data.folder or run_folder(config) / "data"
    prepared = load_prepared(config, folder)
    if prepared is not None:
        say(f"{folder} is complete")
        say(json.dumps(prepared.report, indent=2))
        return 0
    report, rejected = check_files(config, resolved.tokenizer)
    say(json.dumps(report, indent=2))
    for item in rejected:
        say(f"{item.where}: {item.reason}")
    say(f"{len(rejected)} lines are left out")
    if not report["samples"]["samples"] and not report["prompts"] and rejected:
        raise DataError("no line can be used", next_step="mend the lines named above")
    return 0


def evaluate(options: Namespace) -> int:
    """A checkpoint (or an exported drafter) on prompts from a file."""
    if options.count < 1 or options.max_new_tokens < 2 or options.temperature < 0:
        raise ConfigError("--count is at least 1, --max-new-tokens 2, --temperature 0")
    folder, trained_for = drafter_folder(options.checkpoint)
    config, weights = drafter_format.load(folder)
    name = options.target or trained_for
    if name is None:
        raise ConfigError(
            f"{options.checkpoint} does not say which target it was trained for",
            next_step="name it by --target",
        )
    target = TargetConfig(model=name)
    device = default_device()
    tokenizer = load_tokenizer(target)
    model = load_model(target, device)
    misfits = config.misfits(model.config)
    if misfits:
        raise ConfigError(f"this drafter does not fit {name}: {'; '.join(misfits)}")
    drafter = Drafter(config)
    drafter.load_state_dict(weights)
    drafter.to(device, model.dtype)
    rows = frozen_weights(model).to(device, model.dtype)
    wanted = EvaluationConfig(prompts=options.prompts, count=options.count)
    room = config.max_position_embeddings - options.max_new_tokens
    prompts = load_prompts(wanted, [], ChatTemplate(tokenizer), room)
    stop = frozenset(stop_tokens(tokenizer, model.generation_config))
    limits = Limits(options.max_new_tokens, stop, options.temperature)
    frozen = FrozenTarget(rows.embedding, rows.head)
    pairs = evaluate_prompts(model, drafter, frozen, prompts, limits, options.seed, say)
    summary = {"checkpoint": str(options.checkpoint), "target": name}
    summary |= summarize(pairs, config.block_size, limits, options.seed)
    if options.json:
        write_report(options.json, summary)
    say(table(summary))
    return 0


def export(options: Namespace) -> int:
    """A checkpoint in the form of a public reader."""
    folder, target = drafter_folder(options.checkpoint)
    config, weights = drafter_format.load(folder)
    if options.folder.exists() and any(options.folder.iterdir()):
        raise ConfigError(f"{options.folder} is not empty", next_step="name a new folder")
    form: drafter_format.Form = "z-lab" if options.form == "zlab" else "speculators"
    drafter_format.save(options.folder, config, weights, form=form, verifier=target or "")
    say(f"wrote {options.folder} in the {form} form")
    return 0


def drafter_folder(path: Path) -> tuple[Path, str | None]:
    """(the folder in z-lab form, the target's name if it is known) of a checkpoint or an export."""
    if (path / STATE).is_file():
        fingerprint = read_record(path)["fingerprint"]
        return path / "drafter", fingerprint["target.model"]
    if not path.is_dir():
        raise CheckpointError(
            f"there is no folder {path}", next_step="name a folder checkpoints/step-… of a run"
        )
    return path, None
