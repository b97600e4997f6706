"""Connections and channels of one command: one connection a host, one agent a container."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from orchestrator import pct
from orchestrator.agent import loader
from orchestrator.channel import START_S, AgentChannel, Link
from orchestrator.connection import CHANNELS, HostConnection, Notice
from orchestrator.errors import (
    AuthenticationFailed,
    ConnectionLost,
    DflashctlError,
    HostKeyMismatch,
    HostUnreachable,
    LoginShellBroken,
)
from orchestrator.paths import HOST_WORKDIR
from orchestrator.relay import RELAYS, RelayLink
from orchestrator.state import LaptopState
from orchestrator.target import HostTarget, Target

if TYPE_CHECKING:
    from orchestrator.agent_bundle import Bundle

# Channels of its own that one verb may keep open on a host: the others are for the host's agent,
# and for a second verb.
KEPT = CHANNELS - 2
OF_THE_HOST = (
    HostUnreachable,
    AuthenticationFailed,
    HostKeyMismatch,
    ConnectionLost,
    LoginShellBroken,
)


def agent_argv(target: Target) -> list[str]:
    """What ssh runs on the host so that the agent answers from inside the container."""
    return pct.exec_argv(
        target.ct, loader.argv(target.settings.python), pct=target.host.settings.pct
    )


def relayed_argv(target: Target) -> list[str]:
    """The same as the host's own agent runs it, for one of several."""
    return agent_argv(target) if target.host.settings.enter == "pct" else beside_argv(target)


def beside_argv(target: Target) -> list[str]:
    """A further agent, without the 0.5 to 1 s of the host's processor that ``pct`` takes."""
    return pct.attach_argv(target.ct, loader.argv(target.settings.python))


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

    def wait(self) -> None:
        """Until the far side has been asked to start the agent, or cannot be."""
        self._thread.join()

    def result(self) -> AgentChannel:
        """:raises UnreachableError: what kept it from opening."""
        self.wait()
        if self._error is not None and not self._may_be_asked():
            raise self._error
        # Again, here: to ask for a password, or to show the fault of ours that ended the thread.
        return self._channel or self._open()

    def _may_be_asked(self) -> bool:
        return isinstance(self._error, AuthenticationFailed) and sys.stdin.isatty()


@dataclass(frozen=True)
class _Owner:
    """What a channel stands on."""

    host: HostTarget
    connection: HostConnection
    carrier: AgentChannel | None = None
    """Of a relayed channel: the host's agent's. Whether the link lives is known by this one."""


class _Shared:
    """The one channel to a host's agent, and the places on it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while it is opened."""
        self.channel: AgentChannel | None = None
        self.places = threading.BoundedSemaphore(RELAYS)


