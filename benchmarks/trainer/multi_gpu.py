"""The pipeline on several GPUs of one machine: threads and processes, speed, equality, failure.

    python benchmarks/trainer/multi_gpu.py                     # ten parts, under nine minutes
    python benchmarks/trainer/multi_gpu.py --split 3,5 --parts warm,threads,processes
    python benchmarks/trainer/multi_gpu.py --device cpu --shape tiny --small tiny --split 1,1

Parts, in this order: warm (a process a shape compiles everything once into a cache that all later
parts share), threads, processes (the same split), small and small threads (the small shape), losses
(every executor against one GPU, then a stage that raises), killed (a rank), real (SmolLM2 itself on
data it writes, in threads until killed, then as processes), copies (P2P against host), gradients
(the sum over drafters). Only by name: overlap and overlap ranks (that sum beside backward, in
threads and in processes), sharded (a drafter held together by all devices, beside one whole on
each).
Parts in several calls share what was compiled with ``--cache FOLDER``.

Each figure is printed when it is known and, with ``BENCHMARK_OUT``, appended to ``multi_gpu.jsonl``
there. A part is ended at its own limit, and all of them at ``--seconds``; what was told stands.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from between_devices import GRADIENT, copies, gradients
from measure import (
    Ended,
    Figures,
    drafter_alone,
    figure,
    target_alone,
    together,
    watch_part,
)
from overlap import run_overlap, run_overlap_rank
from real_run import TARGET, run_real
from sharded import run_sharded_rank
from workload import Workload

from trainer.pipeline.inline import InlineExecutor
from trainer.pipeline.plan import Plan, make_plan
from trainer.pipeline.processes import ProcessesExecutor
from trainer.pipeline.stages import Sums
from trainer.pipeline.threads import ThreadsExecutor

LIMITS = {
    "warm": 170,
    "threads": 90,
    "processes": 90,
    "small": 45,
    "small threads": 60,
    "losses": 100,
    "killed": 40,
    "real": 200,
    "copies": 30,
    "gradients": 30,
    "overlap": 180,
    "overlap ranks": 110,
    "sharded": 120,
}
"""Seconds of each part. What one leaves over is the others'."""
BY_NAME = ("overlap", "overlap ranks", "sharded")
"""Parts that do not fit into the nine minutes of the others."""

WARM = 3
"""Steps before the timed ones."""
SPLITS = {2: (1, 1), 4: (2, 2), 8: (5, 3)}


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
        # Bound by launches otherwise (0.60 of the slower stage in threads, 2026-11-29).
        cuda_graph=shape == "smollm2",
    )
    return load, make_plan(load.config.pipeline, load.work())


def run_warm(options: argparse.Namespace) -> None:
    """Compile what the later parts run, on the devices they run it on, into the shared cache: the
    shapes beside each other, for compiling is the work of one core."""
    shapes = dict.fromkeys((options.shape, options.small))
    commands = [[*me(options, "warm shape"), "--shape", shape] for shape in shapes]
    started = [subprocess.Popen(command) for command in commands]
    if any([process.wait() for process in started]):
        raise SystemExit("a shape was not compiled")


def run_warm_shape(options: argparse.Namespace) -> None:
    shape = options.shape
    load, plan = loaded(options, shape, "threads")
    executor = ThreadsExecutor(load.job(), plan)
    began = time.perf_counter()
    executor.start()
    figure(f"{shape}: start, empty cache, s", time.perf_counter() - began)
    executor.step(0)
    figure(f"{shape}: until the first step, s", time.perf_counter() - began)
    executor.close()


def run_threads(options: argparse.Namespace) -> None:
    load, plan = loaded(options, options.shape, "threads")
    print(plan.table(), flush=True)
    figure("split", f"{len(plan.targets)}+{len(plan.drafters)}")
    executor = ThreadsExecutor(load.job(), plan)
    began = time.perf_counter()
    executor.start()
    figure("start_s", time.perf_counter() - began)
    target_s = target_alone(executor, 8)
    figure("target_ms", target_s * 1e3)
    drafter_s, update_s = drafter_alone(executor, 8)
    figure("drafter_ms", drafter_s * 1e3)
    figure("update_ms", update_s * 1e3)
    slots, share = load.batches.slots, load.batches.slots // len(plan.drafters)
    floor = max(slots * target_s / len(plan.targets), share * drafter_s + update_s)
    figure("floor_ms", floor * 1e3)
    found = together(executor, options.steps, [d.device for d in executor.drafters])
    tell_speed(found)
    figure("efficiency", floor / found["step_s"])
    figure("transfer_s", found.get("transfer_s"))
    tell_lock(load)
    figure("wait_s", load.lock.stats().wait_s)
    figure("health", load.lock.health().problems())
    figure("gil", gil_share(executor, options.steps + 3))
    executor.close()


