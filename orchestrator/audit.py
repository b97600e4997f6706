"""One line on the host for each changing action: who, when, what, and how it ended.

The host's agent keeps them in ``/var/lib/dflashctl/audit.log``, which only root reads. Its channel
opens beside the action itself, so that the line costs next to nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from orchestrator.channel import AgentChannel
from orchestrator.errors import ConnectionLost, DflashctlError, UnreachableError
from orchestrator.fleet import Fleet, Notice, Opening
from orchestrator.launch import whoami
from orchestrator.target import Target

PARTING_S = 1.0


@contextmanager
def audited(
    fleet: Fleet, target: Target, action: str, notice: Notice, **facts: Any
) -> Iterator[dict[str, Any]]:
    """Write the line when the block has ended, well or not. What the block adds is kept too.

    :param facts: JSON values; never a secret, nor a command's arguments, which may hold one.
    """
    opening = Opening(lambda: fleet.host(target.host))
    line: dict[str, Any] = {"action": action, "ct": target.ct, **facts}
    try:
        yield line
    except UnreachableError:
        # Of the host itself: nothing can be written there, and the error says why.
        raise
    except KeyboardInterrupt as error:
        _write_in_passing(fleet, target, opening, {**line, "result": _words(error)}, notice)
        raise
    except BaseException as error:
        _write(fleet, target, opening, {**line, "result": _words(error)}, notice)
        raise
    _write(fleet, target, opening, {**line, "result": "ok"}, notice)


def _words(error: BaseException) -> str:
    said = error.what if isinstance(error, DflashctlError) else ""
    return f"{type(error).__name__}: {said}".rstrip(": ")


def _write(
    fleet: Fleet, target: Target, opening: Opening, line: dict[str, Any], notice: Notice
) -> None:
    try:
        channel = _answering(fleet, target, opening)
        # Once, for a second line would tell of a second action.
        channel.call("audit", who=whoami(), **line)
    except DflashctlError as error:
        # The action is what counts; that its host could not note it is told.
        notice(f"the host keeps no record of this {line['action']}: {error.what}")


def _write_in_passing(
    fleet: Fleet, target: Target, opening: Opening, line: dict[str, Any], notice: Notice
) -> None:
    """Who leaves waits no longer than ``PARTING_S``: a dead link is known after 9 s."""
    said: list[str] = []
    given = (fleet, target, opening, line, said.append)
    writing = threading.Thread(target=_write, args=given, daemon=True)
    writing.start()
    writing.join(PARTING_S)
    if writing.is_alive():
        said.append(f"the host has not yet taken its record of this {line['action']}")
    for text in tuple(said):
        notice(text)


def _answering(fleet: Fleet, target: Target, opening: Opening) -> AgentChannel:
    """The host's agent, made anew where the action went on over a new link."""
    channel = opening.result()
    try:
        channel.hello()
        if not channel.is_over:
            return channel
    except ConnectionLost:
        pass
    return fleet.host(target.host)
