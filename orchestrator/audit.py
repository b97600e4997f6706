"""One line on the host for each changing action: who, when, what, and how it ended.

The host's agent keeps them in ``/var/lib/dflashctl/audit.log``, which only root reads. Its channel
opens beside the action itself, so that the line costs next to nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from orchestrator.channel import AgentChannel
from orchestrator.errors import ConnectionLost, DflashctlError, UnreachableError
from orchestrator.fleet import Fleet, Notice, Opening
from orchestrator.launch import whoami
from orchestrator.target import Target

PARTING_S = 1.0


@dataclass
class _Line:
    """What the host of ``target`` is to keep."""

    fleet: Fleet
    target: Target
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        self.opening = Opening(lambda: self.fleet.host(self.target.host))


@contextmanager
def audited(
    fleet: Fleet, target: Target, action: str, notice: Notice, **facts: Any
) -> Iterator[dict[str, Any]]:
    """Write the line when the block has ended, well or not. What the block adds is kept too.

    :param facts: JSON values; never a secret, nor a command's arguments, which may hold one.
    """
    with audited_each(fleet, [(target, facts)], action, notice) as (line,):
        yield line


@contextmanager
def audited_each(
    fleet: Fleet,
    wanted: Sequence[tuple[Target, Mapping[str, Any]]],
    action: str,
    notice: Notice,
) -> Iterator[list[dict[str, Any]]]:
    """The same of one action in several containers: a line each, with the outcome of the whole."""
    lines = [
        _Line(fleet, target, {"action": action, "ct": target.ct, **facts})
        for target, facts in wanted
    ]
    try:
        yield [line.facts for line in lines]
    except UnreachableError:
        # Of the host itself: nothing can be written there, and the error says why.
        raise
    except KeyboardInterrupt as error:
        _write_in_passing(lines, _words(error), notice)
        raise
    except BaseException as error:
        for line in lines:
            _write(line, _words(error), notice)
        raise
    for line in lines:
        _write(line, "ok", notice)


def _words(error: BaseException) -> str:
    said = error.what if isinstance(error, DflashctlError) else ""
    return f"{type(error).__name__}: {said}".rstrip(": ")


def _write(line: _Line, result: str, notice: Notice) -> None:
    try:
        channel = _answering(line)
        # Once, for a second line would tell of a second action.
        channel.call("audit", who=whoami(), **line.facts, result=result)
    except DflashctlError as error:
        # The action is what counts; that its host could not note it is told.
        notice(f"the host keeps no record of this {line.facts['action']}: {error.what}")


def _write_in_passing(lines: Sequence[_Line], result: str, notice: Notice) -> None:
    """Who leaves waits no longer than ``PARTING_S`` for all: a dead link is known after 9 s."""
    said: list[str] = []
    writing = [
        threading.Thread(target=_write, args=(line, result, said.append), daemon=True)
        for line in lines
    ]
    for thread in writing:
        thread.start()
    until = time.monotonic() + PARTING_S
    for line, thread in zip(lines, writing, strict=True):
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            action = line.facts["action"]
            said.append(f"{line.target.host.name} has not yet taken its record of this {action}")
    for text in dict.fromkeys(said):
        notice(text)


def _answering(line: _Line) -> AgentChannel:
    """The host's agent, made anew where the action went on over a new link."""
    channel = line.opening.result()
    try:
        channel.hello()
        if not channel.is_over:
            return channel
    except ConnectionLost:
        pass
    return line.fleet.host(line.target.host)
