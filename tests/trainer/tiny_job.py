"""A whole pipeline job with real stages, small enough for a CPU: a 6-layer Qwen3 target with random
weights, a 2-layer drafter, and batches that are a pure function of (step, slot)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from trainer.config import TrainConfig, parse_config
from trainer.data.batch import Batch
from trainer.drafter.config import DrafterConfig
from trainer.head_loss import fast_head_loss
from trainer.objective import FrozenTarget
from trainer.pipeline.costs import TargetShape, Work
from trainer.pipeline.plan import Plan, make_plan
from trainer.pipeline.split import Device
from trainer.pipeline.stages import DrafterStage, Job, MakeSharded, TargetStage
from trainer.replica import DrafterReplica
from trainer.sharded import ShardedDrafter
from trainer.taps import TappedTarget
from trainer.target import freeze, frozen_weights

ROWS, LENGTH, ANCHORS, BLOCK, VOCABULARY = 2, 24, 4, 4, 48


def target_config() -> Any:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )


def drafter_config(**overrides: Any) -> DrafterConfig:
    return DrafterConfig.for_target(
        target_config(), mask_token_id=VOCABULARY - 1, num_layers=2, block_size=BLOCK, **overrides
    )


def train_config(microbatches: int, **pipeline: Any) -> TrainConfig:
    tree = {
        "target": {"model": "tiny"},
        "data": {"files": ["none.jsonl"], "sequence_length": LENGTH, "anchors": ANCHORS},
        "optimization": {
            "steps": 100,
            "rows": ROWS,
            "microbatches": microbatches,
            "learning_rate": 1e-2,
        },
        "pipeline": pipeline,
    }
    return parse_config(tree, source="a test", base=Path("/"))


@dataclass
class TinyBatches:
    """Random documents; ``empty`` microbatches have no valid anchor."""

    slots: int
    steps: int = 6
    empty: frozenset[tuple[int, int]] = frozenset()
    shape: tuple[int, int, int] = (ROWS, LENGTH, ANCHORS)

    def __call__(self, step: int, slot: int) -> Batch:
        random = torch.Generator().manual_seed(1000 * step + slot)
        half = LENGTH // 2
        document = torch.tensor([0] * half + [1] * half, dtype=torch.int32).expand(ROWS, LENGTH)
        position = torch.cat((torch.arange(half), torch.arange(half))).expand(ROWS, LENGTH)
        anchors = torch.randint(0, LENGTH - 1, (ROWS, ANCHORS), generator=random)
        valid = torch.full((ROWS, ANCHORS), (step, slot) not in self.empty)
        return Batch(
            tokens=torch.randint(0, VOCABULARY - 1, (ROWS, LENGTH), generator=random),
            document=document.contiguous(),
            position=position.contiguous(),
            supervised=torch.ones(ROWS, LENGTH, dtype=torch.bool),
            anchors=anchors.sort(dim=1).values,
            anchor_valid=valid,
            sample_ids=((0, 1),) * ROWS,
        )

    def epoch(self, step: int) -> int:
        return 0


@dataclass
class Events:
    """The event sink, kept."""

    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, event: str, /, **detail: Any) -> None:
        self.seen.append((event, detail))

    def named(self, event: str) -> list[dict[str, Any]]:
        return [detail for name, detail in self.seen if name == event]


def make_target(device: torch.device, *, cuda_graph: bool = False) -> TargetStage:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(target_config())
    config = drafter_config()
    layers = list(config.target_layer_ids)
    return TappedTarget(freeze(model).to(device), layers, device, cuda_graph=cuda_graph)


def frozen_target(device: torch.device) -> FrozenTarget:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        frozen = frozen_weights(AutoModelForCausalLM.from_config(target_config()))
    return frozen.to(device, frozen.head.dtype)


def make_drafter(device: torch.device, microbatches: int = 4) -> DrafterStage:
    return DrafterReplica(
        train_config(microbatches),
        drafter_config(),
        frozen_target(device),
        100,
        device,
        head_loss=fast_head_loss(device),
    )


def make_sharded(
    device: torch.device, group: torch.distributed.ProcessGroup, microbatches: int = 4
) -> ShardedDrafter:
    """The same drafter, held by all of ``group`` together."""
    return ShardedDrafter(
        train_config(microbatches),
        drafter_config(),
        frozen_target(device),
        100,
        device,
        group,
        head_loss=fast_head_loss(device),
    )


def tiny_job(
    microbatches: int,
    *,
    steps: int = 6,
    empty: frozenset[tuple[int, int]] = frozenset(),
    target: Callable[[torch.device], TargetStage] = make_target,
    drafter: Callable[[torch.device], DrafterStage] = make_drafter,
    sharded: MakeSharded = make_sharded,
    held_out: Sequence[Batch] = (),
) -> tuple[Job, Events]:
    events = Events()
    batches = TinyBatches(microbatches, steps, empty)
    job = Job(batches, target, drafter, events, make_sharded=sharded, held_out=held_out)
    return job, events


def tiny_work(microbatches: int) -> Work:
    return Work(
        target=TargetShape.of(target_config()),
        drafter=drafter_config(),
        rows=ROWS,
        length=LENGTH,
        anchors=ANCHORS,
        microbatches=microbatches,
    )


def tiny_plan(targets: int, drafters: int, microbatches: int, **pipeline: Any) -> Plan:
    """Workers that share the CPU."""
    config = train_config(
        microbatches,
        **{"executor": "threads", "targets": targets, "drafters": drafters, **pipeline},
    )
    return make_plan(config.pipeline, tiny_work(microbatches), [Device("cpu", "cpu")])
