"""The pipeline on several GPUs of one machine: threads and processes, speed, equality, failure.

    python benchmarks/trainer/multi_gpu.py                     # all parts, under nine minutes
    python benchmarks/trainer/multi_gpu.py --split 3,5 --only threads,processes
    python benchmarks/trainer/multi_gpu.py --device cpu --shape tiny --small tiny --split 1,1

Parts: copies (P2P against host), gradients (the sum over drafters), threads, processes (the same
split), losses (every executor against one GPU), failure (a stage that raises, a rank that is
killed).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from measure import drafter_alone, report, run_part, save, settle, target_alone, together
from workload import Workload

from trainer.pipeline.board import Board
from trainer.pipeline.device import enter_device
from trainer.pipeline.inline import InlineExecutor
from trainer.pipeline.plan import Plan, make_plan
from trainer.pipeline.processes import ProcessesExecutor
from trainer.pipeline.reduce import GradientSum, fingerprint
from trainer.pipeline.stages import Sums
from trainer.pipeline.threads import ThreadsExecutor

SPLITS = {2: (1, 1), 4: (2, 2), 8: (5, 3)}
GRADIENT = 1_048_600_000
"""Elements of an 8B-shaped drafter's gradient."""


# -- copies and gradients -------------------------------------------------------------------------


def copies(devices: list[str]) -> dict[str, Any]:
    """One feature slot of the 8B shape, 252 MB, from the first device to the last."""
    source = torch.randn(2, 3072, 20_480, device=devices[0]).bfloat16()
    target = torch.empty_like(source, device=devices[-1])
    host = torch.empty_like(source, device="cpu").pin_memory()
    size = source.numel() * 2

    def through_host() -> None:
        host.copy_(source, non_blocking=True)
        torch.cuda.synchronize(devices[0])
        target.copy_(host, non_blocking=True)

    found = {"p2p": torch.cuda.can_device_access_peer(0, len(devices) - 1)}
    for name, copy in (("direct", lambda: target.copy_(source)), ("host", through_host)):
        for i in range(12):
            if i == 2:
                settle(torch.device(devices[-1]))
                began = time.perf_counter()
            copy()
        settle(torch.device(devices[-1]))
        seconds = (time.perf_counter() - began) / 10
        found[f"{name} GB/s"] = size / seconds / 1e9
        found[f"{name} ms"] = seconds * 1e3
    found["equal"] = bool(torch.equal(target.cpu(), source.cpu()))
    return found


def gradients(devices: list[str], elements: int) -> dict[str, Any]:
    """Sum of a bf16 gradient over all devices, a thread each, beside NCCL in one process."""
    parts = [
        torch.full((elements,), float(i + 1), dtype=torch.bfloat16, device=d)
        for i, d in enumerate(devices)
    ]
    board = Board(lambda event, /, **detail: None)
    adder = GradientSum(board, len(devices))
    times: list[float] = []

    def work(party: int) -> None:
        device = torch.device(devices[party])
        enter_device(device, [torch.device(d) for d in devices])
        pulse = board.pulse(f"drafter {party}")
        for i in range(4):
            began = time.perf_counter()
            adder.add(party, device, [parts[party]], torch.ones(4, device=device), pulse)
            settle(device)
            if party == 0 and i:
                times.append(time.perf_counter() - began)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {"ours ms": min(times) * 1e3, "equal": len({fingerprint([p]) for p in parts}) == 1}
    if devices[0] != "cpu":
        for i in range(4):
            if i == 1:
                torch.cuda.synchronize(devices[0])
                began = time.perf_counter()
            torch.cuda.nccl.all_reduce(parts)
        for device in devices:
            torch.cuda.synchronize(device)
        found["nccl in one process ms"] = (time.perf_counter() - began) / 3 * 1e3
    return found


# -- threads --------------------------------------------------------------------------------------


def loaded(options: argparse.Namespace, shape: str, executor: str) -> tuple[Workload, Plan]:
    targets, drafters = options.split
    load = Workload(
        shape,
        2 * drafters,
        executor=executor,
        targets=targets,
        drafters=drafters,
        devices=options.devices[: targets + drafters],
        check_equal_every=5,
        stall_limit_s=300,
    )
    return load, make_plan(load.config.pipeline, load.work())


