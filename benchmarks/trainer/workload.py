"""A pipeline job of a known shape, with random weights and tokens: what the benchmarks here run.

``8b``: a target and a drafter of Qwen3-8B's shape, S = 3072, 512 anchors, blocks of 16, two rows a
microbatch. ``smollm2``: SmolLM2-135M's shape, S = 384, 32 anchors, 16 rows: bound by launches.
``tiny``: for a CPU, to try a script.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[2]))

from trainer.compile_lock import CompileLock
from trainer.config import TrainConfig, parse_config
from trainer.data.batch import Batch
from trainer.drafter.config import DrafterConfig
from trainer.head_loss import fast_head_loss
from trainer.objective import FrozenTarget
from trainer.pipeline.costs import TargetShape, Work
from trainer.pipeline.stages import DrafterStage, Job, TargetStage
from trainer.replica import DrafterReplica
from trainer.sharded import ShardedDrafter
from trainer.taps import TappedTarget
from trainer.target import compute_dtype, freeze


@dataclass(frozen=True)
class Shape:
    target: dict[str, int]
    rows: int
    length: int
    anchors: int
    block: int = 16
    draft_layers: int = 5


SHAPES = {
    "8b": Shape(
        {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
        },
        rows=2,
        length=3072,
        anchors=512,
    ),
    "smollm2": Shape(
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
        },
        rows=16,
        length=384,
        anchors=32,
    ),
    "tiny": Shape(
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
        },
        rows=1,
        length=64,
        anchors=8,
        block=8,
        draft_layers=2,
    ),
}


@dataclass
class RandomBatches:
    """Rows of one document each, from a pool of eight, so that making them costs nothing."""

    shape_: Shape
    slots: int
    steps: int = 100_000
    shape: tuple[int, int, int] = field(init=False)
    pool: list[Batch] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = (self.shape_.rows, self.shape_.length, self.shape_.anchors)
        self.pool = [self._make(i) for i in range(8)]

    def __call__(self, step: int, slot: int) -> Batch:
        return self.pool[(step * self.slots + slot) % len(self.pool)]

    def epoch(self, step: int) -> int:
        return 0

    def _make(self, seed: int) -> Batch:
        s, random = self.shape_, torch.Generator().manual_seed(seed)
        places = torch.rand(s.rows, s.length - 1, generator=random)
        tokens = torch.randint(0, s.target["vocab_size"] - 2, (s.rows, s.length), generator=random)
        return Batch(
            tokens=tokens,
            document=torch.zeros(s.rows, s.length, dtype=torch.int32),
            position=torch.arange(s.length).expand(s.rows, -1).contiguous(),
            supervised=torch.ones(s.rows, s.length, dtype=torch.bool),
            anchors=places.argsort(dim=1)[:, : s.anchors].sort(dim=1).values,
            anchor_valid=torch.ones(s.rows, s.anchors, dtype=torch.bool),
            sample_ids=((seed,),) * s.rows,
        )


class Workload:
    """Everything about one shape. ``job`` builds stages lazily, on the device asked for."""

    def __init__(self, name: str, microbatches: int, **pipeline: Any) -> None:
        self.shape = SHAPES[name]
        self.target_config = Qwen3Config(**self.shape.target, rope_theta=1e6)
        self.drafter_config = DrafterConfig.for_target(
            self.target_config,
            mask_token_id=self.shape.target["vocab_size"] - 1,
            num_layers=self.shape.draft_layers,
            block_size=self.shape.block,
        )
        self.config: TrainConfig = parse_config(
            {
                "target": {"model": name},
                "data": {
                    "files": ["none"],
                    "sequence_length": self.shape.length,
                    "anchors": self.shape.anchors,
                },
                "optimization": {
                    "steps": 1000,
                    "rows": self.shape.rows,
                    "microbatches": microbatches,
                },
                "pipeline": {"executor": "threads", **pipeline},
            },
            source="benchmark",
            base=Path("/"),
        )
        self.batches = RandomBatches(self.shape, microbatches)
        self._head: torch.Tensor | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lock = CompileLock(event=self.event)

    def event(self, event: str, /, **detail: Any) -> None:
        self.events.append((event, detail))

    def counted(self, event: str) -> int:
        return sum(name == event for name, _ in self.events)

    def work(self) -> Work:
        s = self.shape
        return Work(
            target=TargetShape.of(self.target_config),
            drafter=self.drafter_config,
            rows=s.rows,
            length=s.length,
            anchors=s.anchors,
            microbatches=self.batches.slots,
        )

    def job(self) -> Job:
        return Job(
            self.batches,
            self.make_target,
            self.make_drafter,
            self.event,
            self.lock,
            make_sharded=self.make_sharded,
        )

    def make_target(self, device: torch.device) -> TargetStage:
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(
                self.target_config, dtype=compute_dtype("auto", device), attn_implementation="sdpa"
            )
        layers = list(self.drafter_config.target_layer_ids)
        recorded = self.config.pipeline.cuda_graph
        return TappedTarget(freeze(model), layers, device, cuda_graph=recorded)

    def make_drafter(self, device: torch.device) -> DrafterStage:
        return DrafterReplica(**self._stage(device))

    def make_sharded(self, device: torch.device, group: ProcessGroup) -> DrafterStage:
        return ShardedDrafter(**self._stage(device), group=group)

    def _stage(self, device: torch.device) -> dict[str, Any]:
        if self._head is None:
            # From the CPU's generator: the same matrix on every device. Drawn once: at the 8B shape
            # it takes seconds.
            random = torch.Generator().manual_seed(1)
            shape = (self.shape.target["vocab_size"], self.shape.target["hidden_size"])
            self._head = torch.empty(shape).normal_(0, 0.02, generator=random)
        matrix = self._head.to(device, compute_dtype("auto", device))
        return {
            "config": self.config,
            "drafter_config": self.drafter_config,
            "frozen": FrozenTarget(matrix, matrix),
            "steps": 1000,
            "device": device,
            "head_loss": fast_head_loss(device),
            "compile_": self.lock.compile,
            "backward": self.lock.backward,
        }
