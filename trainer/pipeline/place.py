"""Where a rank stands, and which microbatch goes where: arithmetic that every rank does alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.errors import ConfigError

if TYPE_CHECKING:
    # `python -m trainer` asks for a name here before anything may import torch.
    from trainer.pipeline.plan import Plan

LOCAL_RANKS = "LOCAL_WORLD_SIZE"
"""Set by torchrun, and by no user: who has it is one of its ranks."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""torchrun's, for its ranks."""


@dataclass(frozen=True)
class Place:
    """Where this rank stands. ``nodes`` run the same plan."""

    rank: int
    world: int
    local_rank: int
    targets: int
    drafters: int

    @classmethod
    def from_environment(cls, plan: Plan) -> Place:
        """As torchrun sets it. Raises ConfigError if it does not fit the plan."""
        try:
            rank, world, local_rank, local_world = (
                int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", LOCAL_RANKS)
            )
        except KeyError as error:
            raise ConfigError(
                f"pipeline.executor processes needs torchrun, which sets {error.args[0]}",
                next_step="start with: torchrun --nproc-per-node "
                f"{len(plan.targets) + len(plan.drafters)} -m trainer train CONFIG",
            ) from None
        ranks = len(plan.targets) + len(plan.drafters)
        if local_world != ranks:
            raise ConfigError(
                f"torchrun started {local_world} processes a node; the plan has"
                f" {len(plan.targets)} targets and {len(plan.drafters)} drafters",
                next_step=f"start with --nproc-per-node {ranks}",
            )
        return cls(rank, world, local_rank, len(plan.targets), len(plan.drafters))

    @property
    def per_node(self) -> int:
        return self.targets + self.drafters

    @property
    def node(self) -> int:
        return self.rank // self.per_node

    @property
    def nodes(self) -> int:
        return self.world // self.per_node

    @property
    def is_target(self) -> bool:
        return self.local_rank < self.targets

    @property
    def index(self) -> int:
        """Among this node's targets or drafters."""
        return self.local_rank if self.is_target else self.local_rank - self.targets

    @property
    def leader(self) -> int:
        """The one rank that writes: the first drafter of the first node."""
        return self.targets

    @property
    def first_target(self) -> int:
        """Of the leading rank's node: it makes the held-out features."""
        return 0

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    @property
    def leads_node(self) -> bool:
        """The first drafter of its node."""
        return self.local_rank == self.targets

    @property
    def name(self) -> str:
        role = "target" if self.is_target else "drafter"
        return (
            f"{role} {self.node * (self.targets if self.is_target else self.drafters) + self.index}"
        )

    @property
    def folder(self) -> str:
        """Of its own events, beside the run's."""
        return f"{self.rank:04d}-{self.name.replace(' ', '-')}"

    def target_rank(self, index: int) -> int:
        return self.node * self.per_node + index

    def drafter_rank(self, index: int) -> int:
        return self.node * self.per_node + self.targets + index

    def drafter_ranks(self) -> list[int]:
        """Of all nodes."""
        return [
            node * self.per_node + self.targets + i
            for node in range(self.nodes)
            for i in range(self.drafters)
        ]


@dataclass(frozen=True)
class Deal:
    """Which microbatch goes where, on one node."""

    place: Place
    slots: int
    """Microbatches of a step, over all nodes."""

    @property
    def per_node(self) -> int:
        return self.slots // self.place.nodes

    def of_step(self, turn: int) -> Iterator[tuple[int, int, int, int]]:
        """(slot, target, drafter, number of the drafter's microbatch) of the ``turn``-th step run,
        in order, for this node."""
        for k in range(self.per_node):
            t = turn * self.per_node + k
            drafters = self.place.drafters
            yield (
                self.place.node * self.per_node + k,
                t % self.place.targets,
                t % drafters,
                t // drafters,
            )
