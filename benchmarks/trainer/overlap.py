"""The sum of two drafters' gradients after a step's backward pass, and beside it.

Parts ``overlap`` (threads) and ``overlap ranks`` (processes) of ``multi_gpu.py``: two drafters, a
device each, features at hand, no target; one microbatch a step, so that nothing else hides the sum.
Steps are timed without a sum, with one after backward, and with one beside it, in turn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import figure
from steps import Finished, Rest, Steps
from torch import Tensor
from workload import Workload

from trainer.pipeline.allreduce import AllReduce
from trainer.pipeline.board import Board, Halted
from trainer.pipeline.reduce import GradientSum, fingerprint
from trainer.pipeline.workers import DrafterWorker, SumWorker

MODES = ("no sum", "after", "beside")
ROUNDS = 3
"""Of each mode in turn; the fastest counts, for what else a machine does only adds."""


def summed(steps: Steps, finished: Finished, rest: Rest) -> tuple[tuple[int, ...], float]:
    """(fingerprint of the gradients after a sum beside backward, their relative distance from
    those after a sum that follows it). A bucket summed too early would show in either."""
    gradients, kept = steps.stage.gradients(), []
    for told in (None, finished):
        rest(steps.stage.accumulate(steps.load.batches(0, 0), steps.features, told))
        kept.append([g.clone() for g in gradients])
        found = fingerprint(gradients)
        steps.stage.discard()
    pairs = list(zip(*kept, strict=True))
    apart = sum(float((b - a).float().norm()) ** 2 for a, b in pairs)
    return found, (apart / sum(float(a.float().norm()) ** 2 for a, _ in pairs)) ** 0.5


def modes(finished: Finished, rest: Rest) -> dict[str, tuple[Finished | None, Rest | None]]:
    return dict(zip(MODES, ((None, None), (None, rest), (finished, rest)), strict=True))


def tell_sums(sums: list[tuple[tuple[int, ...], float]]) -> None:
    figure("equal", sums[0][0] == sums[1][0])
    figure("apart from the sum after backward", sums[0][1])


def tell(found: dict[str, list[float]], buckets: list[Tensor]) -> None:
    figure("buckets", len(buckets))
    figure("largest bucket MB", max(b.nbytes for b in buckets) / 1e6)
    none, after, beside = (min(found[mode]) * 1e3 for mode in MODES)
    figure("step without a sum ms", none)
    figure("step, sum after backward ms", after)
    figure("step, sum beside backward ms", beside)
    figure("sum exposed: after, beside ms", [round(after - none, 3), round(beside - none, 3)])
    if after > none:
        figure("hidden", (after - beside) / (after - none))


def run_overlap(options: Any) -> None:
    load = Workload(options.shape, 2)
    places = [torch.device(options.devices[i]) for i in (0, -1)]
    board = Board(load.event)
    adder = GradientSum(board, 2)
    drafters = [
        DrafterWorker(f"drafter {i}", d, places, board, load.lock) for i, d in enumerate(places)
    ]
    try:
        for i, drafter in enumerate(drafters):
            drafter.summer = SumWorker(f"sum {i}", drafter.device, places, board, load.lock)
            drafter.summer.follow(i, adder)
            drafter.summer.start()
            drafter.start()
        measure_threads(load, drafters, options.steps)
    except Halted:
        board.raise_failure()
    finally:
        board.close()
        # A thread that the interpreter's end meets inside torch aborts the process.
        for worker in (w for d in drafters for w in (d, d.summer) if w is not None and w.ident):
            worker.join(10)


def measure_threads(load: Workload, drafters: list[DrafterWorker], count: int) -> None:
    began = time.perf_counter()
    steps = []
    for i, drafter in enumerate(drafters):
        drafter.post(drafter.build, load.make_drafter).get()
        steps.append(drafter.post(Steps, load, drafter.stage, i, 2).get())
        drafter.post(steps[-1].warm_up).get()
    figure("built and compiled s", time.perf_counter() - began)

    def together(act: Callable[[Steps, DrafterWorker], Any]) -> list[Any]:
        replies = [d.post(act, s, d) for s, d in zip(steps, drafters, strict=True)]
        return [reply.get() for reply in replies]

    def ways(drafter: DrafterWorker) -> tuple[Finished, Rest]:
        summer = drafter.summer
        assert summer is not None
        return summer.finished, lambda sums: drafter._await_sum(0, summer, sums)

    def timed(mode: str) -> list[float]:
        return together(lambda s, d: s.seconds(count, *modes(*ways(d))[mode]))

    tell_sums(together(lambda s, d: summed(s, *ways(d))))
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(ROUNDS):
        for mode in MODES:
            found[mode].append(max(timed(mode)))
    first = drafters[0].summer
    assert first is not None
    tell(found, first.buckets)
    whole = drafters[-1].post(alone, load, drafters[-1].device, count).get()
    figure("step of one drafter, compiled as one call, ms", whole * 1e3)


def alone(load: Workload, device: torch.device, count: int) -> float:
    """A drafter that is the only one: no hooks, its forward pass one compiled call."""
    steps = Steps(load, load.make_drafter(device))
    steps.warm_up()
    return min(steps.seconds(count) for _ in range(ROUNDS))


def run_overlap_rank(options: Any) -> None:
    """One of two ranks under torchrun."""
    load = Workload(options.shape, 2)
    rank = int(os.environ["RANK"])
    device = torch.device(options.devices[(0, -1)[rank]])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # Else two ranks' threads wait for each other's cores, spinning.
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    began = time.perf_counter()
    with load.lock.thread():
        stage = load.make_drafter(device)
        buckets = stage.buckets()
        summing = AllReduce(buckets, dist.group.WORLD, device)
        steps = Steps(load, stage, rank, 2)
        steps.warm_up()
        sums: list[Any] = [None, None]
        dist.all_gather_object(sums, summed(steps, summing.finished, summing.rest))
        if rank == 0:
            figure("built and compiled s", time.perf_counter() - began)
            tell_sums(sums)
        found: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(ROUNDS):
            for mode, ways in modes(summing.finished, summing.rest).items():
                seconds: list[Any] = [None, None]
                dist.all_gather_object(seconds, steps.seconds(options.steps, *ways))
                found[mode].append(max(seconds))
        if rank == 0:
            tell(found, buckets)
    dist.destroy_process_group()
