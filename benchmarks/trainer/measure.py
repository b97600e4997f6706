"""Timing of an executor's stages, alone and together, and the running of parts in processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from trainer.pipeline.stages import Sums
from trainer.pipeline.threads import ThreadsExecutor
from trainer.pipeline.workers import DrafterWorker, TargetWorker


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def target_alone(executor: ThreadsExecutor, repeats: int) -> float:
    """Seconds a microbatch of the first target, in its own thread, nothing else running."""
    worker = executor.targets[0]

    def run(worker: TargetWorker = worker) -> float:
        rows, length, _ = executor.job.batches.shape
        out = torch.empty(
            (rows, length, worker.stage.feature_width),
            dtype=worker.stage.dtype,
            device=worker.device,
        )
        for i in range(repeats + 2):
            if i == 2:
                settle(worker.device)
                began = time.perf_counter()
            worker.stage.features(executor.job.batches(0, i), out)
        settle(worker.device)
        return (time.perf_counter() - began) / repeats

    return worker.post(run).get()


def drafter_alone(executor: ThreadsExecutor, repeats: int) -> tuple[float, float]:
    """(seconds a microbatch, seconds an update) of the first drafter, features at hand. Its weights
    stay as they are: the update is of zero gradients."""
    worker = executor.drafters[0]
    features = worker.ring.claim(0, worker.pulse)

    def run(worker: DrafterWorker = worker) -> tuple[float, float]:
        features.normal_()
        for i in range(repeats + 2):
            if i == 2:
                settle(worker.device)
                began = time.perf_counter()
            sums = worker.stage.accumulate(executor.job.batches(0, i), features)
        settle(worker.device)
        each = (time.perf_counter() - began) / repeats
        worker.stage.discard()
        worker.stage.update(0, sums)
        settle(worker.device)
        began = time.perf_counter()
        for _ in range(4):
            worker.stage.update(0, sums)
        settle(worker.device)
        return each, (time.perf_counter() - began) / 4

    return worker.post(run).get()


def together(
    executor: Any, steps: int, devices: list[torch.device], warm: int = 3
) -> dict[str, Any]:
    """Steps of an executor from a running start: seconds a step, losses, the last telemetry."""
    losses = []
    result = None
    tokens = 0
    for index in range(warm + steps):
        if index == warm:
            for device in devices:
                settle(device)
            began = time.perf_counter()
        result = executor.step(index)
        losses.append(result.sums)
        tokens = result.tokens
    for device in devices:
        settle(device)
    seconds = (time.perf_counter() - began) / steps
    assert result is not None
    return {
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "losses": [Sums.read(s).mean_loss for s in losses],
        **result.telemetry,
    }


def run_part(command: list[str], limit_s: float, **environment: str) -> dict[str, Any]:
    """A part in a process group of its own; its last ``RESULT {json}`` line, or why there is none.

    A part that deadlocks is a result here: the whole group is ended at the limit."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nended after {limit_s} s"
    lines = output.splitlines()
    found = [line[7:] for line in lines if line.startswith("RESULT ")]
    known = {"code": process.returncode, "wall_s": round(time.perf_counter() - began, 1)}
    if not found:
        return {"error": "\n".join(lines[-60:]), "ended": time.time(), **known}
    return {**json.loads(found[-1]), **known}


def report(result: dict[str, Any]) -> None:
    """The line that ``run_part`` looks for."""
    print("RESULT " + json.dumps(result), flush=True)


def save(name: str, results: dict[str, Any]) -> None:
    """Into the folder ``BENCHMARK_OUT`` where it is set."""
    folder = os.environ.get("BENCHMARK_OUT")
    if folder:
        (Path(folder) / name).write_text(json.dumps(results, indent=1), encoding="utf-8")
