"""One file says everything about a run: ``python -m trainer check config.yaml`` explains it.

Unknown keys are refused with the nearest right one. What depends on the target (widths, layer ids,
the mask token) is resolved against the target's own configuration by ``trainer.resolve``, before
any device is touched.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from trainer.config_errors import explain
from trainer.data.settings import DataConfig, FilePrompts, Section
from trainer.drafter.config import Dflash2Config, LayerType
from trainer.errors import ConfigError
from trainer.objective import ObjectiveConfig

NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)
"""What PyYAML raises, which passes on what Python says of `2001-13-45` and of `!!bool x`."""


class TargetConfig(Section):
    """The frozen model that the drafter learns to anticipate."""

    model: str
    """A folder, a ``.gguf`` file, a name that transformers knows, or ``package:NAME/FILE`` for a
    file inside an installed Python package."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 on a GPU, float32 on a CPU, most of which only emulate bfloat16."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """transformers' attention implementation. Documents packed into a row never see each other."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's own template."""


class DrafterOptions(Section):
    """The drafter's shape. What is left out follows from the target (``drafter/config.py``)."""

    num_layers: int = Field(5, ge=1)
    """Transformer layers of the drafter; published drafters have five."""
    block_size: int = Field(16, ge=2)
    """Slots of a block: the anchor and ``block_size - 1`` predictions."""
    mask_token_id: int | None = None
    """The token that stands in the slots to predict; null picks one that no text uses."""
    target_layer_ids: list[int] | None = None
    """Tapped layers, 0-based; null spaces them as published."""
    intermediate_size: int | None = Field(None, ge=1)
    """Width of the MLPs; null takes the target's."""
    num_heads: int | None = Field(None, ge=1)
    """Query heads; null takes the target's."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key and value heads, a divisor of ``num_heads``; null takes the target's."""
    head_dim: int | None = Field(None, ge=2)
    """Width of one head, an even number; null takes the target's."""
    layer_types: list[LayerType] | None = None
    """``full_attention`` or ``sliding_attention`` for each layer; null makes all of them full, as
    published."""
    sliding_window: int | None = Field(None, ge=1)
    """Tokens that a sliding layer sees, itself included. Needed as soon as ``layer_types`` has
    one."""
    initializer_range: float | None = Field(None, gt=0)
    """Standard deviation of the matrices at the start; null is 0.02, as Qwen3 and Llama begin."""
    start: Literal["random", "target"] = "random"
    """``target``: layers begin as copies of the target's last ones (``trainer/warm_start.py``)."""
    dflash2: Dflash2Config | None = None
    """``{}`` turns DFlash2 on with its released defaults."""

    def overrides(self) -> dict[str, Any]:
        """The fields that were stated, for ``DrafterConfig.for_target``."""
        return {
            name: value
            for name, value in self.model_dump(exclude={"mask_token_id", "start"}).items()
            if value is not None
        }


class OptimizationConfig(Section):
    """Public recipe: AdamW 6e-4, cosine, 4 % warm-up, clip 1.0, fp32 masters."""

    steps: int | None = Field(None, ge=1)
    """Optimizer steps. Exactly one of ``steps`` and ``epochs`` is given."""
    epochs: float | None = Field(None, gt=0)
    """Exactly one of the two."""
    rows: int = Field(1, ge=1)
    """Rows of a microbatch."""
    microbatches: int = Field(1, ge=1)
    """Microbatches of an optimizer step, over all drafters; a multiple of their number."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon``: torch's own, for the drafter's matrices; AdamW for the rest, at the same rate."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's."""
    learning_rate: float = Field(6e-4, gt=0)
    """At its highest, after the warm-up. 6e-4 is published, for drafters of 4B targets and above;
    the demo's one layer takes more."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """``wsd``: flat after the warm-up, then linear to zero over ``decay`` of the steps."""
    warmup: float = Field(0.04, ge=0, lt=1)
    """Share of the steps."""
    decay: float = Field(0.2, gt=0, le=1)
    """Share of the steps in which ``wsd`` falls to zero; a cosine ignores it."""
    final: float = Field(0.0, ge=0, le=1)
    """What remains of the learning rate at the end of a cosine."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's memory of the gradient, its usual value."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's memory of the squared gradient. 0.95, as language models are trained: it forgets a
    loss spike in 20 steps, 0.999 in 1,000."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW's guard against division by zero, its usual value."""
    weight_decay: float = Field(0.0, ge=0)
    """On matrices only; norm weights and DFlash2's base kernels are never decayed."""
    clip: float = Field(1.0, gt=0)
    """Limit of the gradient's global norm."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the computation; the master weights are float32 always."""
    fp8: Literal["off", "head", "head+mlp"] = "off"
    """On a GPU that has it (Ada, Hopper, newer): multiply in fp8 by the frozen output head, or also
    in the drafter's MLPs. For an 8B target 1.11 and 1.27 times as fast as bf16, its first loss 2e-4
    and 3e-5 away (``benchmarks/README.md``). A CPU ignores it."""
    head_sample: int | None = Field(None, ge=0)
    """For a CPU: the softmax runs over the tokens of the training data and so many others, drawn
    anew at each step (``trainer/sampled_head.py``). Null: the whole vocabulary."""
    nonfinite_limit: int = Field(10, ge=0)
    """Steps skipped for a non-finite loss or gradient before the run stops."""

    @model_validator(mode="after")
    def _has_one_length(self) -> OptimizationConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("state either steps or epochs, not both or neither")
        if self.fp8 != "off" and self.dtype == "float32":
            raise ValueError(f"fp8 is {self.fp8!r} but dtype is 'float32'; use bfloat16 or auto")
        return self


