"""The pipeline on one GPU: races, deadlocks, lock cost, start-up, and efficiency.

    python benchmarks/trainer/pipeline.py                 # about three minutes on one H200
    python benchmarks/trainer/pipeline.py --device cpu --shape tiny --only pair

Parts run in processes of their own with a limit each, because some of them are meant to hang.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measure import drafter_alone, report, run_part, save, target_alone, together
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from workload import Workload

from trainer import torch_internals
from trainer.compile_lock import CompileLock, own_code
from trainer.pipeline.plan import make_plan
from trainer.pipeline.threads import ThreadsExecutor

MODES = {
    "nothing": "torch.compile, called from three threads",
    "single-threaded backward": "the same, backward in the calling thread",
    "lock alone": "torch's lock and own code objects, default autograd threads",
    "CompileLock": "everything that trainer/compile_lock.py does",
}
THREADS, HEADS, WIDTH, WARM, NEW = 3, 8, 64, 4096, 128


# -- race -----------------------------------------------------------------------------------------


def race(mode: str, budget_s: float) -> dict[str, Any]:
    """Three threads on one GPU, own streams, flex_attention forward and backward, every second step
    under checkpointing, a new shape every twelfth."""
    counts: collections.Counter[str] = collections.Counter()
    lock = CompileLock(recompile_limit=4096)
    locked = mode in ("lock alone", "CompileLock")

    def body(q: Any, k: Any, v: Any, mask: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            counts["eager"] += 1
        return flex_attention(q, k, v, block_mask=mask)

    shared = torch.compile(body)
    calls = [lock.compile(body, f"drafter{i}") if locked else shared for i in range(THREADS)]
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))

    @contextlib.contextmanager
    def setting() -> Any:
        torch.cuda.set_stream(torch.cuda.Stream())
        if locked:
            with lock.thread(), torch.autograd.set_multithreading_enabled(mode == "lock alone"):
                yield
            return
        torch._dynamo.config.recompile_limit = 4096
        torch._dynamo.config.accumulated_recompile_limit = 4096
        torch._dynamo.config.automatic_dynamic_shapes = False
        with torch.autograd.set_multithreading_enabled(mode == "nothing"):
            yield

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < 1024)

    def step(call: Any, length: int, recompute: bool) -> None:
        shape = (1, HEADS, length, WIDTH)
        q, k, v = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        with lock.exclusive() if locked else contextlib.nullcontext():
            mask = create_block_mask(window, None, None, length, length, device="cuda")
        if recompute:
            out = checkpoint(call, q, k, v, mask, use_reentrant=False)
        else:
            out = call(q, k, v, mask)
        lock.backward(out.float().square().mean())

    end = time.time() + budget_s
    lengths = collections.deque(WARM + NEW * (i + 1) for i in range(400))

    def work(call: Any) -> None:
        with setting():
            i = 0
            while time.time() < end:
                length = lengths.popleft() if i % 12 == 6 else WARM
                i += 1
                counts["steps"] += 1
                try:
                    step(call, length, i % 2 == 1)
                except Exception as error:  # noqa: BLE001 - counting them is the point
                    fx = torch_internals.FX_RACE in str(error)
                    counts["fx errors" if fx else "other errors"] += 1
                    if not fx:
                        print(type(error).__name__, str(error)[:300], flush=True)
                if i % 8 == 0:
                    torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.time() + budget_s + 15
    for thread in threads:
        thread.join(max(0.1, deadline - time.time()))
    hung = sum(thread.is_alive() for thread in threads)
    stats = lock.stats()
    return {
        "mode": mode,
        **{name: counts[name] for name in ("steps", "fx errors", "other errors", "eager")},
        "hung threads": hung,
        "flag stuck": torch_internals.tracing_flag() if not hung else None,
        "lock waits": stats.waits,
        "wait ms": round(stats.wait_s * 1e3, 1),
    }


# -- lock cost ------------------------------------------------------------------------------------


def lock_cost() -> dict[str, Any]:
    """Microseconds that the lock adds to a warm call of a small compiled function."""
    lock = CompileLock()

    def body(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    plain = torch.compile(own_code(body, "plain"), fullgraph=True)  # type: ignore[arg-type]
    locked = lock.compile(body, "locked")
    x = torch.randn(64, device="cuda" if torch.cuda.is_available() else "cpu")
    best: dict[str, float] = {}
    with lock.thread():
        for name, call in (("plain", plain), ("locked", locked)) * 5:
            for _ in range(50):
                call(x)
            began = time.perf_counter()
            for _ in range(2000):
                call(x)
            each = (time.perf_counter() - began) / 2000 * 1e6
            best[name] = min(each, best.get(name, each))
    return {"plain us": best["plain"], "locked us": best["locked"]}


# -- pipeline -------------------------------------------------------------------------------------


def pair(shape: str, device: str, drafters: int, microbatches: int, steps: int) -> dict[str, Any]:
    """One target and so many drafters on one device: each stage alone, then all together."""
    load = Workload(
        shape, microbatches, targets=1, drafters=drafters, devices=[device], check_equal_every=5
    )
    plan = make_plan(load.config.pipeline, load.work())
    executor = ThreadsExecutor(load.job(), plan)
    began = time.perf_counter()
    executor.start()
    start_s = time.perf_counter() - began
    target_s = target_alone(executor, 6)
    drafter_s, update_s = drafter_alone(executor, 6)
    found = together(executor, steps, [torch.device(device)])
    executor.close()
    compiled = [(d["name"], d["seconds"]) for e, d in load.events if e == "compiled"]
    # On one device nothing runs beside anything: the floor is the sum.
    floor = microbatches * (target_s + drafter_s) + drafters * update_s
    stats = load.lock.stats()
    return {
        "shape": shape,
        "start_s": start_s,
        "compiled": compiled,
        "target_ms": target_s * 1e3,
        "drafter_ms": drafter_s * 1e3,
        "update_ms": update_s * 1e3,
        "floor_ms": floor * 1e3,
        "step_ms": found["step_s"] * 1e3,
        "efficiency": floor / found["step_s"],
        "tokens_per_s": found["tokens_per_s"],
        "recompiles": stats.recompiles,
        "eager": stats.eager_runs,
        "lock waits": stats.waits,
        "wait_s": stats.wait_s,
        "first and last loss": [found["losses"][0], found["losses"][-1]],
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if device != "cpu" else 0,
        "telemetry": {k: v for k, v in found.items() if "idle" in k or "capacity" in k},
    }


# -- all ------------------------------------------------------------------------------------------


def main() -> None:
    options = parse()
    if options.part:
        report(run_here(options))
        # A part may end with hung threads by design.
        os._exit(0)
    only = options.only.split(",") if options.only else ["race", "lock", "start", "pair"]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "race" in only:
            results["race"] = run_races(options, folder)
        for name, limit, arguments, cache in parts(options):
            if name.split()[0].rstrip(",") in only:
                where = str(Path(folder) / cache)
                results[name] = run_part(me("--part", *arguments), limit, **caches(where))
                print(name, results[name], flush=True)
    save("pipeline.json", results)
    print_table(results)


def parts(options: argparse.Namespace) -> list[tuple[str, float, list[str], str]]:
    """(name, limit, arguments, cache)."""
    small = "tiny" if options.device == "cpu" else "smollm2"
    where = ["--device", options.device]
    start = ["pair", "--shape", small, "--microbatches", "2", "--steps", "4", *where]
    big = ["pair", "--shape", options.shape, "--microbatches", "2", "--steps", "10", *where]
    two = ["pair", "--shape", small, "--microbatches", "4", "--drafters", "2", "--steps", "20"]
    return [
        ("lock cost", 60, ["lock"], "lock"),
        ("start, cold cache", 120, start, "start"),
        ("start, warm cache", 120, start, "start"),
        ("pair, two drafters on one device", 120, [*two, *where], "start"),
        ("pair", 200, big, "big"),
    ]


def run_races(options: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Side by side: counts do not depend on speed, and some only end at their limit."""

    def one(mode: str) -> dict[str, Any]:
        command = me("--part", "race", "--mode", mode, "--budget", str(options.budget))
        where = str(Path(folder) / mode.replace(" ", "-"))
        found = run_part(
            command, options.budget + 60, **caches(where), TORCHINDUCTOR_FORCE_DISABLE_CACHES="1"
        )
        return {"mode": mode, **found}

    with ThreadPoolExecutor(len(MODES)) as pool:
        found = list(pool.map(one, MODES))
    for row in found:
        print(row, flush=True)
    return found


