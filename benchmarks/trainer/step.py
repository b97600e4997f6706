"""One training step at the shape of a drafter for Qwen3-8B, beside SpecForge's.

    python benchmarks/trainer/step.py                      # all, each in a process of its own
    python benchmarks/trainer/step.py --only ours --profile

A step is forward, backward, gradient clipping and optimizer. Both implementations get the same
weights, features, tokens and anchors, so their losses can be compared. Needs one GPU of 80 GB;
``specforge==0.2.0`` must be importable for its half (installed without its dependencies: only its
model, its loss and its optimizer are used).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from plain_loop import published_drafter, training_model

from trainer.config import OptimizationConfig
from trainer.data.batch import Batch
from trainer.drafter.config import FULL, DrafterConfig
from trainer.drafter.mask import masks_for
from trainer.drafter.model import Drafter
from trainer.head_loss import Precision, fast_head_loss
from trainer.objective import DrafterLoss, FrozenTarget, ObjectiveConfig, sample_anchors
from trainer.optimize import MasterAdamW
from trainer.pipeline.stages import Sums

ROWS, LENGTH, BLOCKS, WARM_UP, STEPS = 2, 3072, 512, 6, 12
RATE, CLIP, BETA2, SCHEDULE = 6e-4, 1.0, 0.999, 10_000
"""BETA2 is SpecForge's; its cosine over 10,000 steps is flat within those measured."""
CONFIG = DrafterConfig(
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    max_position_embeddings=40_960,
    block_size=16,
    mask_token_id=151_669,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
    target_hidden_size=4096,
    layer_types=(FULL,) * 5,
)


def useful_flops() -> float:
    """Of one step: forward, and twice that for backward except in the frozen head (once)."""
    c, slots = CONFIG, BLOCKS * CONFIG.block_size
    inner = c.num_heads * c.head_dim
    layer = (
        3 * slots * c.hidden_size * c.intermediate_size
        + 2 * slots * c.hidden_size * inner
        + 2 * (slots + LENGTH) * c.hidden_size * c.num_kv_heads * c.head_dim
        # A slot sees half the context on average, and its block.
        + 2 * slots * (LENGTH / 2 + c.block_size) * inner
    )
    body = c.num_layers * layer + LENGTH * c.feature_size * c.hidden_size
    head = slots * c.hidden_size * c.vocab_size
    return ROWS * 2 * (3 * body + 2 * head)


@dataclass(frozen=True)
class Inputs:
    """Equal in every process: all drawn from seeds."""

    batch: Batch
    features: Tensor
    frozen: FrozenTarget
    weights: dict[str, Tensor]