class CheckpointConfig(Section):
    """``best`` is the one with the highest estimated acceptance on held-out samples."""

    every: int = Field(500, ge=1)
    """Steps between checkpoints; the last step always makes one."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints kept. Two: should the newest be on a disk that failed under it, one is
    left."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints whose step is a multiple of this are never deleted."""
    validate_batches: int = Field(4, ge=0)
    """Held-out microbatches measured at each checkpoint; their features stay in host memory. 0, or
    no held-out sample: the training steps since the last checkpoint decide instead."""


class StageTimes(Section):
    """What a microbatch takes each stage."""

    target: float = Field(gt=0)
    """Milliseconds: ``target_ms`` of a run's lines."""
    drafter: float = Field(gt=0)
    """Milliseconds: ``drafter_ms``."""


class PipelineConfig(Section):
    """Which device plays which part (``pipeline/plan.py``)."""

    executor: Literal["inline", "threads", "processes"] = "inline"
    """``inline``: one device, both parts in turn. ``threads``: one process, a thread a device.
    ``processes``: torchrun, one rank a device."""
    targets: int | Literal["auto"] = "auto"
    """Target workers."""
    drafters: int | Literal["auto"] = "auto"
    """Drafter workers."""
    devices: list[str] | Literal["auto"] = "auto"
    """Such as ``[cuda:0, cuda:1]``; targets first. A device may appear more than once."""
    stage_ms: StageTimes | None = None
    """Measured times by which ``auto`` splits the devices; null counts operations."""
    queue_depth: int = Field(2, ge=1)
    """Feature slots per drafter."""
    cuda_graph: bool = False
    """On a GPU: the target's forward pass, a drafter's microbatch and its update as one recorded
    graph each (``graphs.py``), for models so small that launching kernels costs more than they do.
    Takes the memory of one feature slot more on each device; several drafters then sum gradients
    after a microbatch, not beside its backward pass. On a CPU nothing is recorded."""
    shard_drafters: bool = False
    """With ``processes`` and several drafters, on one node or many: each holds a part of one
    drafter's masters, moments and gradients instead of a whole one, for drafters that do not fit
    (``sharded.py``). Costs traffic between drafters; checkpoints are the same."""
    recompile: Literal["warn", "fail"] = "warn"
    """What a recompile after the warm-up does."""
    stall_limit_s: float = Field(600.0, gt=0)
    """A stage that shows no sign of life for so long stops the run."""
    check_equal_every: int = Field(100, ge=1)
    """Steps between checks that the drafters' weights are bit-equal."""

    @model_validator(mode="after")
    def _counts_are_positive(self) -> PipelineConfig:
        for name in ("targets", "drafters"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} is {value}; a pipeline needs at least one")
        return self

    @model_validator(mode="after")
    def _can_shard(self) -> PipelineConfig:
        if self.shard_drafters and self.executor != "processes":
            raise ValueError(
                f"shard_drafters needs processes that meet; executor is {self.executor!r}: set it"
                " to processes, or leave out shard_drafters"
            )
        if self.shard_drafters and self.cuda_graph:
            raise ValueError(
                "shard_drafters gathers weights within a step, which no cuda_graph records; leave"
                " out one of them"
            )
        return self


class EvaluationConfig(Section):
    """Speculative decoding against the target after training."""

    prompts: str | None = None
    """JSONL with ``messages`` or ``prompt``, as in ``data.make.prompts``; null takes the held-out
    share of the data."""
    count: int = Field(20, ge=1)
    """Prompts."""
    max_new_tokens: int = Field(128, ge=2)
    """Tokens decoded for each prompt."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy, whose texts must be identical with and without the drafter; above it rejection
    sampling keeps the target's distribution."""
    compare_untrained: bool = False
    """Also measure the drafter as it was before training, on the same prompts."""


