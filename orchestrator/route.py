"""How ssh would reach a host, as data: OpenSSH's own reading of the user's configuration.

``ssh -G`` resolves Include, Match, aliases and tokens by the client's own rules in about 6 ms;
paramiko's parser knows neither Include nor most of Match.
"""

from __future__ import annotations

import base64
import getpass
import shlex
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from orchestrator.errors import HostUnreachable, UsageError
from orchestrator.laptop_path import laptop_path

CONNECT_S = 10
# A jump host may itself be reached through one; more than this is a circle.
MAX_HOPS = 8


class Settings(Protocol):
    """What the way to a host depends on, of :class:`orchestrator.inventory.Host`.

    Its own type would cost the import of pydantic, 0.1 s, before anything can be connected.
    """

    @property
    def port(self) -> int | None: ...
    @property
    def user(self) -> str | None: ...
    @property
    def identity_file(self) -> Path | None: ...
    @property
    def known_hosts(self) -> Path | None: ...
    @property
    def host_keys(self) -> str | None: ...
    @property
    def ssh_config(self) -> Path | None: ...


class Destination(Protocol):
    """The same of :class:`orchestrator.target.HostTarget`."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def settings(self) -> Settings: ...


@dataclass(frozen=True)
class PlainSettings:
    """These settings alone."""

    port: int | None = None
    user: str | None = None
    identity_file: Path | None = None
    known_hosts: Path | None = None
    host_keys: str | None = None
    ssh_config: Path | None = None


@dataclass(frozen=True)
class Route:
    """One hop: where, as whom, with which keys, trusting which host keys, and through what."""

    hostname: str
    port: int
    user: str
    identities: tuple[Path, ...]
    """Existing private keys, in the order in which they are offered."""
    use_agent: bool
    known_hosts: tuple[Path, ...]
    """Files of trusted keys; ``accept-new`` records into the first."""
    accept_new: bool
    key_name: str
    """The name under which known_hosts lists the host (``HostKeyAlias``, or ``[name]:port``)."""
    compression: bool = False
    """As ``Compression yes`` asks: for links that are slower than zlib, some 20 MB/s."""
    gateway: Route | None = None
    proxy_command: str | None = None

    @property
    def place(self) -> str:
        return f"{self.hostname}:{self.port}"


@dataclass(frozen=True)
class Answer:
    """What ``ssh -G`` printed: keywords in lower case, with every value each was given."""

    values: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Answer:
        values: dict[str, list[str]] = {}
        for line in text.splitlines():
            keyword, _, value = line.partition(" ")
            values.setdefault(keyword.lower(), []).append(value.strip())
        return cls(values)

    def one(self, keyword: str) -> str | None:
        """The value, or None where it is absent or says ``none``."""
        value = self.values.get(keyword, [""])[0]
        return value if value and value.lower() != "none" else None

    def files(self, keyword: str) -> tuple[Path, ...]:
        """Several paths, each its own line or several on one."""
        words = [w for value in self.values.get(keyword, []) for w in _words(value)]
        return tuple(laptop_path(w) for w in words if w.lower() != "none")


def _words(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:
        return [value]


def query_argv(address: str, settings: Settings) -> list[str]:
    """``ssh -G`` for this host."""
    argv = ["ssh", "-G"]
    if settings.ssh_config:
        argv += ["-F", str(laptop_path(settings.ssh_config))]
    if settings.user:
        argv += ["-l", settings.user]
    if settings.port:
        argv += ["-p", str(settings.port)]
    return [*argv, "--", address]


def find_route(host: Destination) -> Route:
    """The route to a host, through its jump hosts.

    :raises UsageError: no OpenSSH client, or an ssh config that does not parse.
    """
    route = _find(host.address, host.settings, host.name, 0)
    if host.settings.user is None and route.user == getpass.getuser():
        # Nobody named a user: pct works for root alone. (A jump host has ssh's own default.)
        return replace(route, user="root")
    return route


def _find(address: str, settings: Settings, name: str, depth: int) -> Route:
    if depth >= MAX_HOPS:
        raise HostUnreachable(
            f"more than {MAX_HOPS} jump hosts: ProxyJump goes in a circle",
            next_step=f"look at: ssh -G {address}",
            host=name,
        )
    answer = _ask(query_argv(address, settings), name)
    jump = answer.one("proxyjump")
    gateway: Route | None = None
    for hop in jump.split(",") if jump else ():
        # The first hop may have a jump host of its own; each next one is reached through the last.
        # Only as a URI does ssh -G take a hop's own port.
        uri = f"ssh://{hop.strip().removeprefix('ssh://').rstrip('/')}"
        via = _find(uri, _hop_settings(settings), name, depth + 1)
        gateway = via if gateway is None else replace(via, gateway=gateway)
    return route_from(answer, settings, gateway)


def _hop_settings(settings: Settings) -> Settings:
    # A jump host has its own user, port and keys; only the rules of trust are shared.
    return PlainSettings(
        ssh_config=settings.ssh_config,
        host_keys=settings.host_keys,
        known_hosts=settings.known_hosts,
    )


def route_from(answer: Answer, settings: Settings, gateway: Route | None = None) -> Route:
    """The route by an answer and the inventory's own settings; looks which keys exist."""
    hostname = answer.one("hostname") or ""
    port = int(answer.one("port") or 22)
    if settings.identity_file is not None:
        identities: tuple[Path, ...] = (laptop_path(settings.identity_file),)
    else:
        # OpenSSH lists its default names too; those that are not there are not offered.
        identities = tuple(p for p in answer.files("identityfile") if p.is_file())
    if settings.known_hosts is not None:
        known: tuple[Path, ...] = (laptop_path(settings.known_hosts),)
    else:
        known = answer.files("userknownhostsfile") + answer.files("globalknownhostsfile")
    configured = (answer.one("stricthostkeychecking") or "").lower()
    accept_new = settings.host_keys == "accept-new" or (
        settings.host_keys is None and configured == "accept-new"
    )
    return Route(
        hostname=hostname,
        port=port,
        user=answer.one("user") or "root",
        identities=identities,
        # With IdentitiesOnly the agent is still wanted for a key file that it holds unlocked.
        use_agent=answer.one("identitiesonly") != "yes" or any(map(is_locked, identities)),
        known_hosts=known,
        accept_new=accept_new,
        key_name=answer.one("hostkeyalias") or (hostname if port == 22 else f"[{hostname}]:{port}"),
        compression=answer.one("compression") == "yes",
        gateway=gateway,
        proxy_command=answer.one("proxycommand"),
    )


def is_locked(key: Path) -> bool:
    """Whether a private key file asks for a passphrase."""
    try:
        lines = key.read_bytes().split(b"\n")
        if b"OPENSSH" in lines[0]:
            # "openssh-key-v1\\0", then the name of the cipher.
            return b"none" not in base64.b64decode(b"".join(lines[1:3]))[15:27]
    except (OSError, ValueError):
        return False
    return any(b"ENCRYPTED" in line for line in lines[:3])


def _ask(argv: list[str], host: str) -> Answer:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=10
        )
    except FileNotFoundError:
        raise UsageError(
            "OpenSSH's client is not on this machine",
            next_step="install it (openssh-client); it reads the ssh config and carries `attach`",
            host=host,
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            "reading the ssh config took more than 10 s",
            next_step=f"a Match exec in it may hang; try: {shlex.join(argv)}",
            host=host,
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UsageError(
            f"the ssh config does not fit: {said[-1] if said else 'ssh -G failed'}",
            next_step=f"see: {shlex.join(argv)}",
            host=host,
        )
    return Answer.parse(done.stdout)