def make_inputs(device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        draw = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return draw.normal_(0.0, deviation, generator=generator)

    supervised = np.ones(LENGTH, dtype=bool)
    anchors = [
        sample_anchors(supervised, BLOCKS, seed=0, epoch=0, sample_id=row) for row in range(ROWS)
    ]
    host = torch.Generator().manual_seed(2)
    batch = Batch(
        tokens=torch.randint(0, 151_000, (ROWS, LENGTH), generator=host),
        document=torch.zeros(ROWS, LENGTH, dtype=torch.int32),
        position=torch.arange(LENGTH).expand(ROWS, -1).contiguous(),
        supervised=torch.ones(ROWS, LENGTH, dtype=torch.bool),
        anchors=torch.from_numpy(np.stack(anchors)),
        anchor_valid=torch.ones(ROWS, BLOCKS, dtype=torch.bool),
        sample_ids=tuple((row,) for row in range(ROWS)),
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Drafter(CONFIG).named_parameters()}
    weights = {
        name: normal(*shape, deviation=0.02)
        if len(shape) == 2
        else torch.ones(shape, dtype=torch.bfloat16, device=device)
        for name, shape in shapes.items()
    }
    frozen = FrozenTarget(
        embedding=normal(CONFIG.vocab_size, CONFIG.hidden_size, deviation=0.02),
        head=normal(CONFIG.vocab_size, CONFIG.hidden_size, deviation=0.02),
    )
    batch = batch.pin_memory()
    return Inputs(batch, normal(ROWS, LENGTH, CONFIG.feature_size), frozen, weights)


def compiled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


# -- ours -----------------------------------------------------------------------------------------


class Ours:
    """The trainer's own parts, as its drafter stage puts them together."""

    def __init__(
        self, inputs: Inputs, precision: Precision = "bf16", fp8_mlp: bool = False
    ) -> None:
        device = inputs.features.device
        with device:
            drafter = Drafter(CONFIG)
        drafter.load_state_dict(inputs.weights)
        if fp8_mlp:
            drafter.use_fp8()
        recipe = OptimizationConfig(
            steps=SCHEDULE, learning_rate=RATE, warmup=0.0, beta2=BETA2, clip=CLIP
        )
        self.optimizer = MasterAdamW(drafter, recipe, SCHEDULE, torch.bfloat16)
        self.loss = DrafterLoss(
            drafter,
            inputs.frozen,
            ObjectiveConfig(),
            masks_for(CONFIG, device, compiled),
            forward=compiled(drafter.forward, "drafter"),
            head_loss=fast_head_loss(device, inputs.frozen.head, precision),
        )
        self.inputs = inputs
        self.steps = 0

    def forward(self) -> Tensor:
        self.found = self.loss(self.inputs.batch, self.inputs.features)
        return self.found.loss

    def value(self, loss: Tensor) -> Tensor:
        return loss.detach() / self.found.weight

    def optimize(self) -> None:
        self.optimizer.step(self.steps, Sums.vector(self.found))
        self.steps += 1


# -- SpecForge ------------------------------------------------------------------------------------


class SpecForge:
    def __init__(self, inputs: Inputs) -> None:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.optimizer import BF16Optimizer

        device = inputs.features.device
        anchors = inputs.batch.anchors.to(device)
        keep = torch.ones_like(anchors, dtype=torch.bool)

        class FixedAnchors(OnlineDFlashModel):
            """The same draws, and then our anchors instead, so that the losses can be compared."""

            def _sample_anchor_positions(
                self, seq_len: int, loss_mask: Tensor, device: torch.device
            ) -> tuple[Tensor, Tensor]:
                super()._sample_anchor_positions(seq_len, loss_mask, device)
                return anchors, keep

        model = published_drafter(CONFIG, device)
        model.load_state_dict(inputs.weights)
        self.model = training_model(FixedAnchors, model, inputs.frozen, CONFIG, BLOCKS)
        self.optimizer = BF16Optimizer(
            model, lr=RATE, max_grad_norm=CLIP, total_steps=SCHEDULE, warmup_ratio=0.0
        )
        self.tokens = inputs.batch.tokens.to(device)
        self.mask = torch.ones(ROWS, LENGTH, device=device)
        self.features = inputs.features

    def forward(self) -> Tensor:
        loss: Tensor = self.model(self.tokens, self.features, self.mask)[0]
        return loss

    def value(self, loss: Tensor) -> Tensor:
        return loss.detach()

    def optimize(self) -> None:
        self.optimizer.step()


# -- measuring ------------------------------------------------------------------------------------


IMPLEMENTATIONS: dict[str, Callable[[Inputs], Any]] = {
    "ours": Ours,
    "ours, fp8 head": partial(Ours, precision="fp8"),
    "ours, fp8 head and MLP": partial(Ours, precision="fp8", fp8_mlp=True),
    "specforge": SpecForge,
}


@dataclass(frozen=True)
class Result:
    name: str
    step_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    useful_tflops: float
    peak_gb: float
    losses: list[float]
    """Of the first steps, the warm-up's included."""


def measure(name: str, profile: bool) -> Result:
    torch.manual_seed(0)
    device = torch.device("cuda")
    trainer = IMPLEMENTATIONS[name](make_inputs(device))
    losses: list[Tensor] = []
    marks: list[list[Any]] = []

    def step() -> None:
        at = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        at[0].record()
        loss = trainer.forward()
        at[1].record()
        loss.backward()
        at[2].record()
        losses.append(trainer.value(loss))
        trainer.optimize()
        at[3].record()
        marks.append(at)

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks.clear()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    phases = [statistics.median(m[i].elapsed_time(m[i + 1]) for m in marks) for i in range(3)]
    # From the start of one step to the start of the next: nothing between them is left out.
    starts = [m[0] for m in marks] + [marks[-1][3]]
    whole = statistics.median(a.elapsed_time(b) for a, b in pairwise(starts))
    result = Result(
        name=name,
        step_ms=whole,
        forward_ms=phases[0],
        backward_ms=phases[1],
        optimizer_ms=phases[2],
        useful_tflops=useful_flops() / whole / 1e9,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9,
        losses=[float(x) for x in losses[:8]],
    )
    if profile:
        print_profile(step)
    return result


def print_profile(step: Callable[[], None], rounds: int = 3, lines: int = 40) -> None:
    """Device time by kernel, in ms a step."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(rounds):
            step()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda r: -r.self_device_time_total)
    total = sum(r.self_device_time_total for r in rows) / 1e3 / rounds
    print(f"device time {total:.1f} ms a step")
    for row in rows[:lines]:
        spent = row.self_device_time_total / 1e3 / rounds
        print(f"{spent:8.2f} ms {row.count / rounds:6.0f} ×  {row.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(IMPLEMENTATIONS), nargs="+")
    parser.add_argument("--profile", action="store_true", help="list the kernels of our step")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        result = measure(options.child, options.profile)
        print("RESULT " + json.dumps(asdict(result)), flush=True)
        return
    results = []
    for name in options.only or IMPLEMENTATIONS:
        command = [sys.executable, __file__, "--child", name]
        if options.profile and name == "ours":
            command.append("--profile")
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        plain = [line for line in done.stdout.splitlines() if not line.startswith("RESULT ")]
        print("\n".join(plain))
        results += [
            json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")
        ]
        if done.returncode:
            print(f"{name}: exit {done.returncode}")
    print_table(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def print_table(results: list[dict[str, Any]]) -> None:
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {STEPS}")
    print(
        "                          step   forward  backward  optimizer   TFLOP/s   peak GB  losses"
    )
    for r in results:
        shown = " ".join(f"{x:.4f}" for x in r["losses"])
        print(
            f"{r['name']:22} {r['step_ms']:7.1f} {r['forward_ms']:9.1f} {r['backward_ms']:9.1f}"
            f" {r['optimizer_ms']:10.1f} {r['useful_tflops']:9.1f} {r['peak_gb']:9.1f}  {shown}"
        )
    by_name = {r["name"]: r for r in results}
    other = by_name.get("specforge")
    for r in results:
        if other is not None and r is not other:
            apart = abs(r["losses"][0] / other["losses"][0] - 1)
            print(
                f"{r['name']}: {other['step_ms'] / r['step_ms']:.3f} × as fast as SpecForge;"
                f" first losses apart by {apart:.1e} of their value"
            )


if __name__ == "__main__":
    main()
