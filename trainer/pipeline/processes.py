"""One rank a device under torchrun, on one machine or many: torch.distributed and nothing else.

    torchrun --nproc-per-node 8 -m trainer train config.yaml

Each node runs the plan's N targets (local ranks 0..N-1) and M drafters (the rest). A node's targets
feed its own drafters, so features never cross the network; gradients are summed over all drafters
of all nodes. Every rank makes its own batches, which are pure functions of (step, slot).

Microbatch t of a node (counted over the run) goes from target t mod N to drafter t mod M: both know
it without a word, and messages between a pair come in order. A target waits for its oldest send
when its buffers are in flight, a drafter posts its receives as far ahead as its slots: that is the
back-pressure. Receives never go beyond the last step that all ranks have agreed to run.

The sum starts within a step's last backward pass: an all-reduce a bucket of gradients, as soon as
backward has launched what completes it (``buckets.py``).
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.errors import ConfigError, TrainerError, named_line
from trainer.pipeline.gauge import Usage
from trainer.pipeline.parts import DrafterPart, TargetPart
from trainer.pipeline.place import Deal, Place
from trainer.pipeline.plan import Plan
from trainer.pipeline.round import Round
from trainer.pipeline.stages import DrafterStage, Job, ReadCheckpoint, StepResult, Sums
from trainer.pipeline.torchrun import job_store

FAILURE_KEY = "first-failure"
LOST_KEY = "lost-a-peer/{}"
"""Of a rank."""
BUFFERS = 2
"""A target's: one is filled while the other travels."""


class PeerFailedError(TrainerError):
    """Another rank failed first; its own log has the traceback too."""

    exit_code = 1


