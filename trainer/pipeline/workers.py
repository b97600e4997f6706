"""A thread a stage: it owns a device's stream, and runs what the executor posts, in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from trainer.buckets import Finished
from trainer.compile_lock import CompileLock
from trainer.data.batch import Batch
from trainer.pipeline.board import Board, Halted
from trainer.pipeline.device import Fence, Meter, enter_device, poll
from trainer.pipeline.reduce import GradientSum
from trainer.pipeline.ring import Filled, Ring
from trainer.pipeline.stages import Batches, DrafterStage, TargetStage

T = TypeVar("T")


class Reply(Generic[T]):
    """What a worker will have answered. ``get`` raises Halted when the run is over first."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._value: list[T] = []

    def put(self, value: T) -> None:
        with self._board.changed:
            self._value.append(value)
            self._board.changed.notify_all()

    def get(self) -> T:
        self._board.wait(lambda: bool(self._value), None, "")
        return self._value[0]


class Worker(threading.Thread):
    priority = 0
    """Of its streams."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        devices: Sequence[torch.device],
        board: Board,
        compile_lock: CompileLock,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.device = device
        self.board = board
        self.pulse = board.pulse(name)
        self._devices = devices
        self._compile_lock = compile_lock
        self._tasks: deque[Callable[[], None]] = deque()

    def post(self, function: Callable[..., T], *arguments: Any) -> Reply[T]:
        reply: Reply[T] = Reply(self.board)
        with self.board.changed:
            self._tasks.append(lambda: reply.put(function(*arguments)))
            self.board.changed.notify_all()
        return reply

    def run(self) -> None:
        self.pulse.thread = threading.get_ident()
        try:
            enter_device(self.device, self._devices, self.priority)
            with self._compile_lock.thread():
                while True:
                    self.board.wait(lambda: bool(self._tasks), self.pulse, "waiting for work")
                    self._tasks.popleft()()
        except Halted:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever ends a stage ends the run
            self.board.fail(self.name, error)
        finally:
            self.pulse.set("ended", waiting=True)


class TargetWorker(Worker):
    """Computes features, in the order of the microbatches, as far ahead as the slots allow."""

    stage: TargetStage

    def build(self, make: Callable[[torch.device], TargetStage]) -> None:
        # Loading weights has no limit: a cold disk is no stall.
        self.pulse.set("building the target", waiting=True)
        self.stage = make(self.device)
        self.meter = Meter(self.device)
        self.transfer = Meter(self.device)

    def prepare(
        self, batches: Batches, rings: list[Ring], drafter_devices: list[torch.device]
    ) -> None:
        """Buffers for features that must travel; on a shared device they are made in the slot."""
        self._batches, self._rings, self._drafter_devices = batches, rings, drafter_devices
        rows, length, _ = batches.shape
        self._staging: list[Tensor] = []
        self._copied: list[Fence | None] = [None, None]
        if self.device.type == "cuda" and any(d != self.device for d in drafter_devices):
            # Two: the next forward fills one while the other is copied.
            shape = (rows, length, self.stage.feature_width)
            self._staging = [
                torch.empty(shape, dtype=self.stage.dtype, device=self.device) for _ in range(2)
            ]
            self._copy_stream = torch.cuda.Stream(self.device)

    def produce(self, next_task: Callable[[], tuple[int, int, int] | None]) -> None:
        """``next_task`` gives (step, slot, number of microbatches dealt before it)."""
        made = 0
        while (task := next_task()) is not None:
            step, slot, number = task
            self.pulse.set(f"target forward, step {step + 1}")
            batch = self._batches(step, slot)
            tokens = batch.context_tokens()
            if self.device.type == "cuda":
                batch = batch.pin_memory()
            drafters = len(self._rings)
            drafter, index = number % drafters, number // drafters
            if self._staging and self._drafter_devices[drafter] != self.device:
                filled = self._through_staging(batch, tokens, drafter, index, made % 2)
            else:
                filled = self._in_place(batch, tokens, drafter, index)
            self._rings[drafter].publish(index, filled)
            made += 1

    def _in_place(self, batch: Batch, tokens: int, drafter: int, index: int) -> Filled:
        ring = self._rings[drafter]
        slot = ring.claim(index, self.pulse)
        ring.wait_free(index, self.device)
        self.meter.begin()
        self.stage.features(batch, slot)
        return Filled(batch, slot, tokens, self.meter.end())

    def _through_staging(
        self, batch: Batch, tokens: int, drafter: int, index: int, which: int
    ) -> Filled:
        """Forward into a buffer of this device, copy on a stream beside it: the next forward
        starts while the copy travels or waits for its slot."""
        copied = self._copied[which]
        if copied is not None:
            copied.wait(self.device)
        self.meter.begin()
        self.stage.features(batch, self._staging[which])
        made = self.meter.end()
        ring = self._rings[drafter]
        slot = ring.claim(index, self.pulse)
        with torch.cuda.stream(self._copy_stream):
            made.wait(self.device)
            ring.wait_free(index, self.device)
            self.transfer.begin()
            slot.copy_(self._staging[which], non_blocking=True)
            done = self.transfer.end()
        self._copied[which] = done
        return Filled(batch, slot, tokens, done)


class SumWorker(Worker):
    """Beside a drafter: adds its buckets of gradients to the others' while its backward pass goes
    on, on streams of its own. All drafters' buckets come in one order, so these threads meet over
    the same bucket each time; the drafters' own never wait inside a backward pass."""

    priority = -1
    """Its kernels are short and all drafters wait for them; backward's fill the device."""
    buckets: list[Tensor]

    def follow(self, party: int, adder: GradientSum) -> None:
        self._party, self._adder = party, adder
        self._told = 0

    def finished(self, number: int) -> None:
        """By the drafter's thread, from inside backward: what it has launched completes the bucket.
        Nothing here waits for another thread's work."""
        self.post(self._add, number, Fence(self.device))
        self._told = number + 1

    def rest(self, sums: Tensor) -> Reply[Fence]:
        """By the drafter's thread, after backward: the buckets that were not told, and ``sums``,
        which becomes the sum of all drafters' as well. When everything is summed and nobody else
        reads these gradients any more."""
        for number in range(self._told, len(self.buckets)):
            self.finished(number)
        self._told = 0
        return self.post(self._end, sums, Fence(self.device))

    def _add(self, number: int, complete: Fence) -> None:
        self.pulse.set(f"gradient sum, bucket {number + 1} of {len(self.buckets)}")
        complete.wait(self.device)
        self._adder.add(self._party, self.device, self.buckets[number], self.pulse)

    def _end(self, sums: Tensor, complete: Fence) -> Fence:
        self.pulse.set("gradient sum, end")
        complete.wait(self.device)
        self._adder.add(self._party, self.device, sums, self.pulse)
        self._adder.end(self._party, self.device, self.pulse)
        return Fence(self.device)


