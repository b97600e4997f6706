"""What is known of a run before a weight is loaded: its folders, its device, who does what.

`check`, and the process that becomes torchrun, need no more; what trains takes longer to import.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from trainer.config import TrainConfig
from trainer.errors import ResourceError
from trainer.pipeline.costs import TargetShape, Work
from trainer.pipeline.place import LOCAL_RANKS
from trainer.pipeline.plan import Plan, make_plan
from trainer.resolve import Resolved
from trainer.target import compute_dtype
from trainer.telemetry import RUN_DIR_VARIABLE


def run_folder(config: TrainConfig) -> Path:
    """The supervisor's folder if it set one, else the config's."""
    return Path(os.environ.get(RUN_DIR_VARIABLE) or config.folder).absolute()


def data_folder(config: TrainConfig, folder: Path) -> Path:
    """Of prepared data, for a run in ``folder``."""
    return config.data.folder or folder / "data"


def default_device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def make_work(resolved: Resolved, device: torch.device) -> Work:
    """What the stages cost, for the plan."""
    config = resolved.config
    return Work(
        target=TargetShape.of(resolved.target),
        drafter=resolved.drafter,
        rows=config.optimization.rows,
        length=config.data.sequence_length,
        anchors=config.data.anchors,
        microbatches=config.optimization.microbatches,
        target_bytes=compute_dtype(config.target.dtype, device).itemsize,
        drafter_bytes=compute_dtype(config.optimization.dtype, device).itemsize,
    )


def plan_run(resolved: Resolved) -> Plan:
    """Devices and roles. Raises ``PlanError`` for what is impossible."""
    work = make_work(resolved, default_device())
    return make_plan(resolved.config.pipeline, work, nodes=node_count())


def refuse_too_little(plan: Plan) -> None:
    """Raises ``ResourceError`` for a CPU run that the machine's memory cannot hold; of GPUs
    ``make_plan`` has spoken."""
    for device, needed, there in plan.memory:
        free = available_memory() if there is None else there
        if needed > free:
            raise ResourceError(
                f"{device} would need about {needed / 1e9:.1f} GB and has {free / 1e9:.1f} GB",
                next_step="lower optimization.rows, data.sequence_length or data.anchors",
            )


def available_memory() -> int:
    """Bytes that the machine and this process's cgroup allow."""
    names = ("memory.max", "memory/memory.limit_in_bytes")
    limits = [Path("/sys/fs/cgroup") / name for name in names]
    texts = [path.read_text(encoding="ascii").strip() for path in limits if path.is_file()]
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = [int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:")]
    return min([*free, *(int(text) for text in texts if text.isdigit())])


def node_count() -> int:
    """As torchrun says, else as ``dflashctl launch`` does before it."""
    ranks = os.environ.get("WORLD_SIZE")
    if ranks is not None:
        return int(ranks) // int(os.environ.get(LOCAL_RANKS, ranks))
    return int(os.environ.get("NNODES", "1"))
