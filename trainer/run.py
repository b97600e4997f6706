"""What surrounds the loop: data, stages, checkpoints, telemetry, put together from a config."""

from __future__ import annotations

import os
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint import CheckpointStore
from trainer.compile_lock import CompileLock
from trainer.config import TrainConfig, digest, flatten
from trainer.data.pack import PackedBatches
from trainer.data.prepare import Prepared, prepare
from trainer.drafter import format as drafter_format
from trainer.errors import ConfigError
from trainer.feature_cache import CachedTarget
from trainer.head_loss import HeadLoss, fast_head_loss
from trainer.objective import FrozenTarget
from trainer.pipeline.inline import InlineExecutor
from trainer.pipeline.stages import DrafterStage, Executor, Job, TargetStage
from trainer.replica import DrafterReplica
from trainer.resolve import Resolved
from trainer.sampled_head import SampledHeadLoss
from trainer.target import (
    Frozen,
    TappedTarget,
    check_taps,
    compute_dtype,
    frozen_weights,
    load_frozen,
    load_model,
)
from trainer.telemetry import RUN_DIR_VARIABLE, RunWriter


def say(text: str) -> None:
    """A line of the run's log."""
    print(text, flush=True)


def run_folder(config: TrainConfig) -> Path:
    """The supervisor's folder if it set one, else the config's."""
    return Path(os.environ.get(RUN_DIR_VARIABLE) or config.folder).absolute()


def default_device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Targets:
    """The whole target, loaded once a device, whoever asks."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self._models: dict[torch.device, Any] = {}
        self._frozen: Frozen | None = None
        self._lock = threading.Lock()

    def model(self, device: torch.device) -> Any:
        with self._lock:
            if device not in self._models:
                model = load_model(self.resolved.config.target, device)
                check_taps(model, self.resolved.drafter.target_layer_ids)
                self._models[device] = model
            return self._models[device]

    def frozen(self, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
        """Embedding and head on a device; shared with the target where it lies there already."""
        with self._lock:
            if device in self._models:
                here = frozen_weights(self._models[device])
            else:
                if self._frozen is None:
                    self._frozen = load_frozen(self.resolved.config.target)
                here = self._frozen
        moved = here.to(device, dtype)
        return FrozenTarget(moved.embedding, moved.head)


@dataclass
class Run:
    """Everything a run consists of, before the first step."""

    resolved: Resolved
    folder: Path
    writer: RunWriter
    targets: Targets
    data: Prepared
    batches: PackedBatches
    compile_lock: CompileLock
    store: CheckpointStore

    @property
    def config(self) -> TrainConfig:
        return self.resolved.config

    def make_target(self, device: torch.device) -> TargetStage:
        layers = self.resolved.drafter.target_layer_ids
        stage: TargetStage = TappedTarget(self.targets.model(device), layers, device)
        return CachedTarget(stage) if self.config.data.cache_features else stage

    def make_drafter(self, device: torch.device) -> DrafterStage:
        dtype = compute_dtype(self.config.optimization.dtype, device)
        frozen = self.targets.frozen(device, dtype)
        return DrafterReplica(
            self.config,
            self.resolved.drafter,
            frozen,
            self.batches.steps,
            device,
            head_loss=self._head_loss(device),
            compile_=self.compile_lock.compile,
        )

    def _head_loss(self, device: torch.device) -> HeadLoss:
        sampled = self.config.optimization.head_sample
        if sampled is None:
            return fast_head_loss(device)
        train = self.data.train
        answers = torch.from_numpy(np.unique(train.tokens[train.supervised]).astype(np.int64))
        return SampledHeadLoss(answers.to(device), sampled, self.resolved.drafter.vocab_size)

    def job(self) -> Job:
        return Job(
            self.batches,
            self.make_target,
            self.make_drafter,
            self.writer.event,
            self.compile_lock,
        )


def prepare_run(resolved: Resolved) -> Run:
    """Open the run's folder, make or load its data, and find its place to resume."""
    config = resolved.config
    folder = run_folder(config)
    writer = RunWriter(folder)
    writer.event(
        "started",
        config=config.model_dump(mode="json"),
        drafter=resolved.drafter.model_dump(mode="json"),
        host=socket.gethostname(),
        torch=torch.__version__,
        python=sys.version.split()[0],
    )
    for note in resolved.notes:
        say(note)
    targets = Targets(resolved)
    data = make_data(resolved, targets, folder)
    pad = resolved.tokenizer.pad_token_id
    pad = resolved.tokenizer.eos_token_id if pad is None else pad
    batches = PackedBatches(data.train, config, pad or 0)
    fingerprint = (
        config.fingerprint()
        | flatten({"data_made": data.fingerprint})
        | flatten({"shape": resolved.drafter.model_dump(mode="json")})
        | {"steps": batches.steps}
    )
    store = CheckpointStore(
        folder / "checkpoints",
        config.checkpoint,
        fingerprint,
        lambda path, weights: drafter_format.save(
            path, resolved.drafter, weights, verifier=config.target.model
        ),
    )
    writer.event("data", fingerprint=data.fingerprint, key=digest(data.fingerprint))
    return Run(
        resolved, folder, writer, targets, data, batches, CompileLock(event=writer.event), store
    )


def make_data(resolved: Resolved, targets: Targets, folder: Path) -> Prepared:
    config = resolved.config
    where = config.data.folder or folder / "data"
    return prepare(config, where, resolved.tokenizer, lambda: targets.model(default_device()), say)


def make_executor(run: Run) -> Executor:
    """The executor of ``pipeline.executor``."""
    kind = run.config.pipeline.executor
    if kind == "inline":
        return InlineExecutor(run.job(), default_device())
    raise ConfigError(f"pipeline.executor {kind} is not in this build")
