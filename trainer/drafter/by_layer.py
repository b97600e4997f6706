"""A drafter compiled in parts, for what has to happen between its layers.

Autograd gets the gradients of one compiled call all at once, at its end: with the whole drafter as
one call, nothing would be left of the backward pass to sum the gradients beside (``buckets.py``).
FSDP2 gathers and frees weights between layers, in hooks that no compiled call may hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.drafter.model import Drafter


def compile_parts(drafter: Drafter, compile_: Callable[..., Any]) -> None:
    """In place: one call for the context, one a layer, one for the final norm; what little lies
    between them stays Python. ``compile_`` is ``CompileLock.compile``: each call gets a code object
    of its own."""
    drafter.context = compile_(drafter.context, "context")  # type: ignore[method-assign]
    for i, layer in enumerate(drafter.layers):
        layer.forward = compile_(layer.forward, f"layer_{i}")
    drafter.norm.forward = compile_(drafter.norm.forward, "norm")  # type: ignore[method-assign]
