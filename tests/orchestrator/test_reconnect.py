"""Work under which the link is lost: asked for again, unless it was us who closed it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from orchestrator import reconnect
from orchestrator.agent_failure import explain
from orchestrator.channel import AgentChannel
from orchestrator.errors import ConnectionLost, DflashctlError, HostUnreachable, TransferError
from orchestrator.fleet import Fleet


class Links:
    """Stands for a fleet: closed or not, and what was dropped."""

    def __init__(self) -> None:
        self.closed = False
        self.dropped: list[Any] = []

    def drop(self, channel: Any) -> None:
        self.dropped.append(channel)

    def named(self, error: DflashctlError) -> DflashctlError:
        return error


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "RETRY_S", (0.0, 0.0))


def test_a_lost_link_is_made_anew_and_told() -> None:
    links, told, made = Links(), list[str](), list[int]()

    def work(channel: AgentChannel) -> str:
        made.append(1)
        if len(made) == 1:
            raise ConnectionLost("the connection was lost", host="pve1")
        return "done"

    channels = lambda: cast(AgentChannel, object())  # noqa: E731
    assert reconnect.reconnecting(cast(Fleet, links), channels, work, told.append) == "done"
    assert len(made) == 2 and len(told) == 1 and len(links.dropped) == 1


def test_a_link_that_was_closed_under_a_thread_is_not() -> None:
    """Ctrl-C ends the fleet while a push sends: it must not connect again and push on."""
    links, told, made = Links(), list[str](), list[int]()

    def work(channel: AgentChannel) -> str:
        made.append(1)
        links.closed = True
        raise ConnectionLost("the connection was lost: Channel closed.", host="pve1")

    channels = lambda: cast(AgentChannel, object())  # noqa: E731
    with pytest.raises(ConnectionLost):
        reconnect.reconnecting(cast(Fleet, links), channels, work, told.append)
    assert (len(made), told) == (1, [])


@pytest.mark.parametrize("kind", ["release.missing", "disk.full"])
def test_files_found_damaged_there_are_sent_again_over_the_same_link(kind: str) -> None:
    """A job edited them in place. Nothing else that a push fails by is better a second time."""
    links, told, made = Links(), list[str](), list[AgentChannel]()

    def work(channel: AgentChannel) -> str:
        made.append(channel)
        if len(made) == 1:
            raise explain({"kind": kind, "message": "1 of 3 files"}, host="pve1", ct=200)
        return "done"

    channels = lambda: cast(AgentChannel, object())  # noqa: E731
    if kind == "disk.full":
        with pytest.raises(TransferError):
            reconnect.reconnecting(cast(Fleet, links), channels, work, told.append)
    else:
        assert reconnect.reconnecting(cast(Fleet, links), channels, work, told.append) == "done"
        assert made[0] is made[1]
        assert told == ["pve1/200: 1 of 3 files; sending them again"]
    assert links.dropped == []


@pytest.mark.parametrize(("kind", "attempts"), [(ConnectionLost, 2), (HostUnreachable, 1)])
def test_only_a_host_that_was_there_is_asked_again_for_the_first_channel(
    kind: type[DflashctlError], attempts: int
) -> None:
    """Several containers' first channel needs their host's agent, whose hello may be cut."""
    links, told, asked = Links(), list[str](), list[int]()

    def channels() -> AgentChannel:
        asked.append(1)
        if len(asked) == 1:
            raise kind("gone", host="pve1")
        return cast(AgentChannel, object())

    work = lambda channel: "done"  # noqa: E731
    if kind is HostUnreachable:
        with pytest.raises(HostUnreachable):
            reconnect.reconnecting(cast(Fleet, links), channels, work, told.append)
    else:
        assert reconnect.reconnecting(cast(Fleet, links), channels, work, told.append) == "done"
    assert (len(asked), len(told)) == (attempts, attempts - 1)
