"""What the ranks of the processes executor tell each other after each step."""

from __future__ import annotations

import signal
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.pipeline.gauge import Usage
from trainer.pipeline.place import Place
from trainer.stopping import SIGNALS


class Round:
    """What all ranks tell each other after each step, without waiting within one: signals they
    received, and how busy they have been.

    The round of step k is counted at the end of step k+1; if a rank had a signal, step k+2 is the
    last of all.
    """

    def __init__(self, place: Place) -> None:
        self.group: Any = None
        self.next_is_last = False
        self._place = place
        self._signal: int | None = None
        self._counting: deque[tuple[Any, Tensor]] = deque()
        drafters = len(place.drafter_ranks())
        self.targets = Usage(place.world - drafters)
        self.drafters = Usage(drafters)

    def hold(self, received: int | None, usage: Usage) -> int | None:
        """The agreed signal once the step that ends now was the last."""
        if self.next_is_last:
            return self._signal
        told = torch.zeros(8, dtype=torch.float64)
        if received is not None:
            told[SIGNALS.index(signal.Signals(received))] = 1
        first = 2 if self._place.is_target else 5
        told[first : first + 3] = torch.tensor([usage.busy_s, usage.idle_s, usage.memory_gb])
        self._counting.append((dist.all_reduce(told, group=self.group, async_op=True), told))
        if len(self._counting) > 1:
            work, counted = self._counting.popleft()
            work.wait()
            self._read(counted.tolist())
        return None

    def _read(self, counted: list[float]) -> None:
        self.targets = Usage(self.targets.workers, *counted[2:5])
        self.drafters = Usage(self.drafters.workers, *counted[5:8])
        for number, votes in zip(SIGNALS, counted, strict=False):
            if votes:
                self._signal, self.next_is_last = int(number), True
