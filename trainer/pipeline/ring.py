"""The feature slots of one drafter: preallocated, filled and emptied in one order.

Microbatch i of a drafter always uses slot ``i % depth``, whoever computes it. With slots taken from
a pool instead, a later microbatch could hold the last free slot while the drafter waits for an
earlier one, and nothing would move again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data.batch import Batch
from trainer.pipeline.board import Board, Pulse
from trainer.pipeline.device import Fence


@dataclass(frozen=True)
class Filled:
    batch: Batch
    features: Tensor
    """[b, S, K·H_target] in the slot."""
    tokens: int
    """Context tokens of the batch."""
    ready: Fence


class Ring:
    """A bounded queue whose entries are slots; its bound is the targets' back-pressure."""

    def __init__(self, board: Board, slots: list[Tensor]) -> None:
        self._board = board
        self._slots = slots
        self._filled: dict[int, Filled] = {}
        self._released = 0
        self._done: list[Fence | None] = [None] * len(slots)

    def claim(self, index: int, pulse: Pulse) -> Tensor:
        """Slot of microbatch ``index``, once its previous user has been released by the host.
        What is launched into it must come after ``wait_free``."""
        depth = len(self._slots)
        self._board.wait(lambda: index < self._released + depth, pulse, "waiting for a free slot")
        return self._slots[index % depth]

    def wait_free(self, index: int, device: torch.device) -> None:
        """Work launched on ``device`` from now on comes after the slot's previous use."""
        done = self._done[index % len(self._slots)]
        if done is not None:
            done.wait(device)

    def publish(self, index: int, filled: Filled) -> None:
        with self._board.changed:
            self._filled[index] = filled
            self._board.changed.notify_all()

    def take(self, index: int, pulse: Pulse) -> Filled:
        """Microbatch ``index``, once it is there; its work must come after ``ready``."""
        self._board.wait(lambda: index in self._filled, pulse, "waiting for features")
        return self._filled[index]

    def release(self, index: int, done: Fence) -> None:
        """The slot may be filled again after ``done``. In order of ``index``."""
        with self._board.changed:
            del self._filled[index]
            self._done[index % len(self._slots)] = done
            self._released = index + 1
            self._board.changed.notify_all()

    def depth_now(self) -> int:
        """Filled slots."""
        with self._board.changed:
            return len(self._filled)
