"""One drafter's steps, features at hand, no target: what ``overlap`` and ``sharded`` time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from measure import settle
from torch import Tensor
from workload import Workload

from trainer.pipeline.stages import DrafterStage
from trainer.target import compute_dtype

Finished = Callable[[int], None]
Rest = Callable[[Tensor], None]


class Steps:
    def __init__(self, load: Workload, stage: DrafterStage, place: int = 0, drafters: int = 1):
        """``place`` among so many ``drafters``: which microbatches are this one's."""
        self.load, self.stage, self.place, self.drafters = load, stage, place, drafters
        shape = (*load.batches.shape[:2], load.drafter_config.feature_size)
        random = torch.Generator(stage.device).manual_seed(place)
        made = torch.randn(shape, device=stage.device, generator=random)
        self.features = made.to(compute_dtype("auto", stage.device))

    def warm_up(self) -> None:
        self.stage.accumulate(self.load.batches(0, 0), self.features)
        self.stage.discard()
        settle(self.stage.device)

    def step(
        self,
        index: int,
        finished: Finished | None = None,
        rest: Rest | None = None,
        *,
        share: int = 1,
    ) -> Tensor:
        """Of ``share`` microbatches, summed by ``rest`` and, beside the last backward pass, by
        ``finished``; both null: without a sum."""
        total: Tensor | None = None
        for number in range(share):
            batch = self.load.batches(index, self.place + number * self.drafters)
            told = finished if number == share - 1 else None
            sums = self.stage.accumulate(batch, self.features, told)
            total = sums if total is None else total + sums
        assert total is not None
        if rest is not None:
            rest(total)
        self.stage.update(index, total)
        return total

    def seconds(
        self,
        count: int,
        finished: Finished | None = None,
        rest: Rest | None = None,
        *,
        share: int = 1,
        warm: int = 1,
    ) -> float:
        """Of a step, after ``warm`` that are not timed."""
        for index in range(warm + count):
            if index == warm:
                settle(self.stage.device)
                began = time.perf_counter()
            self.step(index, finished, rest, share=share)
        settle(self.stage.device)
        return (time.perf_counter() - began) / count