class DrafterWorker(Worker):
    """One replica: takes its share of each step's microbatches, adds gradients up, updates."""

    stage: DrafterStage
    ring: Ring
    summer: SumWorker | None = None
    """Null where this drafter is the only one."""

    def build(self, make: Callable[[torch.device], DrafterStage]) -> None:
        self.pulse.set("building the drafter", waiting=True)
        self.stage = make(self.device)
        self.meter = Meter(self.device)
        self.sum_wait = Meter(self.device)
        """From the end of a step's last backward pass until the sum is there."""
        self._before: Fence | None = None
        if self.summer is not None:
            self.summer.buckets = self.stage.buckets()

    def make_ring(self, depth: int, shape: tuple[int, int, int], dtype: torch.dtype) -> Ring:
        slots = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(depth)]
        self.ring = Ring(self.board, slots)
        return self.ring

    def step(
        self, index: int, first: int, share: int, party: int, adder: GradientSum, check: bool
    ) -> tuple[Tensor, Tensor, int, Fence]:
        """This drafter's microbatches ``first .. first + share - 1`` make step ``index``.
        Returns (sums of all drafters, gradient norm, own context tokens, when all is done)."""
        total: Tensor | None = None
        tokens = 0
        for number in range(first, first + share):
            # Only the step's last backward pass leaves gradients as they are to be summed.
            last = number == first + share - 1
            finished = self.summer.finished if self.summer is not None and last else None
            sums, count = self._accumulate(index, number, finished)
            total = sums if total is None else total + sums
            tokens += count
        assert total is not None
        if self.summer is not None:
            self._await_sum(index, self.summer, total)
        self.pulse.set(f"optimizer, step {index + 1}")
        self.meter.begin()
        norm = self.stage.update(index, total)
        done = self.meter.end()
        self._await_device(index)
        self._before = done
        if check:
            self.pulse.set(f"comparing weights, step {index + 1}")
            adder.check_equal(party, index + 1, self.stage.weights(), self.pulse)
        return total, norm, tokens, done

    def _await_sum(self, index: int, summer: SumWorker, total: Tensor) -> None:
        self.pulse.set(f"gradient sum, step {index + 1}")
        self.sum_wait.begin()
        reply = summer.rest(total)
        with self.pulse.waiting("waiting for the sum of gradients"):
            reply.get().wait(self.device)
        self.sum_wait.end()

    def _accumulate(self, index: int, number: int, finished: Finished | None) -> tuple[Tensor, int]:
        filled = self.ring.take(number, self.pulse)
        self.pulse.set(f"drafter forward and backward, step {index + 1}")
        filled.ready.wait(self.device)
        self.meter.begin()
        sums = self.stage.accumulate(filled.batch, filled.features, finished)
        self.ring.release(number, self.meter.end())
        return sums, filled.tokens

    def _await_device(self, index: int) -> None:
        """One step in flight, no more: a device that hangs is seen, and the host keeps ahead."""
        if self._before is not None:
            self.pulse.set(f"device work of step {index}")
            poll(self._before, self.board.check)
