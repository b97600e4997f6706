"""A rank's side of a step under the processes executor: a target's, a drafter's.

Messages between a pair come in the order in which both count the microbatches (``place.Deal``), so
neither asks: a target sends, a drafter has posted the receive.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.buckets import Finished
from trainer.pipeline.allreduce import AllReduce
from trainer.pipeline.device import Fence, Meter, poll
from trainer.pipeline.gauge import Gauge
from trainer.pipeline.held_out import HeldOut, held_out_features
from trainer.pipeline.place import Deal
from trainer.pipeline.plan import Plan
from trainer.pipeline.reduce import compare_fingerprints, fingerprint
from trainer.pipeline.round import Round
from trainer.pipeline.stages import SCALARS, DrafterStage, Job, StepResult, Sums, TargetStage


class TargetPart:
    """A target rank's side of a step: forward, send."""

    def __init__(self, stage: TargetStage, job: Job, deal: Deal, device: torch.device) -> None:
        self.stage, self.job, self.deal, self.device = stage, job, deal, device
        self.place = deal.place
        self.buffers: list[Tensor] = []
        self._sends: deque[Any] = deque()
        self._made = 0
        self.meter = Meter(device)

    def warm_up(self) -> None:
        if self.place.rank == self.place.first_target:
            for batch in self.job.held_out:
                held_out_features(self.stage, batch, self.buffers[0])
                dist.send(self.buffers[0], self.place.leader)
        batch = self.job.batches(0, 0)
        for drafter in range(self.place.drafters):
            self.stage.features(batch, self.buffers[0])
            dist.send(self.buffers[0], self.place.drafter_rank(drafter))

    def step(self, index: int, turn: int, more: bool) -> StepResult:
        tokens = 0
        for slot, target, drafter, _ in self.deal.of_step(turn):
            if target != self.place.index:
                continue
            batch = self.job.batches(index, slot)
            tokens += batch.context_tokens()
            if self.device.type == "cuda":
                batch = batch.pin_memory()
            self._send(batch, self.place.drafter_rank(drafter))
        # The sums are the drafters' to know; this rank reports nothing.
        return StepResult(index, torch.zeros(SCALARS), torch.zeros(()), tokens)

    def _send(self, batch: Any, rank: int) -> None:
        if len(self._sends) == len(self.buffers):
            self._sends.popleft().wait()
        buffer = self.buffers[self._made % len(self.buffers)]
        self.meter.begin()
        self.stage.features(batch, buffer)
        self.meter.end()
        self._sends.append(dist.isend(buffer, rank))
        self._made += 1