class Fleet:
    """Opens each connection and each channel once, closes them all at the end. Thread-safe."""

    def __init__(
        self,
        state: LaptopState,
        *,
        ask: bool = False,
        patient: bool = True,
        notice: Notice = lambda text: None,
        waiting: Notice = lambda text: None,
    ) -> None:
        """:param ask: prompt for passwords (never where many hosts are reached at once).
        :param patient: whether a frozen container is waited for; it may thaw.
        :param waiting: told what takes long, where nobody needs to know but who sits there.
        """
        self.state = state
        self.asks = ask
        self._patient = patient
        self._notice = notice
        self._waiting = waiting
        self.closed = False  # what was begun in threads is not to connect again
        self._lock = threading.Lock()
        self._hosts: dict[HostTarget, HostConnection] = {}
        self._shared: dict[HostTarget, _Shared] = {}
        self._owners: dict[AgentChannel, _Owner] = {}
        self._crowded: set[HostTarget] = set()
        """Hosts whose containers are reached through their own agent."""
        self._names: dict[tuple[str, int], str] = {}
        """What the user calls the containers of which there was talk."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def connection(self, host: HostTarget) -> HostConnection:
        """The host's connection, opened by its first session."""
        with self._lock:
            if host not in self._hosts:
                self._hosts[host] = HostConnection(
                    host, ask=self.asks, notice=self._notice, waiting=self._waiting
                )
            return self._hosts[host]

    def expect(self, targets: Iterable[Target]) -> None:
        """Say what will be asked at once: several containers of a host go through its own agent.

        One alone is reached directly, which is a process and a round trip less.
        """
        targets = list(targets)
        counts = Counter(target.host for target in targets)
        with self._lock:
            self._names |= {(target.host.name, target.ct): target.name for target in targets}
            self._crowded |= {host for host, count in counts.items() if count > 1}

    def named(self, error: DflashctlError) -> DflashctlError:
        """``error`` with its container's name, which a channel does not know: one container has one
        name in all that a person reads, whatever it is that tells of it."""
        if error.host is not None and error.ct is not None:
            error.container = self._names.get((error.host, error.ct))
        return error

    def _name(self, host: HostTarget, ct: int | None) -> str:
        return host.name if ct is None else self._names.get((host.name, ct), f"{host.name}/{ct}")

    def room(self, host: HostTarget) -> int:
        """How many channels to containers of a host may stay open.

        :raises UnreachableError: the host cannot be reached.
        """
        return KEPT if self.carrier(host) is None else RELAYS

    def container(self, target: Target) -> AgentChannel:
        """A new channel to the agent in a container. Requests may be sent at once.

        :raises UnreachableError: the host cannot be reached.
        """
        host = target.host
        with self._lock:
            self._names[host.name, target.ct] = target.name
        carrier = self.carrier(host)
        if carrier is None:
            return self._direct(target, agent_argv(target))
        places = self._shared[host].places
        places.acquire()
        link = RelayLink(carrier, target.ct, relayed_argv(target), _program().data, places.release)
        return self._adopt_container(target, _Owner(host, self.connection(host), carrier), link)

    def beside(self, target: Target) -> Callable[[], AgentChannel] | None:
        """Opens a further session to a container that is reached directly; None where all of them
        share the one of the host's agent. Where LXC's own tool cannot enter, it says so by failing.
        """
        if target.host in self._crowded:
            return None
        return partial(self._direct, target, beside_argv(target))

    def _direct(self, target: Target, argv: list[str]) -> AgentChannel:
        connection = self.connection(target.host)
        owner = _Owner(target.host, connection)
        return self._adopt_container(target, owner, connection.session(argv))

    def _adopt_container(self, target: Target, owner: _Owner, link: Link) -> AgentChannel:
        place = f"{target.host.address}:{target.host.settings.port or ''}/{target.ct}"
        workdir = target.settings.workdir
        return self._adopt(owner, link, workdir=workdir, place=place, ct=target.ct)

    def opening(self, target: Target) -> Opening:
        """Begin to open a container's channel in the background."""
        return Opening(lambda: self.container(target))

    def host(self, host: HostTarget) -> AgentChannel:
        """The channel to the agent on a host: one for all who ask, made anew once it is dead.

        :raises UnreachableError: the host cannot be reached.
        """
        with self._lock:
            shared = self._shared.setdefault(host, _Shared())
        connection = self.connection(host)
        # Before the lock: all who wait for a dead host wait for one time-out.
        connection.open()
        with shared.lock:
            if shared.channel is None or shared.channel.is_over:
                shared.channel = self._adopt(
                    _Owner(host, connection),
                    connection.session(host_agent_argv(host)),
                    workdir=HOST_WORKDIR,
                    place=f"{host.address}:{host.settings.port or ''}",
                    ct=None,
                )
            return shared.channel

    def drop(self, channel: AgentChannel) -> None:
        """Close a channel that failed, and its connection unless the link itself still lives."""
        channel.close()
        with self._lock:
            owner = self._owners.pop(channel, None)
            if owner is None or (owner.carrier or channel).link_alive:
                return
            # Only its own connection: another channel may have made a new one meanwhile.
            if self._hosts.get(owner.host) is owner.connection:
                del self._hosts[owner.host]
        owner.connection.close()

    def close(self) -> None:
        self.closed = True
        with self._lock:
            owners, self._owners = self._owners, {}
            hosts, self._hosts = list(self._hosts.values()), {}
        # What is relayed first: it says goodbye on the host's channel.
        for channel in sorted(owners, key=lambda one: owners[one].carrier is None):
            channel.close()
        for host in hosts:
            host.close()

    def carrier(self, host: HostTarget) -> AgentChannel | None:
        """The host's agent, where containers are reached through it and it can run."""
        if host not in self._crowded:
            return None
        channel = self.host(host)
        try:
            channel.hello()
        except OF_THE_HOST:
            raise
        except DflashctlError as error:
            with self._lock:
                told = host not in self._crowded
                self._crowded.discard(host)
            if not told:
                self._notice(
                    f"{host.name}: its containers are asked through {CHANNELS} ssh sessions in "
                    f"turns, because the agent cannot run on the host itself: {error.what}"
                )
            return None
        return channel

    def _adopt(
        self, owner: _Owner, link: Link, *, workdir: str, place: str, ct: int | None
    ) -> AgentChannel:
        place = f"{place} {workdir}"
        program = _program()
        # Through its host's agent a frozen container is not even entered.
        on_late = None
        if owner.carrier is None:
            on_late = partial(self._ask_beside, owner)
        channel = AgentChannel(
            link,
            program,
            workdir,
            trusted=self.state.agent_of(place) == program.digest,
            host=owner.host.name,
            ct=ct,
            on_hello=lambda hello: self._remember(place, hello),
            queued=(lambda: link.waiting) if isinstance(link, RelayLink) else None,
            on_late=on_late,
            on_no_word=partial(_look_at_shell, owner, ct),
        )
        with self._lock:
            self._owners[channel] = owner
        return channel

    def _ask_beside(self, owner: _Owner, channel: AgentChannel) -> None:
        """Ask the host of a container that says nothing: a frozen one never will."""
        host, ct = owner.host, channel.ct
        if channel.is_over:
            return
        # Over a slow link the host's answer is seconds away too.
        name = self._name(host, ct)
        self._waiting(f"{name}: starting the agent …")
        broken = _look_at_shell(owner, ct, "", None)
        if broken is not None and not channel.has_spoken:
            channel.give_up(broken)
        if broken is not None or ct is None:
            return
        try:
            found = self.host(host).call("probe", side="host", ct=ct, names=["cgroup_events"])
            is_frozen = pct.FROZEN.search(str(found["probes"]["cgroup_events"].get("value")))
        except (DflashctlError, KeyError):
            is_frozen = None
        if channel.is_over or channel.has_spoken:
            return
        if is_frozen and not self._patient:
            channel.give_up(pct.frozen(host.name, ct))
            return
        state = "is frozen" if is_frozen else "has not answered yet"
        self._notice(f"{name} {state}: waiting up to {START_S:.0f} s for it")

    def _remember(self, place: str, hello: dict[str, object]) -> None:
        # From a temporary folder it is gone at the next boot, or before.
        if hello.get("stored") == "workdir":
            self.state.know_agent(place, str(hello["version"]))


def _look_at_shell(
    owner: _Owner, ct: int | None, heard: str, status: int | None
) -> DflashctlError | None:
    """Whether it is the host's login shell that never ran our command."""
    if owner.carrier is not None or owner.connection.shell_runs() is not False:
        return None
    user = owner.connection.user
    return pct.broken_shell(heard, status, host=owner.host.name, user=user, ct=ct)


def _program() -> Bundle:
    # Imported while pct starts: its 25 ms of importlib.metadata then cost nothing.
    from orchestrator import agent_bundle

    return agent_bundle.bundle()
