"""Host keys: strict by default, ``accept-new`` when asked, a changed key never."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from paramiko import HostKeys, MissingHostKeyPolicy, PKey, SSHClient, SSHException
from paramiko.ssh_exception import BadHostKeyException

from orchestrator.errors import HostKeyMismatch

if TYPE_CHECKING:
    from orchestrator.route import Route


class UnknownKey(SSHException):
    """No known_hosts file lists this host."""

    def __init__(self, key: PKey) -> None:
        super().__init__("unknown host key")
        self.key = key


class _Reject(MissingHostKeyPolicy):
    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
        raise UnknownKey(key)


class _AcceptNew(MissingHostKeyPolicy):
    def __init__(self, route: Route) -> None:
        self._route = route

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
        path = self._route.known_hosts[0]
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        line = f"{self._route.key_name} {key.get_name()} {key.get_base64()}\n"
        with path.open("a", encoding="utf-8") as stream:
            stream.write(line)


def guard(client: SSHClient, route: Route, name: str) -> None:
    """Make ``client`` check the host's key against the route's known_hosts files."""
    known = HostKeys()
    for path in route.known_hosts:
        if path.is_file():
            try:
                known.load(str(path))
            except (OSError, UnicodeDecodeError, SSHException) as error:
                raise HostKeyMismatch(
                    f"known_hosts file {path} cannot be read: {error}",
                    next_step="mend the file: without it the host cannot be told from another",
                    host=name,
                ) from None
    # paramiko looks the host up as it was dialled; an alias is listed under another name.
    dialled = route.hostname if route.port == 22 else f"[{route.hostname}]:{route.port}"
    for kind, key in (known.lookup(route.key_name) or {}).items():
        client.get_host_keys().add(dialled, kind, key)
    can_record = route.accept_new and route.known_hosts
    client.set_missing_host_key_policy(_AcceptNew(route) if can_record else _Reject())


def fingerprint(key: PKey) -> str:
    """As OpenSSH prints it: ``ED25519 SHA256:…``."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name().removeprefix('ssh-').upper()} SHA256:{digest}"


def mismatch(error: BadHostKeyException, route: Route, name: str) -> HostKeyMismatch:
    listed = next((str(p) for p in route.known_hosts if p.is_file()), "known_hosts")
    return HostKeyMismatch(
        f"the host key of {route.place} is not the known one: the host was reinstalled, or "
        f"something else answers in its place\n"
        f"    known:   {fingerprint(error.expected_key)} ({listed})\n"
        f"    offered: {fingerprint(error.key)}",
        next_step="only if you know why it changed: "
        f"ssh-keygen -f {listed} -R '{route.key_name}', then connect once with ssh",
        host=name,
    )


def unknown(error: UnknownKey, route: Route, name: str) -> HostKeyMismatch:
    return HostKeyMismatch(
        f"the host key of {route.place} is not known here ({fingerprint(error.key)})",
        next_step="compare it on the host (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub), then "
        f"connect once with: ssh -p {route.port} {route.user}@{route.hostname}; "
        "or set `host_keys: accept-new` in the inventory",
        host=name,
    )