class TrainConfig(Section):
    """A run. ``seed`` and the data decide everything else that is random."""

    target: TargetConfig
    drafter: DrafterOptions = DrafterOptions()
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig
    optimization: OptimizationConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    pipeline: PipelineConfig = PipelineConfig()
    evaluation: EvaluationConfig | None = None
    """Null evaluates nothing; ``python -m trainer evaluate`` can do so later."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Of anchors, order, initialization and sampling."""
    log_every: int = Field(10, ge=1)
    """Steps between lines."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where the lines go besides ``metrics.jsonl`` (``trackers.py``); the package must be there."""
    folder: Path = Path("run")
    """The run's folder unless the supervisor set one (``DFLASH_RUN_DIR``)."""

    @model_validator(mode="after")
    def _has_something_to_evaluate_on(self) -> TrainConfig:
        if self.evaluation and self.evaluation.prompts is None and not self.data.held_out:
            raise ValueError(
                "there would be no prompt to evaluate on: evaluation.prompts is null, and"
                " data.held_out 0; name a file of prompts, or hold some out"
            )
        return self

    @model_validator(mode="after")
    def _fits_a_graph(self) -> TrainConfig:
        if self.pipeline.cuda_graph and self.optimization.head_sample is not None:
            raise ValueError(
                "pipeline.cuda_graph records a step, but optimization.head_sample draws on the host"
                " anew at each; leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def _fits_shards(self) -> TrainConfig:
        if not self.pipeline.shard_drafters:
            return self
        if self.optimization.optimizer == "muon":
            raise ValueError(
                "optimization.optimizer muon needs whole matrices, and under"
                " pipeline.shard_drafters no drafter has one; use adamw, or leave out"
                " shard_drafters"
            )
        if self.optimization.fp8 == "head+mlp":
            raise ValueError(
                "optimization.fp8 head+mlp is not to be had with pipeline.shard_drafters; use"
                " fp8: head, or leave out shard_drafters"
            )
        return self

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must share to be resumed, flat: ``{"drafter.num_layers": 5, …}``.

        Left out: how often things are written and where, on how many devices, and evaluation.
        """
        data = self.model_dump(
            mode="json",
            exclude={"checkpoint", "pipeline", "evaluation", "log_every", "report_to", "folder"},
        )
        data["data"].pop("folder")
        data["data"].pop("cache_features")
        return flatten(data)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def load_config(path: Path) -> TrainConfig:
    """Read a YAML (or JSON) config. Relative paths inside it are relative to its folder.

    Raises ``ConfigError`` with one message for everything wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror}",
            next_step="give the path of a YAML file; playbooks/demo/config.yaml is a first one",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", next_step="save it as UTF-8") from None
    try:
        tree = yaml.safe_load(text)
    except NOT_YAML as error:
        where = str(error).replace("\n", " ")
        raise ConfigError(f"{path} is not YAML: {where}", next_step="mend that line") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds {type(tree).__name__}, not a mapping of sections",
            next_step="start with `target:`, `data:` and `optimization:`",
        )
    return parse_config(tree, source=str(path), base=path.parent)


def parse_config(tree: dict[str, Any], *, source: str, base: Path) -> TrainConfig:
    """Validate a tree that was read from ``source``."""
    try:
        config = TrainConfig.model_validate(tree)
    except ValidationError as error:
        problems = [explain(item, TrainConfig) for item in error.errors(include_url=False)]
        lines = "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
        raise ConfigError(
            f"{source} is not a valid config:\n{lines}",
            next_step="mend these fields; docs/reference/config.md of dflashctl describes each",
        ) from None
    return _absolute(config, base.resolve())


def _absolute(config: TrainConfig, base: Path) -> TrainConfig:
    """The same config with input paths made absolute (output folders stay with the process)."""

    def at(path: str) -> str:
        return path if path.startswith("package:") or Path(path).is_absolute() else str(base / path)

    data = config.data
    update: dict[str, Any] = {"files": [at(path) for path in data.files]}
    if data.make:
        prompts = [
            p.model_copy(update={"path": at(p.path)}) if isinstance(p, FilePrompts) else p
            for p in data.make.prompts
        ]
        update["make"] = data.make.model_copy(update={"prompts": prompts})
    changes: dict[str, Any] = {"data": data.model_copy(update=update)}
    target = config.target
    if (base / target.model).exists():
        target = target.model_copy(update={"model": at(target.model)})
    if target.chat_template:
        target = target.model_copy(update={"chat_template": Path(at(str(target.chat_template)))})
    changes["target"] = target
    if config.evaluation and config.evaluation.prompts:
        prompts_file = {"prompts": at(config.evaluation.prompts)}
        changes["evaluation"] = config.evaluation.model_copy(update=prompts_file)
    return config.model_copy(update=changes)


def digest(value: Any) -> str:
    """12 hex digits of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