class DrafterPart:
    """A drafter rank's side of a step: receive, accumulate, sum over all drafters, update."""

    def __init__(
        self,
        stage: DrafterStage,
        job: Job,
        plan: Plan,
        deal: Deal,
        round_: Round,
        device: torch.device,
        among: Any,
    ) -> None:
        """``among``: the group of all drafters."""
        self.stage, self.job, self.plan, self.deal, self.device = stage, job, plan, deal, device
        self.place, self.among = deal.place, among
        self.buffers: list[Tensor] = []
        self._receives: dict[int, Any] = {}
        self._posted = 0
        self._before: Fence | None = None
        self.meter, self.round = Meter(device), round_
        self.gauge = Gauge(plan.microbatches)
        self.share = self.deal.per_node // self.place.drafters
        alone = len(self.place.drafter_ranks()) == 1
        buckets = stage.gradients() if alone else stage.buckets()
        self.sum = AllReduce(buckets, among, device)
        self._held_out = HeldOut(job.held_out)

    def warm_up(self) -> None:
        self._receive_held_out()
        batch = self.job.batches(0, 0)
        for target in range(self.place.targets):
            dist.recv(self.buffers[0], self.place.target_rank(target))
        sums = self.stage.accumulate(batch, self.buffers[0])
        self.stage.discard()
        # NCCL connects at a group's first use, which would otherwise be within the first step.
        dist.all_reduce(sums, group=self.among)
        self._compare(0)
        if self.job.held_out and self._measures:
            self._held_out.measure(self.stage, 0)

    def measure(self) -> Sums | None:
        if not self._measures:
            return None
        found = self._held_out.total(lambda index: self._held_out.measure(self.stage, index))
        return found if self.place.leads else None

    @property
    def _measures(self) -> bool:
        return self.place.leads or self.plan.sharded

    def _receive_held_out(self) -> None:
        """By the leading rank. Other shards only give it their weights, whatever they measure."""
        if self.place.leads:
            for _ in self.job.held_out:
                dist.recv(self.buffers[0], self.place.first_target)
                self._held_out.keep(self.buffers[0])
        elif self._measures and self.job.held_out:
            self._held_out.stand_in(torch.zeros_like(self.buffers[0], device="cpu"))

    def share_state(self) -> None:
        """Everybody's becomes the leading rank's."""
        source = self.place.leader
        self.stage.share(lambda tensor: dist.broadcast(tensor, source, group=self.among))

    def step(self, index: int, turn: int, more: bool) -> StepResult:
        """``more``: the next step is sure to run, so its features may be received already."""
        mine = [
            (slot, number)
            for slot, _, drafter, number in self.deal.of_step(turn)
            if drafter == self.place.index
        ]
        batches = [self.job.batches(index, slot) for slot, _ in mine]
        tokens = torch.tensor([float(sum(b.context_tokens() for b in batches))])
        end = self.share * (turn + (2 if more else 1))
        total: Tensor | None = None
        for batch, (_, number) in zip(batches, mine, strict=True):
            # Only the step's last backward pass leaves gradients as they are to be summed.
            finished = self.sum.finished if number == mine[-1][1] else None
            sums = self._accumulate(batch, number, end, finished)
            total = sums if total is None else total + sums
        assert total is not None
        self.sum.rest(total)
        norm = self._update(index, total)
        if (index + 1) % self.plan.check_equal_every == 0:
            self._compare(index + 1)
        count = self._sum_tokens(tokens)
        return StepResult(index, total, norm, count, self._telemetry(count))

    def _accumulate(self, batch: Any, number: int, end: int, finished: Finished | None) -> Tensor:
        self._post(min(number + len(self.buffers), end))
        self._receives.pop(number).wait()
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        self.meter.begin()
        sums = self.stage.accumulate(batch, self.buffers[number % len(self.buffers)], finished)
        self.meter.end()
        return sums

    def _post(self, end: int) -> None:
        """Receives of this drafter's microbatches below ``end``. On a GPU they start when what has
        been launched so far, the slot's previous use included, is done."""
        while self._posted < end:
            number = self._posted
            t = number * self.place.drafters + self.place.index
            source = self.place.target_rank(t % self.place.targets)
            buffer = self.buffers[number % len(self.buffers)]
            self._receives[number] = dist.irecv(buffer, source)
            self._posted += 1

    def _update(self, index: int, total: Tensor) -> Tensor:
        self.meter.begin()
        norm = self.stage.update(index, total)
        done = self.meter.end()
        if self._before is not None:
            poll(self._before, lambda: None)
        self._before = done
        return norm

    def _sum_tokens(self, tokens: Tensor) -> int:
        dist.all_reduce(tokens, group=self.among)
        return int(tokens)

    def _compare(self, step: int) -> None:
        mine = fingerprint(self.stage.weights())
        everyone: list[Any] = [None] * len(self.place.drafter_ranks())
        dist.all_gather_object(everyone, mine, group=self.among)
        compare_fingerprints(everyone, step)

    def _telemetry(self, tokens: int) -> dict[str, float]:
        queue = sum(work.is_completed() for work in self._receives.values())
        waited = self.sum.waited_s()
        return self.job.compile_lock.stats().telemetry() | self.gauge.read(
            tokens, queue, self.round.targets, self.round.drafters, sum_wait_s=waited
        )