def run_threads(options: argparse.Namespace) -> dict[str, Any]:
    load, plan = loaded(options, options.shape, "threads")
    print(plan.table(), flush=True)
    executor = ThreadsExecutor(load.job(), plan)
    began = time.perf_counter()
    executor.start()
    start_s = time.perf_counter() - began
    target_s = target_alone(executor, 8)
    drafter_s, update_s = drafter_alone(executor, 8)
    devices = [d.device for d in executor.drafters]
    found = together(executor, options.steps, devices)
    gil = gil_share(executor, options.steps + 3)
    executor.close()
    slots, share = load.batches.slots, load.batches.slots // len(plan.drafters)
    floor = max(slots * target_s / len(plan.targets), share * drafter_s + update_s)
    stats = load.lock.stats()
    return {
        "split": f"{len(plan.targets)}+{len(plan.drafters)}",
        "start_s": start_s,
        "target_ms": target_s * 1e3,
        "drafter_ms": drafter_s * 1e3,
        "update_ms": update_s * 1e3,
        "floor_ms": floor * 1e3,
        "step_ms": found["step_s"] * 1e3,
        "efficiency": floor / found["step_s"],
        "tokens_per_s": found["tokens_per_s"],
        "target_idle": found.get("target_idle"),
        "drafter_idle": found.get("drafter_idle"),
        "transfer_s": found.get("transfer_s"),
        "recompiles": stats.recompiles,
        "eager": stats.eager_runs,
        "lock waits": stats.waits,
        "wait_s": stats.wait_s,
        "health": load.lock.health().problems(),
        "gil": gil,
    }


def gil_share(executor: ThreadsExecutor, first: int) -> Any:
    """Share of samples in which some thread holds the GIL, by py-spy where it is installed."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path="/tmp/site/bin")
    if program is None:
        return "py-spy is not installed"
    with tempfile.NamedTemporaryFile() as file:
        command = [program, "record", "--pid", str(os.getpid()), "--duration", "4", "--rate", "200"]
        command += ["--gil", "--format", "raw", "--output", file.name]
        watcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        index = first
        while watcher.poll() is None:
            executor.step(index)
            index += 1
        counts = [int(line.rsplit(" ", 1)[1]) for line in Path(file.name).read_text().splitlines()]
        if not counts:
            return (watcher.stdout.read() if watcher.stdout else b"").decode()[-200:]
    return round(sum(counts) / 800, 3)


# -- processes ------------------------------------------------------------------------------------


def run_rank(options: argparse.Namespace) -> dict[str, Any]:
    """One rank under torchrun."""
    load, plan = loaded(options, options.shape, "processes")
    executor = ProcessesExecutor(load.job(), plan)
    began = time.perf_counter()
    executor.start()
    start_s = time.perf_counter() - began
    executor.step = _agreeing(executor, options)  # type: ignore[method-assign]
    found = together(executor, options.steps, [executor.device])
    executor.close()
    stats = load.lock.stats()
    if not executor.place.leads:
        return {}
    return {
        "start_s": start_s,
        "step_ms": found["step_s"] * 1e3,
        "tokens_per_s": found["tokens_per_s"],
        "target_idle": found.get("target_idle"),
        "drafter_idle": found.get("drafter_idle"),
        "recompiles": stats.recompiles,
        "eager": stats.eager_runs,
        "losses": found["losses"],
    }


def _agreeing(executor: ProcessesExecutor, options: argparse.Namespace) -> Any:
    step = executor.step

    def stepping(index: int) -> Any:
        if executor.place.rank == options.kill_rank and index == 3:
            print(f"KILLED {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        result = step(index)
        executor.agreed_stop(None)
        return result

    return stepping


def torchrun(options: argparse.Namespace, shape: str, limit: float, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(sum(options.split)), *me(options, "rank")[1:]]
    return run_part([*command, "--shape", shape, *more], limit, OMP_NUM_THREADS="1")


# -- losses ---------------------------------------------------------------------------------------


def run_losses(options: argparse.Namespace) -> dict[str, Any]:
    """The same steps by one GPU, by 1 + 1, and by one target and a drafter on every device."""
    names, steps = options.devices, 6
    found: dict[str, list[float]] = {}
    load = Workload(options.small, 4, executor="inline")
    inline = InlineExecutor(load.job(), torch.device(names[0]))
    inline.start()
    found["one device"] = [Sums.read(inline.step(i).sums).mean_loss for i in range(steps)]
    inline.close()
    drafters = next(m for m in (4, 2, 1) if m <= len(names))
    for title, devices, count in (
        ("1 + 1", [names[0], names[-1]], 1),
        (f"1 + {drafters}", [names[0], *names[:drafters]], drafters),
    ):
        load = Workload(
            options.small, 4, targets=1, drafters=count, devices=devices, check_equal_every=1
        )
        executor = ThreadsExecutor(load.job(), make_plan(load.config.pipeline, load.work()))
        executor.start()
        found[title] = [Sums.read(executor.step(i).sums).mean_loss for i in range(steps)]
        executor.close()
        if load.lock.stats().recompiles or load.lock.stats().eager_runs:
            found[f"{title}: compiles after warm-up"] = [load.lock.stats().recompiles]
    return {**found, "largest difference": differences(found)}


def differences(found: dict[str, list[float]]) -> dict[str, float]:
    """Relative, from the first list."""
    (_, first), *others = [(k, v) for k, v in found.items() if len(v) > 1]
    return {
        name: max(abs(a - b) / abs(a) for a, b in zip(first, values, strict=False))
        for name, values in others
    }


# -- failure --------------------------------------------------------------------------------------


class Broken(RuntimeError):
    pass


def run_failure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from a stage's error in step 4 to the error in the main thread and to the end."""
    load, plan = loaded(options, options.small, "threads")
    executor = ThreadsExecutor(load.job(), plan)
    executor.start()
    stage = executor.drafters[-1].stage
    accumulate, calls, raised = stage.accumulate, [0], [0.0]

    def broken(batch: Any, features: Any) -> Any:
        calls[0] += 1
        if calls[0] == 7:
            raised[0] = time.perf_counter()
            raise Broken("on purpose")
        return accumulate(batch, features)

    stage.accumulate = broken  # type: ignore[method-assign]
    try:
        for index in range(20):
            executor.step(index)
    except Broken as error:
        seen = time.perf_counter()
        executor.close()
        ended = time.perf_counter()
        failed = [d["stage"] for e, d in load.events if e == "failed"]
        return {
            "error": None,
            "first cause": f"{failed[0]}: {error}",
            "to the main thread ms": (seen - raised[0]) * 1e3,
            "to the end of all threads ms": (ended - raised[0]) * 1e3,
        }
    return {"first cause": "none: it went on"}


