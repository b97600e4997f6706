"""One play: its containers, its channels, and what earlier steps leave for later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from orchestrator import orders
from orchestrator.audit import audited
from orchestrator.channel import AgentChannel
from orchestrator.fleet import Fleet, Notice
from orchestrator.laptop_path import laptop_path
from orchestrator.paths import LaptopPaths
from orchestrator.release import Release
from orchestrator.run import RunRef
from orchestrator.target import Target

Show = Callable[[bytes], None]
Choose = Callable[[str | None], list[RunRef]]
"""The runs that a run id (or None: the newest of the targets) means."""


@dataclass
class Stage:
    """What every action is given beside its own parameters."""

    fleet: Fleet
    laptop: LaptopPaths
    targets: Sequence[Target]
    choose: Choose
    notice: Notice
    show: Show
    """Takes the output of commands."""
    refs: list[RunRef] = field(default_factory=list)
    """The runs that `launch` started, or that were named."""
    code: str | None = None
    pushed: dict[str, str] = field(default_factory=dict)
    """Target name → path of its release."""
    _channels: dict[str, AgentChannel] = field(default_factory=dict)

    def audited(
        self, target: Target, action: str, **facts: Any
    ) -> AbstractContextManager[dict[str, Any]]:
        return audited(self.fleet, target, action, self.notice, **facts)

    def release(self, code: str | None, config: str | None) -> Release:
        return orders.take_code(self.laptop, laptop_path(code) if code else None, config)

    def runs(self, run: str | None) -> list[RunRef]:
        """The run named, else those of this play, else the newest of the targets."""
        if run:
            return self.choose(run)
        return self.refs or self.choose(None)

    def each(self) -> Iterator[tuple[Target, AgentChannel]]:
        for target in self.targets:
            yield target, self.channel(target)

    def channel(self, target: Target) -> AgentChannel:
        """One channel a container for the whole play; a dead one is opened again."""
        known = self._channels.get(target.name)
        if known is not None and not known.link_alive:
            self.fleet.drop(known)
            known = None
        if known is None:
            known = self._channels[target.name] = self.fleet.container(target)
        return known
