"""What every executor runs: two stages, the batches between them, and the loop's view of both.

    batches(step, slot) → TargetStage.features → DrafterStage.accumulate → (gradient sum) → update

An optimizer step is ``slots`` microbatches, whoever computes them: one drafter all of them, M
drafters ``slots / M`` each. A microbatch is a pure function of (step, slot), so every rank makes
its own and none travels.

Gradients are those of the **sum** of the weighted losses; they are added over slots and drafters,
and ``update`` divides by the weight sum of the whole step. The divisor is therefore global without
being known before the forward pass (D-PACE's weights are not), and a drafter without a single valid
anchor adds zeros like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.buckets import Finished
from trainer.compile_lock import CompileLock
from trainer.data.batch import Batch

if TYPE_CHECKING:
    from trainer.checkpoint import Loaded
    from trainer.objective import StepLoss


class Batches(Protocol):
    """The data of one run. Pure: the same arguments give the same batch, in any process."""

    steps: int
    """Optimizer steps in all."""
    slots: int
    """Microbatches in one optimizer step, over all drafters."""
    shape: tuple[int, int, int]
    """(rows b, length S, anchors a row N) of each microbatch."""

    def __call__(self, step: int, slot: int) -> Batch:
        """Microbatch ``slot`` (0..slots-1) of optimizer step ``step`` (0-based), on the CPU."""

    def epoch(self, step: int) -> int: ...


class TargetStage(Protocol):
    """The frozen target on one device, stopped after its last tapped layer."""

    device: torch.device
    feature_width: int
    """K·H_target: values a token in ``features``."""
    dtype: torch.dtype

    def features(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """[b, S, K·H_target] in tap order, in inference mode, on ``device``; written into ``out``
        (which may lie on another device) if given. ``batch`` may lie on any device."""


class DrafterStage(Protocol):
    """One replica of the drafter with its optimizer, on one device; or one shard of it."""

    device: torch.device

    def accumulate(
        self, batch: Batch, features: Tensor, finished: Finished | None = None
    ) -> Tensor:
        """Forward and backward of one microbatch: adds to the gradients the gradient of the summed
        loss. Returns ``Sums`` as a vector on ``device``, detached, without waiting for it.
        ``batch`` may lie on any device, ``features`` lies on ``device``.

        ``finished`` is called from inside backward with the number of each of ``buckets`` when the
        work that completes it has been launched: 0, 1, and so on. Those it was not called for are
        complete on return, which may be all of them."""

    def measure(self, batch: Batch, features: Tensor) -> Tensor:
        """As ``accumulate``, of a microbatch that nothing is learned from, over the whole
        vocabulary: weights, moments and gradients are afterwards as they were, bit for bit. Between
        steps, when the gradients are zero. All of a drafter's shards measure at the same time."""

    def gradients(self) -> list[Tensor]:
        """The gradient tensors, in one order for all replicas; never None, the same tensors at
        every step (zeroed in place by ``update``), so they may be registered once. None of a shard:
        ``accumulate`` has summed them over the drafters."""

    def buckets(self) -> list[Tensor]:
        """Contiguous pieces of ``gradients``, every element in one of them, in the order in which
        a backward pass completes them. Asked for once, before the first microbatch, where several
        drafters add up; without it ``finished`` is never called."""

    def weights(self) -> list[Tensor]:
        """What must be equal bit for bit in all replicas (of shards: what each holds alike), in one
        order; the tensors themselves."""

    def update(self, step: int, sums: Tensor) -> Tensor:
        """Divide by the weight sum in ``sums`` (of all slots and drafters), clip, step, zero.
        ``step`` is 0-based and sets the learning rate. Returns the gradient's norm before clipping,
        on ``device``. A non-finite norm leaves weights and optimizer as they were; the count is in
        ``state``. Given equal gradients, replicas stay equal bit for bit."""

    def discard(self) -> None:
        """Zero the gradients without a step: what a warm-up ends with."""

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs (fp32 masters, moments, counters), on the CPU. Shards are
        put together for the leading drafter; the others' is empty."""

    def load(self, state: dict[str, Any]) -> None:
        """What ``state`` gave. A shard takes its part when all ``share``."""

    def share(self, broadcast: Callable[[Tensor], None]) -> None:
        """Give every tensor of the state to ``broadcast``, which leaves the leading replica's in
        its place; in one order for all replicas."""