def tell_speed(found: dict[str, Any]) -> None:
    figure("step_ms", found["step_s"] * 1e3)
    for name in ("tokens_per_s", "target_idle", "drafter_idle"):
        figure(name, found.get(name))


def tell_lock(load: Workload) -> None:
    stats = load.lock.stats()
    figure("recompiles", stats.recompiles)
    figure("eager", stats.eager_runs)
    figure("lock waits", stats.waits)


def gil_share(executor: ThreadsExecutor, first: int) -> Any:
    """Share of samples in which some thread holds the GIL, by py-spy where it is installed."""
    beside = Path(sys.executable).parent
    program = shutil.which("py-spy") or shutil.which("py-spy", path=f"{beside}:/tmp/site/bin")
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


def run_rank(options: argparse.Namespace) -> None:
    """One rank under torchrun; the leading one tells."""
    load, plan = loaded(options, options.shape, "processes")
    # A drafter receives ahead as far as there are steps, and a device with a receive that nobody
    # sends never settles.
    load.batches.steps = WARM + options.steps
    executor = ProcessesExecutor(load.job(), plan)
    leads = executor.place.leads
    began = time.perf_counter()
    executor.start()
    if leads:
        figure("start_s", time.perf_counter() - began)
    executor.step = _agreeing(executor, options)  # type: ignore[method-assign]
    found = together(executor, options.steps, [executor.device], WARM)
    if leads:
        tell_speed(found)
        tell_lock(load)
        figure("losses", found["losses"])
    executor.close()


def _agreeing(executor: ProcessesExecutor, options: argparse.Namespace) -> Any:
    step = executor.step

    def stepping(index: int) -> Any:
        if executor.place.rank == options.kill_rank and index == 3:
            figure("killed at", time.time())
            os.kill(os.getpid(), signal.SIGKILL)
        result = step(index)
        executor.agreed_stop(None)
        return result

    return stepping


# -- losses ---------------------------------------------------------------------------------------


def run_losses(options: argparse.Namespace) -> None:
    """The same steps by one GPU, by 1 + 1, and by one target and a drafter on every device."""
    names, steps = options.devices, 6
    found: dict[str, list[float]] = {}
    load = Workload(options.small, 4, executor="inline")
    inline = InlineExecutor(load.job(), torch.device(names[0]))
    inline.start()
    found["one device"] = [Sums.read(inline.step(i).sums).mean_loss for i in range(steps)]
    figure("one device", found["one device"])
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
        figure(title, found[title])
        stats = load.lock.stats()
        figure(f"{title}: compiles, eager runs after warm-up", [stats.recompiles, stats.eager_runs])
        figure("largest difference", differences(found))
    tell_failure(options)


def differences(found: dict[str, list[float]]) -> dict[str, float]:
    """Relative, from the first list."""
    (_, first), *others = found.items()
    return {
        name: max(abs(a - b) / abs(a) for a, b in zip(first, values, strict=False))
        for name, values in others
    }


# -- failure --------------------------------------------------------------------------------------


class Broken(RuntimeError):
    pass


def tell_failure(options: argparse.Namespace) -> None:
    """From a stage's error in step 4 to the error in the main thread and to the end."""
    load, plan = loaded(options, options.small, "threads")
    executor = ThreadsExecutor(load.job(), plan)
    executor.start()
    stage = executor.drafters[-1].stage
    accumulate, calls, raised = stage.accumulate, [0], [0.0]

    def broken(batch: Any, features: Any, finished: Any = None) -> Any:
        calls[0] += 1
        if calls[0] == 7:
            raised[0] = time.perf_counter()
            raise Broken("on purpose")
        return accumulate(batch, features, finished)

    stage.accumulate = broken  # type: ignore[method-assign]
    try:
        for index in range(20):
            executor.step(index)
    except Broken as error:
        figure("to the main thread ms", (time.perf_counter() - raised[0]) * 1e3)
        executor.close()
        figure("to the end of all threads ms", (time.perf_counter() - raised[0]) * 1e3)
        failed = [d["stage"] for e, d in load.events if e == "failed"]
        figure("first cause", f"{failed[0]}: {error}")
        return
    figure("first cause", "none: it went on")


