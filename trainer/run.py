"""What surrounds the loop: data, stages, checkpoints, telemetry, put together from a config."""

from __future__ import annotations

import gc
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainer.checkpoint import CheckpointStore
from trainer.compile_lock import CompileLock
from trainer.config import TrainConfig, digest, flatten
from trainer.data.batch import Batch
from trainer.data.features import NONE
from trainer.data.pack import PackedBatches
from trainer.data.prepare import Prepared, feature_file, load_prepared, prepare
from trainer.data.share import share_data
from trainer.drafter import format as drafter_format
from trainer.drafter.model import Drafter
from trainer.errors import ResourceError
from trainer.feature_cache import CachedTarget, Recall
from trainer.head_loss import HeadLoss, fast_head_loss
from trainer.objective import FrozenTarget
from trainer.outlook import (
    data_folder,
    default_device,
    plan_run,
    refuse_too_little,
    run_folder,
)
from trainer.pipeline.inline import InlineExecutor
from trainer.pipeline.place import Place
from trainer.pipeline.plan import Plan
from trainer.pipeline.stages import DrafterStage, Executor, Job, TargetStage
from trainer.replica import DrafterReplica
from trainer.resolve import Resolved
from trainer.sampled_head import SampledHeadLoss
from trainer.taps import TappedTarget, check_taps
from trainer.target import compute_dtype, frozen_weights, load_frozen, load_model
from trainer.telemetry import RunWriter, say
from trainer.trackers import check_trackers, make_trackers
from trainer.validation import held_out_batches
from trainer.warm_start import start_from_target


class Targets:
    """The whole target, loaded once a device, whoever asks."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self._models: dict[torch.device, Any] = {}
        self._frozen: FrozenTarget | None = None
        self._lock = threading.Lock()

    def model(self, device: torch.device) -> Any:
        with self._lock:
            if device not in self._models:
                model = load_model(self.resolved.config.target, device)
                check_taps(model, self.resolved.drafter.target_layer_ids)
                self._models[device] = model
            return self._models[device]

    def any_model(self) -> Any:
        """One that is loaded already, else on the CPU."""
        with self._lock:
            loaded = next(iter(self._models.values()), None)
        return loaded if loaded is not None else self.model(torch.device("cpu"))

    def frozen(self, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
        """Embedding and head on a device; shared with the target where it lies there already."""
        with self._lock:
            if device in self._models:
                here = frozen_weights(self._models[device])
            else:
                if self._frozen is None:
                    self._frozen = load_frozen(self.resolved.config.target)
                here = self._frozen
        return here.to(device, dtype)


@dataclass
class Run:
    """Everything a run consists of, before the first step."""

    resolved: Resolved
    folder: Path
    writer: RunWriter
    targets: Targets
    data: Prepared
    batches: PackedBatches
    held_out: list[Batch]
    """Measured at each checkpoint; none where nothing is held out."""
    compile_lock: CompileLock
    store: CheckpointStore
    plan: Plan
    leads: bool = True
    """False on all but one of the ranks of a run of several processes: the others write nothing but
    their own events."""

    @property
    def config(self) -> TrainConfig:
        return self.resolved.config

    def make_target(self, device: torch.device) -> TargetStage:
        """For training samples."""
        stage = self.tapped_target(device, cuda_graph=self.config.pipeline.cuda_graph)
        if not self.config.data.cache_features:
            return stage
        lengths = np.minimum(self.data.train.lengths, self.config.data.sequence_length)
        return CachedTarget(stage, lengths, self._recall(device, stage.layer_ids))

    def tapped_target(self, device: torch.device, *, cuda_graph: bool = False) -> TappedTarget:
        """Without a cache: for any samples."""
        layers = self.resolved.drafter.target_layer_ids
        return TappedTarget(self.targets.model(device), layers, device, cuda_graph=cuda_graph)

    def _recall(self, device: torch.device, layers: tuple[int, ...]) -> Recall | None:
        """Features that data making kept, if they are of these taps in this type."""
        where = data_folder(self.config, self.folder)
        kept = feature_file(where, self.targets.model(device), layers)
        if not kept.fits():
            return None
        offsets, lengths = self.data.train.features, self.data.train.lengths

        def recall(sample: int) -> torch.Tensor | None:
            offset = int(offsets[sample])
            return kept.read(offset, int(lengths[sample])) if offset != NONE else None

        return recall

    def make_drafter(self, device: torch.device) -> DrafterStage:
        return DrafterReplica(**self._stage(device))

    def make_sharded(self, device: torch.device, group: dist.ProcessGroup) -> DrafterStage:
        """One of the drafters of ``group``, which hold one drafter together."""
        # Only with this executor: 0.3 s of imports (DTensor).
        from trainer.sharded import ShardedDrafter

        return ShardedDrafter(**self._stage(device), group=group)

    def _stage(self, device: torch.device) -> dict[str, Any]:
        """What either kind of drafter is made of."""
        sampled = self.config.optimization.head_sample
        frozen = self.targets.frozen(device, compute_dtype(self.config.optimization.dtype, device))
        return {
            "config": self.config,
            "drafter_config": self.resolved.drafter,
            "frozen": frozen,
            "steps": self.batches.steps,
            "device": device,
            "head_loss": self._head_loss(device, frozen),
            # Held-out samples have answers of their own, which a sampled head may not know.
            "measure_head": None if sampled is None else fast_head_loss(device),
            "start": self.start if self.config.drafter.start == "target" else None,
            "compile_": self.compile_lock.compile,
            "backward": self.compile_lock.backward,
        }

    def start(self, drafter: Drafter) -> None:
        """The weights that training begins with, under ``drafter.start: target``."""
        start_from_target(drafter, self.targets.any_model())

    def _head_loss(self, device: torch.device, frozen: FrozenTarget) -> HeadLoss:
        sampled = self.config.optimization.head_sample
        if sampled is None:
            fp8 = self.config.optimization.fp8 != "off"
            return fast_head_loss(device, frozen.head, "fp8" if fp8 else "bf16")
        answers = torch.from_numpy(self.data.train.answers().astype(np.int64))
        return SampledHeadLoss(answers.to(device), sampled, self.resolved.drafter.vocab_size)

    def job(self) -> Job:
        return Job(
            self.batches,
            self.make_target,
            self.make_drafter,
            self.writer.event,
            self.compile_lock,
            digest(self.store.fingerprint),
            self.make_sharded,
            self.held_out,
        )


@dataclass(frozen=True)
class Opened:
    """A run that may begin: its config holds, its folder is there, nothing long has happened."""

    resolved: Resolved
    folder: Path
    writer: RunWriter
    plan: Plan
    place: Place | None
    """This rank's, under several processes."""

    @property
    def leads(self) -> bool:
        return self.place is None or self.place.leads


