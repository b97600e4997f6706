"""Whatever can go wrong while a host is logged in to, as this tool's own errors. Pure.

paramiko is imported where an error of its is at hand: it takes 0.1 s.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from orchestrator.errors import (
    AuthenticationFailed,
    ConnectionLost,
    DflashctlError,
    HostUnreachable,
)
from orchestrator.route import CONNECT_S

if TYPE_CHECKING:
    from orchestrator.route import Route

SLOW = "try again; the network loses packets, or the host is overloaded"
CUTS = (EOFError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
CUT_WORDS = ("saw EOF", "Negotiation failed", "Server connection dropped")


def explain(error: BaseException, route: Route, name: str) -> DflashctlError:
    """What went wrong while connecting, as this tool's own error."""
    import paramiko

    from orchestrator import host_keys

    if isinstance(error, paramiko.BadHostKeyException):
        return host_keys.mismatch(error, route, name)
    if isinstance(error, host_keys.UnknownKey):
        return host_keys.unknown(error, route, name)
    if isinstance(error, paramiko.PasswordRequiredException):
        return AuthenticationFailed(
            "the key is protected by a passphrase, and nobody is there to ask",
            next_step="load it first: ssh-add",
            host=name,
        )
    if _cut_short(error):
        return ConnectionLost(
            f"the connection to {route.place} ended during the login",
            next_step="try again; if it ends there each time, sshd has seen enough keys "
            "(MaxAuthTries): set `identity_file` of the host in the inventory; or it drops new "
            "connections (MaxStartups), or no SSH server listens on that port",
            host=name,
        )
    if _too_slow(error):
        return HostUnreachable(
            f"{route.place} did not answer the login within {CONNECT_S} s",
            next_step=SLOW,
            host=name,
        )
    no_key = isinstance(error, paramiko.SSHException) and "No authentication methods" in str(error)
    if no_key or isinstance(error, paramiko.AuthenticationException):
        return _auth_refused(route, name)
    if isinstance(error, socket.gaierror):
        return HostUnreachable(
            f"no such host name: {route.hostname}",
            next_step="check the spelling, or give the address; aliases of the ssh config work too",
            host=name,
        )
    if isinstance(error, (ConnectionRefusedError, paramiko.ssh_exception.NoValidConnectionsError)):
        return HostUnreachable(
            f"{route.place} refused the connection: no SSH server listens there",
            next_step="check the port, and that sshd runs on the host",
            host=name,
        )
    if isinstance(error, TimeoutError):
        return HostUnreachable(
            f"no answer from {route.place} within {CONNECT_S} s",
            next_step="check that the host is up, and the network or VPN to it",
            host=name,
        )
    # "No existing session": the handshake did not come to its end in time.
    silent = "banner" in str(error) or "No existing session" in str(error)
    if isinstance(error, paramiko.SSHException) and silent:
        return HostUnreachable(
            f"{route.place} accepted the connection, but no SSH server spoke within {CONNECT_S} s",
            next_step=f"{SLOW}; or check the port",
            host=name,
        )
    reason = str(error) or type(error).__name__
    return HostUnreachable(
        f"cannot connect to {route.place}: {reason}",
        next_step=f"try by hand: ssh -p {route.port} {route.user}@{route.hostname} true",
        host=name,
    )


def is_verdict(error: BaseException) -> bool:
    """Whether the host has judged what it was offered; else the link failed under the login."""
    return not _cut_short(error) and not _too_slow(error)


def _auth_refused(route: Route, name: str) -> AuthenticationFailed:
    offered = [str(path) for path in route.identities]
    if route.use_agent:
        offered.append("the ssh agent's keys")
    tried = ", ".join(offered) or "no key: none was found"
    return AuthenticationFailed(
        f"{route.place} refused user {route.user} (offered: {tried})",
        next_step=f"ssh-copy-id -p {route.port} {route.user}@{route.hostname}, or set `user` and "
        "`identity_file` of the host in the inventory",
        host=name,
    )


def _cut_short(error: BaseException) -> bool:
    """Whether the link was there and was lost, which paramiko tells in as many ways as a login has
    moments: as a failed authentication, as a banner that cannot be read, as no session."""
    said = str(error)
    if "banner" in said:
        # Its own error stands behind, without a word: an end, or a time-out.
        error = error.__context__ or error
    return isinstance(error, CUTS) or any(words in said for words in CUT_WORDS)


def _too_slow(error: BaseException) -> bool:
    """And so it calls an answer that did not come in time: no key was refused."""
    return "Authentication timeout" in str(error)
