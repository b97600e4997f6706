"""Timing of an executor's stages, alone and together, and the running of parts in processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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


# -- figures told the moment they are known -------------------------------------------------------

FIGURE = "FIGURE "


def figure(name: str, value: Any) -> None:
    """In a part's process: one result, for whoever started it (``watch_part``)."""
    print(FIGURE + json.dumps({"name": name, "value": value}), flush=True)


@dataclass(frozen=True)
class Ended:
    """How a part's process ended."""

    code: int
    wall_s: float
    at: float
    """``time.time`` of the end."""
    lines: list[str]
    """The last of what it said, figures left out."""
    over: bool
    """Ended at its limit."""


def watch_part(
    command: list[str], limit_s: float, tell: Callable[[str, Any], None], **environment: str
) -> Ended:
    """Run a part in a process group of its own; ``tell(name, value)`` for each of its figures as it
    comes. A part past its limit is ended whole; its figures so far stand."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        start_new_session=True,
    )
    lines: deque[str] = deque(maxlen=400)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            # Ranks share one pipe: a figure may follow another rank's unfinished line.
            before, found, text = line.rstrip("\n").partition(FIGURE)
            if found:
                item, _ = json.JSONDecoder().raw_decode(text)
                tell(item["name"], item["value"])
            if before or not found:
                lines.append(before)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    over = False
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        over = True
    at = time.time()
    # Whatever the end: no rank may stay behind on the device.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(timeout=10)
    wall = round(time.perf_counter() - began, 1)
    return Ended(process.returncode, wall, at, list(lines), over)


class Figures:
    """Every figure printed and written as a JSON line at once: a run that is cut loses none."""

    def __init__(self, file: str) -> None:
        """``file`` in the folder ``BENCHMARK_OUT``, if that is set; appended to."""
        folder = os.environ.get("BENCHMARK_OUT")
        self._path = Path(folder) / file if folder else None
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def tell(self, part: str, name: str, value: Any) -> None:
        shown = round(value, 4) if isinstance(value, float) else value
        record = {"part": part, "name": name, "value": shown, "s": round(self.spent_s(), 1)}
        line = json.dumps(record)
        with self._lock:
            print(line, flush=True)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as stream:
                    stream.write(line + "\n")

    def spent_s(self) -> float:
        return time.monotonic() - self._began
