"""What a run needs, by arithmetic: before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from trainer.drafter.model import Drafter
from trainer.head_loss import CHUNK_ROWS
from trainer.resolve import Resolved
from trainer.target import compute_dtype

GB = 1e9


@dataclass(frozen=True)
class Part:
    """One consumer of device memory."""

    name: str
    bytes: int


def parameters(resolved: Resolved) -> tuple[int, int]:
    """(target, drafter): counted on the meta device, nothing is allocated."""
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(resolved.target)
        drafter = Drafter(resolved.drafter)
    return (
        sum(p.numel() for p in target.parameters()),
        sum(p.numel() for p in drafter.parameters()),
    )


def target_parts(resolved: Resolved, device: torch.device, count: int) -> list[Part]:
    """Of a target worker."""
    config = resolved.config
    size = compute_dtype(config.target.dtype, device).itemsize
    rows = config.optimization.rows * config.data.sequence_length
    width = resolved.drafter.target_hidden_size
    # Residual, normed, q/k/v/o and both MLP halves of the layer at work.
    kept = 8 * width + 3 * resolved.drafter.intermediate_size
    return [
        Part("target weights", count * size),
        Part("one batch of features", rows * resolved.drafter.feature_size * size),
        Part("target activations", rows * kept * size),
    ]


def drafter_parts(resolved: Resolved, device: torch.device, count: int) -> list[Part]:
    """Of a drafter worker."""
    config, drafter = resolved.config, resolved.drafter
    size = compute_dtype(config.optimization.dtype, device).itemsize
    masters = 0 if size == 4 else 4
    slots = config.optimization.rows * config.data.anchors * drafter.block_size
    context = config.optimization.rows * config.data.sequence_length
    heads = (drafter.num_heads + 2 * drafter.num_kv_heads) * drafter.head_dim
    kept = 6 * drafter.hidden_size + 2 * heads + 4 * drafter.intermediate_size
    chunk = min(CHUNK_ROWS, slots)
    parts = [
        Part("drafter weights and gradients", count * 2 * size),
        Part("fp32 masters and AdamW's moments", count * (8 + masters)),
        Part("frozen embedding and head", 2 * drafter.vocab_size * drafter.hidden_size * size),
        Part("activations kept for backward", slots * drafter.num_layers * kept * size),
        Part("logits of one chunk", chunk * drafter.vocab_size * (size + 4)),
        Part(
            "feature slots",
            (config.pipeline.queue_depth + 1) * context * drafter.feature_size * size,
        ),
    ]
    if device.type == "cpu":
        keys = config.data.sequence_length + config.data.anchors * drafter.block_size
        parts.append(Part("dense mask and scores", slots * keys * (1 + 8 * drafter.num_heads)))
    return parts


def total(parts: list[Part]) -> int:
    return sum(part.bytes for part in parts)


def available(device: torch.device) -> int:
    """Bytes free now on a GPU; on a CPU what the machine and this process's cgroup allow."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ]
    texts = [path.read_text(encoding="ascii").strip() for path in limits if path.is_file()]
    return min([_available_memory(), *(int(text) for text in texts if text.isdigit())])


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
