"""Connections and channels of one command: one connection a host, one agent a container."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType

from orchestrator import pct
from orchestrator.agent import loader
from orchestrator.channel import AgentChannel
from orchestrator.connection import HostConnection
from orchestrator.errors import AuthenticationFailed, DflashctlError
from orchestrator.paths import HOST_WORKDIR
from orchestrator.state import LaptopState
from orchestrator.target import HostTarget, Target


def agent_argv(target: Target) -> list[str]:
    """What ssh runs on the host so that the agent answers from inside the container."""
    return pct.exec_argv(
        target.ct, loader.argv(target.settings.python), pct=target.host.settings.pct
    )


def host_agent_argv(host: HostTarget) -> list[str]:
    """The agent on the host itself, for what only the host sees."""
    return loader.argv(host.settings.python)


class Opening:
    """A channel that is being opened while its user does something else."""

    def __init__(self, open_channel: Callable[[], AgentChannel]) -> None:
        self._open = open_channel
        self._channel: AgentChannel | None = None
        self._error: DflashctlError | None = None
        # A daemon: a user who gives up must not wait for a host that does not answer.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._channel = self._open()
        except DflashctlError as error:
            self._error = error

    def result(self) -> AgentChannel:
        """:raises UnreachableError: what kept it from opening."""
        self._thread.join()
        if self._error is not None and not self._may_be_asked():
            raise self._error
        # Again, here: to ask for a password, or to show the fault of ours that ended the thread.
        return self._channel or self._open()

    def _may_be_asked(self) -> bool:
        return isinstance(self._error, AuthenticationFailed) and sys.stdin.isatty()


class Fleet:
    """Opens each connection and each channel once, closes them all at the end. Thread-safe."""

    def __init__(self, state: LaptopState, *, ask: bool = False) -> None:
        """:param ask: prompt for passwords (never where many hosts are reached at once)."""
        self.state = state
        self._ask = ask
        self._lock = threading.Lock()
        self._hosts: dict[HostTarget, HostConnection] = {}
        self._owners: dict[AgentChannel, tuple[HostTarget, HostConnection]] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def connection(self, host: HostTarget) -> HostConnection:
        """The host's connection, opened by its first session."""
        with self._lock:
            return self._hosts.setdefault(host, HostConnection(host, ask=self._ask))

    def container(self, target: Target) -> AgentChannel:
        """A new channel to the agent in a container. Requests may be sent at once.

        :raises UnreachableError: the host cannot be reached.
        """
        place = f"{target.host.address}:{target.host.settings.port or ''}/{target.ct}"
        return self._open(
            target.host, agent_argv(target), target.settings.workdir, place, target.ct
        )

    def opening(self, target: Target) -> Opening:
        """Begin to open a container's channel in the background."""
        return Opening(lambda: self.container(target))

    def host(self, host: HostTarget) -> AgentChannel:
        """A new channel to the agent on a host."""
        place = f"{host.address}:{host.settings.port or ''}"
        return self._open(host, host_agent_argv(host), HOST_WORKDIR, place, None)

    def drop(self, channel: AgentChannel) -> None:
        """Close a channel that failed, and its connection unless the link itself still lives."""
        channel.close()
        with self._lock:
            host, connection = self._owners.pop(channel, (None, None))
            # Only its own connection: another channel may have made a new one meanwhile.
            dead = not channel.link_alive and host and self._hosts.get(host) is connection
            if host and dead:
                del self._hosts[host]
        if connection and dead:
            connection.close()

    def close(self) -> None:
        with self._lock:
            channels, self._owners = list(self._owners), {}
            hosts, self._hosts = list(self._hosts.values()), {}
        for channel in channels:
            channel.close()
        for host in hosts:
            host.close()

    def _open(
        self, host: HostTarget, argv: list[str], workdir: str, place: str, ct: int | None
    ) -> AgentChannel:
        # Imported while pct starts: its 25 ms of importlib.metadata then cost nothing.
        connection = self.connection(host)
        session = connection.session(argv)
        from orchestrator import agent_bundle

        bundle = agent_bundle.bundle()
        place = f"{place} {workdir}"
        channel = AgentChannel(
            session,
            bundle,
            workdir,
            trusted=self.state.agent_of(place) == bundle.digest,
            host=host.name,
            ct=ct,
            on_hello=lambda hello: self._remember(place, hello),
        )
        with self._lock:
            self._owners[channel] = (host, connection)
        return channel

    def _remember(self, place: str, hello: dict[str, object]) -> None:
        # From a temporary folder it is gone at the next boot, or before.
        if hello.get("stored") == "workdir":
            self.state.know_agent(place, str(hello["version"]))
