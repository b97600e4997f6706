"""Starting a drafter from its target's last layers instead of from noise.

Each drafter layer copies the target layer at the same distance from the end, ``fc`` passes the last
tap through, ``hidden_norm`` is the first copied layer's input norm (so that context keys and values
are nearly those of that layer), and the final norm keeps the target's direction. With 14,000 tokens
of SmolLM2-135M this reached in 300 steps what a random start reached in 500.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.drafter.model import Drafter
from trainer.errors import ConfigError
from trainer.taps import decoder_layers


def copied_names(drafter: Drafter) -> list[str]:
    """Of one layer; the norms on queries and keys only where the target has them."""
    names = [name for name, _ in drafter.layers[0].named_parameters() if "conv" not in name]
    return [name for name in names if not name.endswith(("q_norm.weight", "k_norm.weight"))]


def check_start(drafter: Drafter, model: Any) -> None:
    """Raise ``ConfigError`` unless the target's layers are built like the drafter's. Works on the
    meta device."""
    _, layers = decoder_layers(model)
    theirs = dict(layers[-1].named_parameters())
    optional = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    wanted = {n: tuple(p.shape) for n, p in drafter.layers[0].named_parameters()}
    problems = [
        f"{name} has shape {tuple(theirs[name].shape)} in the target, {wanted[name]} in the drafter"
        for name in copied_names(drafter)
        if name in theirs and tuple(theirs[name].shape) != wanted[name]
    ]
    problems += [
        f"the target's layers have no {n}" for n in copied_names(drafter) if n not in theirs
    ]
    problems += [
        f"the target's layers have {name}, the drafter's none"
        for name in theirs
        if name not in wanted and name not in optional
    ]
    if "gemma" in (model.config.get_text_config().model_type or ""):
        # Its norms multiply by 1 + w.
        problems.append("the target's norms are Gemma's")
    if problems:
        raise ConfigError(
            f"drafter.start is target, but {problems[0]}",
            next_step="leave the drafter's dimensions to the target, or set drafter.start: random",
        )


@torch.no_grad()
def start_from_target(drafter: Drafter, model: Any) -> None:
    """In place. The drafter lies on the CPU; ``check_start`` held."""
    decoder, layers = decoder_layers(model)
    count = len(drafter.layers)
    for mine, theirs in zip(drafter.layers, layers[len(layers) - count :], strict=True):
        source = dict(theirs.named_parameters())
        for name, parameter in mine.named_parameters():
            if name in source and source[name].shape == parameter.shape:
                parameter.copy_(source[name])
    width = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -width:] = torch.eye(width)
    first = dict(layers[len(layers) - count].named_parameters())["input_layernorm.weight"]
    drafter.hidden_norm.weight.copy_(first)
    final = getattr(decoder, "norm", None)
    if final is not None:
        direction = final.weight.detach().float().cpu()
        drafter.norm.weight.mul_(direction / direction.mean())