class ProcessesExecutor:
    def __init__(self, job: Job, plan: Plan) -> None:
        self.job = job
        self.plan = plan
        self.place = Place.from_environment(plan)
        names = (*plan.targets, *plan.drafters)
        self.device = torch.device(names[self.place.local_rank])
        self.deal = Deal(self.place, job.batches.slots)
        self.part: TargetPart | DrafterPart
        self._closing = ExitStack()
        self._first: int | None = None
        self.round = Round(self.place)
        self._healthy = False
        self._over = False
        """All have agreed on the end, or it is the data's."""

    # -- Executor ---------------------------------------------------------------------------------

    def start(self) -> None:
        limit = timedelta(seconds=self.plan.stall_limit_s)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        # Without device_id: pairs then get communicators of their own, and a receive that waits
        # for its target cannot stand in the way of the drafters' sum.
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        self.store = job_store("dflash")
        rank, world = self.place.rank, self.place.world
        dist.init_process_group(
            backend, store=self.store, rank=rank, world_size=world, timeout=limit
        )
        self._closing.callback(dist.destroy_process_group)
        self._closing.enter_context(self.job.compile_lock.thread())
        with self._first_cause():
            everybody = dist.new_group(backend="gloo", timeout=limit)
            among = dist.new_group(self.place.drafter_ranks(), timeout=limit)
            self.round.group = everybody
            self.job.event("compiling", name=self.place.name)
            began = time.perf_counter()
            self._build(everybody, among)
            self.part.warm_up()
            dist.barrier(everybody)
            seconds = round(time.perf_counter() - began, 3)
            self.job.event("compiled", name=self.place.name, seconds=seconds)
        self._healthy = True
        self.job.compile_lock.end_warm_up()

    def _build(self, everybody: Any, among: Any) -> None:
        if self.place.is_target:
            target = self.job.make_target(self.device)
            mine = (target.feature_width, target.dtype)
            self.part = TargetPart(target, self.job, self.deal, self.device)
        else:
            drafter = self._make_drafter(among)
            mine = None
            self.part = DrafterPart(
                drafter, self.job, self.plan, self.deal, self.round, self.device, among
            )
        told: list[Any] = [None] * self.place.world
        dist.all_gather_object(told, (mine, self.job.key), group=everybody)
        refuse_other_data(self.place, [key for _, key in told])
        width, dtype = told[self.place.target_rank(0)][0]
        rows, length, _ = self.job.batches.shape
        depth = BUFFERS if self.place.is_target else self.plan.queue_depth
        self.part.buffers = [
            torch.empty((rows, length, width), dtype=dtype, device=self.device)
            for _ in range(depth)
        ]

    def _make_drafter(self, among: Any) -> DrafterStage:
        if not self.plan.sharded:
            return self.job.make_drafter(self.device)
        assert self.job.make_sharded is not None
        return self.job.make_sharded(self.device, among)

    def step(self, index: int) -> StepResult:
        if self._first is None:
            self._first = index
        turn = index - self._first
        more = not self.round.next_is_last and index + 1 < self.job.batches.steps
        with self._first_cause():
            result = self.part.step(index, turn, more)
        self._over = index + 1 == self.job.batches.steps
        return result

    def agreed_stop(self, received: int | None) -> int | None:
        with self._first_cause():
            stop = self.round.hold(received, Usage.of([self.part.meter]))
        self._over = self._over or stop is not None
        return stop

    def measure(self) -> Sums | None:
        """By the leading rank; the others wait for it in the next step. All drafters take part if
        each holds a shard alone."""
        if not isinstance(self.part, DrafterPart):
            return None
        with self._first_cause():
            return self.part.measure()

    def state(self) -> dict[str, Any]:
        """Of the leading rank; the others' is empty. All drafters take part if each holds a shard
        alone."""
        if self.place.is_target or not (self.place.leads or self.plan.sharded):
            return {}
        assert isinstance(self.part, DrafterPart)
        with self._first_cause():
            state = self.part.stage.state()
        return state if self.place.leads else {}

    def resume(self, read: ReadCheckpoint) -> tuple[int, float | None]:
        with self._first_cause():
            loaded = read() if self.place.leads else None
            found: list[Any] = [None if loaded is None else (loaded.step, loaded.best)]
            dist.broadcast_object_list(found, src=self.place.leader, group=self.round.group)
            if found[0] is None:
                return 0, None
            if isinstance(self.part, DrafterPart):
                if loaded is not None:
                    self.part.stage.load(loaded.state)
                self.part.share_state()
            step, best = found[0]
            return step, best

    def close(self) -> None:
        """After an end that all know of, waits for the leading rank, which may still be saving: a
        rank that leaves before makes torchrun end the others. After any other they may stand in a
        step, and would be waited for in vain."""
        # Also of what is no step's: a checkpoint that finds the disk full, losses not finite.
        error = sys.exc_info()[1]
        if isinstance(error, Exception):
            if self._healthy:
                self._report(error)
        elif self._over:
            # A peer that failed meanwhile has said so itself.
            with suppress(RuntimeError):
                dist.barrier(self.round.group)
        self._closing.close()

    # -- failure ----------------------------------------------------------------------------------

    @contextmanager
    def _first_cause(self) -> Iterator[None]:
        """The first rank that fails leaves its reason in the job's store; a rank that fails
        because of it (a lost connection, a time-out) raises that instead of its own noise."""
        try:
            yield
        except Exception as error:
            self._healthy = False
            first = self._report(error)
            if first is None:
                raise PeerFailedError(
                    f"a rank went away or hangs, and left no reason{self._silent()}; seen here as:"
                    f" {named_line(error)}",
                    next_step="torchrun's summary names one that was killed and the signal; one"
                    " that hangs is not in it, or is the last",
                ) from error
            if first["rank"] == self.place.rank:
                raise
            raise PeerFailedError(
                f"{first['stage']} (rank {first['rank']}) failed first: {first['error']}\n"
                f"{first['traceback']}",
                next_step="mend that; this rank only lost its peer",
            ) from error

    def _report(self, error: Exception) -> dict[str, Any] | None:
        """The first failure of the job, this one if none came before; null if this rank only lost a
        peer that left no reason (a killed one cannot)."""
        mine = {
            "rank": self.place.rank,
            "stage": self.place.name,
            "error": named_line(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        try:
            if lost_peer(error):
                self.store.set(LOST_KEY.format(self.place.rank), "")
                if not self.store.check([FAILURE_KEY]):
                    # The one that caused it may still be writing.
                    time.sleep(1.0)
                if not self.store.check([FAILURE_KEY]):
                    return None
            return dict(json.loads(self.store.compare_set(FAILURE_KEY, "", json.dumps(mine))))
        except RuntimeError:
            # The store went with the machine that held it: this rank's own error must do.
            return mine

    def _silent(self) -> str:
        """The ranks that have not told of a lost peer, which the others have done by now."""
        place = self.place
        with suppress(RuntimeError):
            silent = [r for r in range(place.world) if not self.store.check([LOST_KEY.format(r)])]
            there = [replace(place, rank=r, local_rank=r % place.per_node) for r in silent]
            names = ", ".join(f"{other.name} (rank {other.rank})" for other in there)
            return f" (silent: {names})" if names else ""
        return ""


def refuse_other_data(place: Place, keys: list[str]) -> None:
    """All ranks call it with all ranks' ``Job.key``; all raise the same."""
    odd = [rank for rank, key in enumerate(keys) if key != keys[place.leader]]
    if odd:
        nodes = sorted({rank // place.per_node for rank in odd})
        names = ", ".join(str(node) for node in nodes)
        raise ConfigError(
            f"node {names} has another config or other data than node 0",
            next_step="give all nodes the same config, and data.files with the same content",
        )


def lost_peer(error: Exception) -> bool:
    """Gloo and NCCL raise RuntimeErrors that only their text tells apart."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    words = ("onnection", "imed out", "timeout")
    return isinstance(error, dist.DistError) or any(word in text for word in words)