@dataclass(frozen=True)
class Sums:
    """What a step adds up. As a vector it can be summed across replicas like a gradient."""

    loss: float
    weight: float
    tau: float
    """Accepted drafts (the length of the right prefix), summed over blocks."""
    blocks: float
    recalled: float
    """DFlash2's selector, else 0: labels among its candidates; of the slots in ``count``."""
    selected: float
    """Likewise: right choices, given the right predecessor."""
    selected_tau: float
    """Likewise: accepted drafts of the path it takes by itself."""
    correct: list[float]
    """Right first choices at slots 1..B-1."""
    count: list[float]

    @staticmethod
    def vector(found: StepLoss) -> Tensor:
        """f32 [7 + 2(B-1)], in the order of the fields, detached."""
        scalars = [found.loss, found.weight, found.tau, found.blocks]
        none = torch.zeros_like(found.weight)
        scalars += [none, none, none] if found.selector is None else list(found.selector)
        head = torch.stack([t.detach().float() for t in scalars])
        return torch.cat([head, found.correct.float(), found.count.float()])

    @classmethod
    def read(cls, vector: Tensor) -> Sums:
        """Waits for the device."""
        values: list[float] = vector.tolist()
        slots = (len(values) - SCALARS) // 2
        correct, count = values[SCALARS : SCALARS + slots], values[SCALARS + slots :]
        return cls(*values[:SCALARS], correct=correct, count=count)  # type: ignore[misc, arg-type]

    @property
    def mean_loss(self) -> float:
        return self.loss / self.weight if self.weight > 0 else 0.0

    @property
    def accuracy(self) -> list[float]:
        return [c / n if n else 0.0 for c, n in zip(self.correct, self.count, strict=True)]

    @property
    def mean_tau(self) -> float:
        """1 + the mean accepted length of the step's blocks."""
        return 1.0 + self.tau / self.blocks if self.blocks else 1.0

    @property
    def decoded_tau(self) -> float:
        """Of the path that decoding takes: the selector's, where there is one."""
        return self.selector().get("selector_tau", self.mean_tau)

    def selector(self) -> dict[str, float]:
        """What DFlash2 adds to a step's line: candidate recall, accuracy, and its own tau."""
        slots = sum(self.count)
        if not self.recalled or not slots:
            return {}
        return {
            "selector_recall": self.recalled / slots,
            "selector_accuracy": self.selected / slots,
            "selector_tau": 1.0 + self.selected_tau / self.blocks,
        }


SCALARS = 7
"""Fields of ``Sums`` before the lists."""

WEIGHT_SUM = 1
"""Index of the weight sum in the vector of ``Sums``."""


@dataclass(frozen=True)
class StepResult:
    step: int
    """0-based."""
    sums: Tensor
    """``Sums`` over all slots and drafters, as a vector; reading it waits for the device."""
    gradient_norm: Tensor
    """0-d; before clipping."""
    tokens: int
    """Context tokens of all slots."""
    telemetry: dict[str, float] = field(default_factory=dict)
    """Fields of ``telemetry.StepLine`` that the executor knows: target_idle, drafter_idle,
    queue_depth, sum_wait_s, recompiles, lock_waits, lock_wait_s."""


ReadCheckpoint = Callable[[], "Loaded | None"]
"""Of ``checkpoint.CheckpointStore``; raises for one that must not be resumed."""

EventSink = Callable[..., None]
"""``RunWriter.event``: (name, **detail)."""


MakeSharded = Callable[[torch.device, dist.ProcessGroup], DrafterStage]
"""(device, the group of all drafters) → a stage whose drafter is cut up over the group; all of the
group call it, and the stage's methods, at the same time (``sharded.py``)."""


@dataclass(frozen=True)
class Job:
    """What an executor needs. The factories build a stage on a device, from scratch, by config."""

    batches: Batches
    make_target: Callable[[torch.device], TargetStage]
    make_drafter: Callable[[torch.device], DrafterStage]
    event: EventSink
    compile_lock: CompileLock = field(default_factory=CompileLock)
    """The one that ``make_drafter`` compiles with."""
    key: str = ""
    """Equal where config and data are equal: ranks of several processes compare it."""
    make_sharded: MakeSharded | None = None
    """Instead of ``make_drafter`` under ``pipeline.shard_drafters``."""
    held_out: Sequence[Batch] = ()
    """What ``Executor.measure`` measures; of the shape of ``batches``."""


class Executor(Protocol):
    def start(self) -> None:
        """Build the stages and warm every shape up, with ``compiling``/``compiled`` events; what is
        compiled later is a recompile."""

    def step(self, index: int) -> StepResult:
        """One optimizer step, 0-based. Raises the first cause of a stage's failure."""

    def agreed_stop(self, received: int | None) -> int | None:
        """After each step: the signal with which all ranks leave after this step, or null. With
        several processes that is some steps after one of them received it."""

    def measure(self) -> Sums | None:
        """``Job.held_out`` by the first replica, between steps; null where there is none, and on
        ranks that do not lead. All ranks call it."""

    def state(self) -> dict[str, Any]:
        """``DrafterStage.state`` of the first replica (empty on ranks that do not write)."""

    def resume(self, read: ReadCheckpoint) -> tuple[int, float | None]:
        """Into every replica what ``read`` gives; after ``start``. (steps done, best so far): 0 and
        null where there is none. With several processes the leading rank alone reads: its
        checkpoints may lie where no other node sees them."""

    def close(self) -> None: ...


def resume_alone(
    read: ReadCheckpoint, load: Callable[[dict[str, Any]], None]
) -> tuple[int, float | None]:
    """``Executor.resume`` in one process."""
    loaded = read()
    if loaded is None:
        return 0, None
    load(loaded.state)
    return loaded.step, loaded.best