# -- all ------------------------------------------------------------------------------------------


def main() -> None:
    options = parse()
    if options.part:
        run_here(options)
        return
    figures = Figures("multi_gpu.jsonl")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    figures.tell("machine", "devices", f"{len(options.devices)} x {name}")
    figures.tell("machine", "torch", torch.__version__)
    with tempfile.TemporaryDirectory(prefix="multi-gpu-") as cache:
        cache = options.cache or cache
        for part in options.parts:
            left = options.seconds - figures.spent_s()
            if left < 5:
                figures.tell(part, "left out", f"{options.seconds:.0f} s are over")
                continue
            run_watched(options, part, min(LIMITS[part], left), Path(cache), figures)


def run_watched(
    options: argparse.Namespace, part: str, limit: float, cache: Path, figures: Figures
) -> None:
    """One part in its own process (or torchrun's), with the cache that all share."""
    told: dict[str, Any] = {}

    def tell(name: str, value: Any) -> None:
        told[name] = value
        figures.tell(part, name, value)

    kept = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache)}
    ended = watch_part(command_of(options, part), limit, tell, OMP_NUM_THREADS="4", **kept)
    tell("wall_s", ended.wall_s)
    if part == "killed" and "killed at" in told:
        tell_killed(ended, told["killed at"], tell)
    elif ended.over or ended.code:
        how = f"ended at its limit of {limit:.0f} s" if ended.over else f"exit {ended.code}"
        tell("failed", how)
        print("\n".join(ended.lines[-150:]), flush=True)


def command_of(options: argparse.Namespace, part: str) -> list[str]:
    if part == "small threads":
        return [*me(options, "threads"), "--shape", options.small]
    if part not in ("processes", "small", "killed", "overlap ranks", "sharded"):
        return me(options, part)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    if part == "overlap ranks":
        python, *rank = me(options, "overlap rank")
        return [python, *launcher, "2", *rank]
    if part == "sharded":
        python, *rank = me(options, "sharded rank")
        return [python, *launcher, str(len(options.devices)), *rank]
    launcher += [str(sum(options.split))]
    python, *rank = me(options, "rank")
    more = {
        "processes": [],
        "small": ["--shape", options.small],
        "killed": ["--shape", options.small, "--kill-rank", "0"],
    }
    return [python, *launcher, *rank, *more[part]]


def tell_killed(ended: Ended, at: float, tell: Any) -> None:
    """Seconds from SIGKILL of a target rank to the end of torchrun, and what was said."""
    tell("code", ended.code)
    tell("seconds to the end", ended.at - at)
    said = [line for line in ended.lines if "Signal 9" in line or "failed first" in line]
    tell("said", said[-1].strip() if said else "\n".join(ended.lines[-5:]))


def run_here(options: argparse.Namespace) -> None:
    gpu = options.device != "cpu"
    if options.part == "copies":
        if gpu:
            copies(options.devices)
        return
    if options.part == "gradients":
        gradients(options.devices, GRADIENT if gpu else 1 << 16)
        return
    if options.part == "real":
        run_real(options.devices, options.split, options.target)
        return
    parts = {
        "warm": run_warm,
        "warm shape": run_warm_shape,
        "threads": run_threads,
        "rank": run_rank,
        "losses": run_losses,
        "overlap": run_overlap,
        "overlap rank": run_overlap_rank,
        "sharded rank": run_sharded_rank,
    }
    parts[options.part](options)


def me(options: argparse.Namespace, part: str) -> list[str]:
    return [
        sys.executable,
        str(Path(__file__).resolve()),
        *("--part", part, "--split", ",".join(map(str, options.split))),
        *("--shape", options.shape, "--small", options.small),
        *("--device", options.device, "--steps", str(options.steps)),
        *("--target", options.target),
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    usual = ",".join(part for part in LIMITS if part not in BY_NAME)
    parser.add_argument("--parts", default=usual, help="which, with commas")
    parser.add_argument("--seconds", type=float, default=530, help="for all parts together (530)")
    parser.add_argument("--split", help="targets,drafters (by the number of GPUs)")
    parser.add_argument("--shape", default="8b", help="of threads and processes")
    parser.add_argument("--small", default="smollm2", help="of the small parts, losses and killed")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cache", help="folder for compiled code (one of its own, removed after)")
    parser.add_argument("--target", default=TARGET, help="of the part real")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--kill-rank", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    unknown = [part for part in options.parts if part not in LIMITS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(LIMITS)}")
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