def open_run(resolved: Resolved) -> Opened:
    """Raises ``PlanError`` or ``ConfigError``; once ``started`` is written, nothing."""
    config = resolved.config
    plan = plan_run(resolved)
    refuse_too_little(plan)
    place = Place.from_environment(plan) if plan.executor == "processes" else None
    folder = run_folder(config)
    follows = place is not None and not place.leads
    check_trackers(config.report_to)
    try:
        writer = RunWriter(folder / "ranks" / place.folder if place and follows else folder)
    except OSError as error:
        raise ResourceError(
            f"cannot write to the run's folder {folder}: {error.strerror}",
            next_step="free disk space there, or name another folder by `folder`",
        ) from None
    writer.claim()
    if not follows:
        settings = config.model_dump(mode="json")
        writer.trackers += make_trackers(config.report_to, folder, settings)
    writer.event(
        "started",
        config=config.model_dump(mode="json"),
        drafter=resolved.drafter.model_dump(mode="json"),
        host=socket.gethostname(),
        torch=torch.__version__,
        python=sys.version.split()[0],
    )
    return Opened(resolved, folder, writer, plan, place)


def prepare_run(opened: Opened) -> Run:
    """Make or load the data, and find the run's place to resume."""
    resolved, folder, writer = opened.resolved, opened.folder, opened.writer
    config, plan, place, leads = resolved.config, opened.plan, opened.place, opened.leads
    targets = Targets(resolved)
    made = None
    if leads:
        for note in resolved.notes:
            say(note)
        # A rank of its own leads, which needs no target once the data is there: kept, it would lie
        # beside a target rank's on the first device, and the plan counts one.
        made = make_data(resolved, targets if place is None else Targets(resolved), folder)
        if place is not None and torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
        say(plan.table())
    if place is not None and place.nodes > 1 and place.leads_node:
        # Every node may have a folder of its own, where nobody else puts the data.
        data = share_data(config, data_folder(config, folder), place, made)
    else:
        data = made or wait_for_data(resolved, folder)
    writer.event("data", fingerprint=data.fingerprint, key=digest(data.fingerprint))
    writer.event("plan", **plan.as_data())
    pad = resolved.tokenizer.pad_token_id
    pad = resolved.tokenizer.eos_token_id if pad is None else pad
    batches = PackedBatches(data.train, config, pad or 0)
    held_out = held_out_batches(data.held_out, config, pad or 0)
    fingerprint = (
        config.fingerprint()
        | flatten(
            {"data_made": data.fingerprint, "shape": resolved.drafter.model_dump(mode="json")}
        )
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
    if leads:
        store.check()
    lock = CompileLock(policy=config.pipeline.recompile, event=writer.event)
    return Run(resolved, folder, writer, targets, data, batches, held_out, lock, store, plan, leads)


def make_data(resolved: Resolved, targets: Targets, folder: Path) -> Prepared:
    """As ``prepare``, where the config or the run's ``folder`` puts it."""
    config = resolved.config
    where = data_folder(config, folder)
    return prepare(
        config,
        where,
        resolved.tokenizer,
        lambda: targets.model(default_device()),
        say,
        resolved.drafter.target_layer_ids,
        resolved.drafter.vocab_size,
    )


def wait_for_data(resolved: Resolved, folder: Path) -> Prepared:
    """What the leading rank is making; if it fails, torchrun ends this one too."""
    where = data_folder(resolved.config, folder)
    while not (where / "report.json").exists():
        time.sleep(0.5)
    prepared = load_prepared(resolved.config, where)
    assert prepared is not None
    return prepared


def make_executor(run: Run) -> Executor:
    """The executor of ``pipeline.executor``, on the plan's devices."""
    plan = run.plan
    if plan.executor == "threads":
        from trainer.pipeline.threads import ThreadsExecutor

        return ThreadsExecutor(run.job(), plan)
    if plan.executor == "processes":
        from trainer.pipeline.processes import ProcessesExecutor

        return ProcessesExecutor(run.job(), plan)
    device, target = torch.device(plan.drafters[0]), torch.device(plan.targets[0])
    return InlineExecutor(run.job(), device, target)