def caches(where: str) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": where, "TRITON_CACHE_DIR": where + "-triton"}


def me(*arguments: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), *arguments]


def run_here(options: argparse.Namespace) -> dict[str, Any]:
    if options.part == "race":
        return race(options.mode, options.budget)
    if options.part == "lock":
        return lock_cost()
    return pair(
        options.shape, options.device, options.drafters, options.microbatches, options.steps
    )


def print_table(results: dict[str, Any]) -> None:
    print(
        f"\ntorch {torch.__version__}; "
        f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}\n"
    )
    for row in results.get("race", []):
        if "error" in row:
            print(f"race | {row['mode']} | no result: {row['error'][-300:]}")
            continue
        print("race | " + " | ".join(f"{k} {v}" for k, v in row.items() if k != "code"))
    for name, found in results.items():
        if name == "race":
            continue
        if "error" in found:
            print(f"{name} | no result: {found['error'][-1500:]}")
            continue
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}
        print(f"{name} | " + " | ".join(f"{k} {v}" for k, v in shown.items()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="parts, by first word: race,lock,start,pair")
    parser.add_argument("--shape", default="8b", help="of the pair: 8b, smollm2 or tiny")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of racing (30)")
    parser.add_argument("--part", help=argparse.SUPPRESS, choices=("race", "lock", "pair"))
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--drafters", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--microbatches", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=10, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