def killed_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from SIGKILL of a target rank to the end of torchrun, and what was said."""
    found = torchrun(options, options.small, 90, "--kill-rank", "0", "--steps", "20")
    text = str(found.pop("error", ""))
    times = [float(line.split()[1]) for line in text.splitlines() if line.startswith("KILLED ")]
    said = [line for line in text.splitlines() if "Signal 9" in line or "failed first" in line]
    return {
        "code": found["code"],
        "seconds to the end": found["ended"] - times[0] if times else None,
        "said": said[-1].strip() if said else text[-400:],
    }


# -- all ------------------------------------------------------------------------------------------


def main() -> None:
    options = parse()
    if options.part:
        found = run_here(options)
        if found:
            report(found)
        return
    parts = ["copies", "gradients", "threads", "processes", "losses", "failure"]
    only = options.only.split(",") if options.only else parts
    results: dict[str, Any] = {"devices": options.devices}
    for name in only:
        began = time.perf_counter()
        if name == "processes":
            results[name] = torchrun(options, options.shape, 170, "--steps", str(options.steps))
            results["processes, small"] = torchrun(options, options.small, 100, "--steps", "20")
        else:
            results[name] = run_part(me(options, name), 170)
        if name == "failure":
            results["killed rank"] = killed_rank(options)
        print(f"[{time.perf_counter() - began:.0f} s] {name}: {results[name]}", flush=True)
    save("multi_gpu.json", results)
    print_results(results)


def run_here(options: argparse.Namespace) -> dict[str, Any]:
    if options.part == "copies":
        return copies(options.devices) if options.device != "cpu" else {"p2p": None}
    if options.part == "gradients":
        return gradients(options.devices, GRADIENT if options.device != "cpu" else 1 << 16)
    parts = {
        "threads": run_threads,
        "rank": run_rank,
        "losses": run_losses,
        "failure": run_failure,
    }
    return parts[options.part](options)


def print_results(results: dict[str, Any]) -> None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\ntorch {torch.__version__}; {len(results['devices'])} x {name}")
    for part, found in results.items():
        if not isinstance(found, dict):
            continue
        if found.get("error"):
            print(f"{part} | no result: {found['error'][-1500:]}")
            continue
        for key, value in found.items():
            shown = round(value, 4) if isinstance(value, float) else value
            print(f"{part} | {key} | {shown}")


def me(options: argparse.Namespace, part: str) -> list[str]:
    return [
        sys.executable,
        str(Path(__file__).resolve()),
        *("--part", part, "--split", ",".join(map(str, options.split))),
        *("--shape", options.shape, "--small", options.small),
        *("--device", options.device, "--steps", str(options.steps)),
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="parts, with commas")
    parser.add_argument("--split", help="targets,drafters (by the number of GPUs)")
    parser.add_argument("--shape", default="8b", help="of threads and processes")
    parser.add_argument("--small", default="smollm2", help="of losses and failure")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--kill-rank", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    count = torch.cuda.device_count() if options.device == "cuda" else 2
    options.devices = [f"cuda:{i}" if options.device == "cuda" else "cpu" for i in range(count)]
    if options.split:
        targets, drafters = options.split.split(",")
        options.split = int(targets), int(drafters)
    else:
        options.split = SPLITS.get(count, (max(1, count // 2), max(1, count - count // 2)))
    return options


if __name__ == "__main__":
    main()
