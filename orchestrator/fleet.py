"""Connections and channels of one command: one connection a host, one agent a container."""

from __future__ import annotations

import threading
from types import TracebackType

from orchestrator import agent_bundle, pct
from orchestrator.agent import loader
from orchestrator.channel import AgentChannel
from orchestrator.connection import HostConnection
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


class Fleet:
    """Opens each connection and each channel once, closes them all at the end. Thread-safe."""

    def __init__(self, state: LaptopState, *, ask: bool = False) -> None:
        """:param ask: prompt for passwords (never where many hosts are reached at once)."""
        self.state = state
        self._ask = ask
        self._lock = threading.Lock()
        self._hosts: dict[HostTarget, HostConnection] = {}
        self._channels: list[AgentChannel] = []

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

    def host(self, host: HostTarget) -> AgentChannel:
        """A new channel to the agent on a host."""
        place = f"{host.address}:{host.settings.port or ''}"
        return self._open(host, host_agent_argv(host), HOST_WORKDIR, place, None)

    def reconnect(self, host: HostTarget) -> None:
        """Drop a host's connection, so that the next channel opens a new one."""
        with self._lock:
            old = self._hosts.pop(host, None)
        if old is not None:
            old.close()

    def close(self) -> None:
        with self._lock:
            channels, self._channels = self._channels, []
            hosts, self._hosts = list(self._hosts.values()), {}
        for channel in channels:
            channel.close()
        for host in hosts:
            host.close()

    def _open(
        self, host: HostTarget, argv: list[str], workdir: str, place: str, ct: int | None
    ) -> AgentChannel:
        bundle = agent_bundle.bundle()
        place = f"{place} {workdir}"
        session = self.connection(host).session(argv)
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
            self._channels.append(channel)
        return channel

    def _remember(self, place: str, hello: dict[str, object]) -> None:
        # From a temporary folder it is gone at the next boot, or before.
        if hello.get("stored") == "workdir":
            self.state.know_agent(place, str(hello["version"]))
