"""One process, a thread a device: N targets feed M drafters through preallocated slots.

    targets ── microbatches in order, as far ahead as the slots allow ──► rings, one a drafter
    drafters ─ their share of a step's microbatches ─► sum of gradients ─► one update each
                  (summed bucket by bucket while the last of them is in its backward pass)

Microbatch number n (counted over the whole run) goes to drafter n mod M; any target that is free
takes the next number. So every drafter gets the same count a step, and the data of a step do not
depend on timing. Losses equal ``inline``'s up to the rounding of sums.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer.pipeline.board import Board, Halted, Watchdog
from trainer.pipeline.gauge import Gauge, Usage
from trainer.pipeline.held_out import HeldOut
from trainer.pipeline.plan import Plan
from trainer.pipeline.reduce import GradientSum
from trainer.pipeline.ring import Ring
from trainer.pipeline.stages import Job, ReadCheckpoint, StepResult, Sums, resume_alone
from trainer.pipeline.workers import DrafterWorker, SumWorker, TargetWorker, Worker


class ThreadsExecutor:
    def __init__(self, job: Job, plan: Plan) -> None:
        self.job = job
        self.plan = plan
        self.board = Board(job.event)
        devices = [torch.device(d) for d in (*plan.targets, *plan.drafters)]
        everywhere = list(dict.fromkeys(devices))

        def worker(kind: type[Any], name: str, device: torch.device) -> Any:
            return kind(name, device, everywhere, self.board, job.compile_lock)

        count = len(plan.targets)
        self.targets: list[TargetWorker] = [
            worker(TargetWorker, f"target {i}", d) for i, d in enumerate(devices[:count])
        ]
        self.drafters: list[DrafterWorker] = [
            worker(DrafterWorker, f"drafter {i}", d) for i, d in enumerate(devices[count:])
        ]
        self._share = job.batches.slots // len(self.drafters)
        self._sum = GradientSum(self.board, len(self.drafters))
        self.summers: list[SumWorker] = []
        if len(self.drafters) > 1:
            for i, drafter in enumerate(self.drafters):
                drafter.summer = worker(SumWorker, f"sum {i}", drafter.device)
                drafter.summer.follow(i, self._sum)
                self.summers.append(drafter.summer)
        self._deal = threading.Lock()
        self._dealt = 0
        self._first: int | None = None
        self._next = 0
        self._gauge = Gauge(plan.microbatches)
        self._held_out = HeldOut(job.held_out)

    # -- Executor ---------------------------------------------------------------------------------

    def start(self) -> None:
        for worker in self._workers():
            worker.start()
        Watchdog(self.board, self.plan.stall_limit_s).start()
        with self._first_cause():
            self._build()
            self._warm_up()
        self.job.compile_lock.end_warm_up()

    def step(self, index: int) -> StepResult:
        """Steps come one after the other; the first may be any (a resumed run)."""
        if self._first is None:
            self._first = self._next = index
            for target in self.targets:
                target.post(target.produce, self._next_task)
        if index != self._next:
            raise ValueError(f"step {index} was asked for, {self._next} is next")
        self._next += 1
        check = (index + 1) % self.plan.check_equal_every == 0
        first = (index - self._first) * self._share
        with self._first_cause():
            replies = [
                drafter.post(drafter.step, index, first, self._share, i, self._sum, check)
                for i, drafter in enumerate(self.drafters)
            ]
            results = [reply.get() for reply in replies]
        sums, norm, _, done = results[0]
        # The caller reads on its own stream what the drafter's thread computed on another.
        done.wait(sums.device)
        tokens = sum(count for _, _, count, _ in results)
        return StepResult(index, sums, norm, tokens, telemetry=self._telemetry(tokens))

    def agreed_stop(self, received: int | None) -> int | None:
        return received

    def measure(self) -> Sums | None:
        with self._first_cause():
            return self._held_out.total(self._measure_one)

    def state(self) -> dict[str, Any]:
        with self._first_cause():
            return self.drafters[0].post(self.drafters[0].stage.state).get()

    def load(self, state: dict[str, Any]) -> None:
        with self._first_cause():
            for drafter in self.drafters:
                drafter.post(drafter.stage.load, state).get()

    def resume(self, read: ReadCheckpoint) -> tuple[int, float | None]:
        return resume_alone(read, self.load)

    def close(self) -> None:
        self.board.close()
        deadline = time.monotonic() + 10
        for worker in self._workers():
            if worker.ident is not None:
                # A thread inside a device call ends with the process: the threads are daemons.
                worker.join(timeout=max(0.0, deadline - time.monotonic()))

    # -- start ------------------------------------------------------------------------------------

    def _build(self) -> None:
        """One after the other: loading weights changes torch's default type for all threads."""
        for target in self.targets:
            target.post(target.build, self.job.make_target).get()
        for drafter in self.drafters:
            drafter.post(drafter.build, self.job.make_drafter).get()
        rings = self._make_rings()
        places = [d.device for d in self.drafters]
        for target in self.targets:
            target.post(target.prepare, self.job.batches, rings, places).get()

    def _make_rings(self) -> list[Ring]:
        rows, length, _ = self.job.batches.shape
        stage = self.targets[0].stage
        shape = (rows, length, stage.feature_width)
        return [
            d.post(d.make_ring, self.plan.queue_depth, shape, stage.dtype).get()
            for d in self.drafters
        ]

    def _warm_up(self) -> None:
        """Every stage once, one after the other, each in the thread that will run it: compiled
        code, autotuning and CUDA graphs belong in part to the thread."""
        batch = self.job.batches(0, 0)
        features: list[torch.Tensor] = []
        stages: list[Worker] = [*self.targets, *self.drafters]
        for number, worker in enumerate(stages, start=1):
            began = time.perf_counter()
            self.board.event("compiling", name=worker.name, number=number, of=len(stages))
            worker.post(self._warm_one, worker, batch, features).get()
            seconds = round(time.perf_counter() - began, 3)
            self.board.event("compiled", name=worker.name, seconds=seconds)
        self._warm_held_out()
        checks = [
            d.post(self._sum.check_equal, i, 0, d.stage.weights(), d.pulse)
            for i, d in enumerate(self.drafters)
        ]
        for check in checks:
            check.get()

    def _warm_one(self, worker: Worker, batch: Any, features: list[torch.Tensor]) -> None:
        worker.pulse.set("warm-up")
        if isinstance(worker, TargetWorker):
            # On the CPU: it outlives the worker's stream, and every drafter reads it.
            features[:] = [worker.stage.features(batch).cpu()]
        elif isinstance(worker, DrafterWorker):
            worker.stage.accumulate(batch, features[0].to(worker.device))
            worker.stage.discard()
        if worker.device.type == "cuda":
            torch.cuda.current_stream(worker.device).synchronize()

    def _warm_held_out(self) -> None:
        def make(target: TargetWorker, index: int) -> None:
            target.pulse.set(f"held-out features, batch {index + 1}")
            self._held_out.make(target.stage, index)

        for index in range(len(self.job.held_out)):
            self.targets[0].post(make, self.targets[0], index).get()
        if self.job.held_out:
            self._measure_one(0)

    # -- running ----------------------------------------------------------------------------------

    def _measure_one(self, index: int) -> torch.Tensor:
        """In the first drafter's thread; a sign of life for each."""

        def measure(drafter: DrafterWorker) -> torch.Tensor:
            drafter.pulse.set(f"validation, batch {index + 1}")
            return self._held_out.measure(drafter.stage, index)

        return self.drafters[0].post(measure, self.drafters[0]).get()

    def _next_task(self) -> tuple[int, int, int] | None:
        assert self._first is not None
        with self._deal:
            number = self._dealt
            self._dealt += 1
        step, slot = divmod(number, self.job.batches.slots)
        step += self._first
        return None if step >= self.job.batches.steps else (step, slot, number)

    def _workers(self) -> list[Worker]:
        return [*self.targets, *self.drafters, *self.summers]

    @contextmanager
    def _first_cause(self) -> Iterator[None]:
        """In the main thread: the first cause of a failure instead of ``Halted``."""
        try:
            yield
        except Halted:
            self.board.raise_failure()

    # -- telemetry --------------------------------------------------------------------------------

    def _telemetry(self, tokens: int) -> dict[str, float]:
        filled = sum(d.ring.depth_now() for d in self.drafters) / len(self.drafters)
        return self.job.compile_lock.stats().telemetry() | self._gauge.read(
            tokens,
            filled,
            Usage.of([t.meter for t in self.targets]),
            Usage.of([d.meter for d in self.drafters]),
            transfer_s=sum(t.transfer.busy_s for t in self.targets),
            sum_wait_s=self._sum_wait_s(),
        )

    def _sum_wait_s(self) -> float | None:
        if not self.summers:
            return None
        return sum(d.sum_wait.busy_s for d in self.drafters) / len(self.drafters)
