"""Steps one after the other, by functions from a mapping; stops at the first that fails."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import DflashctlError, NotFoundError
from orchestrator.inventory import nearest
from orchestrator.playbook.actions import Action
from orchestrator.playbook.book import BoundStep
from trainer.telemetry import duration


@dataclass(frozen=True)
class Done:
    """What a step says of itself when it went well."""

    message: str
    data: dict[str, Any] = field(default_factory=dict)


Perform = Callable[[Any], Done]
"""Takes the step's action; raises a :class:`DflashctlError` where it fails."""


@dataclass(frozen=True)
class Result:
    """One step's end."""

    number: int
    count: int
    step: BoundStep
    seconds: float
    done: Done | None = None
    error: DflashctlError | None = None
    skipped: bool = False

    def line(self, width: int) -> str:
        """The status line; ``width`` is that of the longest step name."""
        head = f"{self.number:>{len(str(self.count))}}/{self.count} {self.step.name:<{width}}"
        if self.skipped:
            return f"{head}  skipped"
        if self.error is not None:
            return f"{head}  FAILED {duration(self.seconds):>6}"
        message = self.done.message if self.done else ""
        return f"{head}  ok     {duration(self.seconds):>6}  {message}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        state = "skipped" if self.skipped else "failed" if self.error else "ok"
        found: dict[str, Any] = {
            "step": self.step.name,
            "action": self.step.kind,
            "state": state,
            "seconds": round(self.seconds, 3),
        }
        if self.done:
            found |= {"message": self.done.message, "data": self.done.data}
        if self.error:
            found |= {"error": self.error.as_dict()}
        return found


def start_index(steps: Sequence[BoundStep], start_at: str | None) -> int:
    """The index of a step given by name or number.

    :raises NotFoundError: there is no such step.
    """
    if start_at is None:
        return 0
    names = [step.name for step in steps]
    if start_at in names:
        return names.index(start_at)
    if start_at.isdecimal() and 1 <= int(start_at) <= len(steps):
        return int(start_at) - 1
    raise NotFoundError(
        f"there is no step {start_at!r}{nearest(start_at, names)}",
        next_step="`--check` lists the steps",
    )


def run(
    steps: Sequence[BoundStep], actions: Mapping[str, Perform], first: int = 0
) -> Iterator[Result]:
    """Each step's result as it ends; the last one holds the error if a step failed."""
    for index, step in enumerate(steps):
        number = index + 1
        if index < first:
            yield Result(number, len(steps), step, 0.0, skipped=True)
            continue
        began = time.monotonic()
        try:
            done = actions[step.kind](step.action)
        except DflashctlError as error:
            yield Result(number, len(steps), step, time.monotonic() - began, error=error)
            return
        yield Result(number, len(steps), step, time.monotonic() - began, done)


def resume_argv(
    name: str, step: str, words: Sequence[str], settings: Sequence[str], run_id: str | None
) -> list[str]:
    """The command that goes on at ``step``. ``words`` are the target's, as they were given."""
    argv = ["dflashctl", "play", name, *words]
    for setting in settings:
        argv += ["--set", setting]
    if run_id:
        argv += ["--run", run_id]
    return [*argv, "--start-at", step]


def describe(step: BoundStep) -> list[str]:
    """What a step would do, one line for each parameter that is set."""
    lines = []
    for name, value in _given(step.action).items():
        shown = shlex.join(value) if name == "command" else _shown(value)
        lines.append(f"{name}: {shown}")
    return lines


def _given(action: Action) -> dict[str, Any]:
    set_by_user = action.model_dump(exclude_unset=True)
    return {name: value for name, value in set_by_user.items() if value not in (None, {}, [])}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
