"""The sum of gradients over ranks: an all-reduce a bucket, begun while backward goes on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.pipeline.device import Meter


class AllReduce:
    """Of one drafter rank. Its backend has a thread or stream of its own, which waits for what the
    caller has launched so far; every rank comes to the same buckets in the same order."""

    def __init__(self, buckets: list[Tensor], group: Any, device: torch.device) -> None:
        """In place, in ``buckets`` of gradients."""
        self._buckets, self._group = buckets, group
        self._works: list[Any] = []
        self._wait = Meter(device)
        self._alone = dist.get_world_size(group) == 1

    def finished(self, number: int) -> None:
        """From inside backward: what has been launched completes the bucket."""
        self._begin(self._buckets[number])

    def rest(self, sums: Tensor) -> None:
        """The buckets that backward did not tell, and ``sums``, in place; what the caller launches
        afterwards comes after them all."""
        self._wait.begin()
        for bucket in self._buckets[len(self._works) :]:
            self._begin(bucket)
        self._begin(sums)
        for work in self._works:
            work.wait()
        self._works.clear()
        self._wait.end()

    def waited_s(self) -> float | None:
        """In ``rest``, since the start; null for a rank that is the only one."""
        return None if self._alone else self._wait.busy_s

    def _begin(self, tensor: Tensor) -> None:
        self._works.append(dist.all_reduce(tensor, group=self._group, async_op=True))
