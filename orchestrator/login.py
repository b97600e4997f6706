"""How a host is logged in to: fabric and paramiko under this tool's rules.

Two of fabric's habits are undone before anything is opened: it accepts any host key
(``AutoAddPolicy``) and never reads known_hosts. Imported with the first connection: paramiko alone
takes 0.1 s.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from paramiko import Channel, Message, SSHClient, SSHConfig, SSHException
from paramiko import Transport as Paramiko
from paramiko.common import MSG_CHANNEL_CLOSE

from orchestrator import host_keys
from orchestrator.errors import AuthenticationFailed
from orchestrator.laptop_path import did_you_mean
from orchestrator.route import CONNECT_S, Route

if TYPE_CHECKING:
    from fabric import Connection

# What the far side may send before we answer; one channel moves one window a round trip.
WINDOW = 16 * 1024 * 1024

# Without a handler, logging's last resort would print paramiko's tracebacks on stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Transport(Paramiko):
    """Of one connection; a ``transport_factory`` of ``SSHClient.connect``."""

    def __init__(self, sock: Any, **options: Any) -> None:
        """Prefer AES-GCM, which paramiko puts last, behind CBC.

        As in OpenSSH's first choices, it authenticates in the same pass: 100 MB cost 0.16 s of the
        processor up and 0.13 s down; with CTR and HMAC 0.26 and 0.25 s.
        """
        if isinstance(sock, socket.socket):
            # Of two small messages in a row Nagle holds back the second until the far side has
            # acknowledged the first, which it puts off by 40 ms: half of a login on a near host.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(sock, **options)
        security = self.get_security_options()
        security.ciphers = tuple(sorted(security.ciphers, key=lambda name: "gcm" not in name))

    def _parse_global_request(self, message: Message) -> None:
        """After a login sshd tells its host keys, and with Nagle on its side it answers our first
        session only when that has been acknowledged, again 40 ms later. Any word of ours does it.
        """
        super()._parse_global_request(message)  # type: ignore[misc]
        # Not while keys are exchanged: this thread would wait for itself.
        if self.clear_to_send.is_set():
            self.send_ignore(1)

    def _send_message(self, message: Any) -> None:
        """One at a time: under paramiko's lock, where it is a channel's."""
        lane = getattr(message, "lane", None)
        if lane is not None:
            if lane.closed:
                return
            lane.closed = message.packet.getbuffer()[0] == MSG_CHANNEL_CLOSE
        super()._send_message(message)  # type: ignore[misc]


class Lane:
    """A channel's way to its transport, which ends with the channel's CLOSE.

    paramiko's thread answers the CLOSE of a command that ended, and what another thread was about
    to send on that channel follows. sshd then ends the connection, with all its other channels.

    New keys are exchanged every 512 MB. A CLOSE that was on its way is answered when that is done,
    for which paramiko's own thread would wait 30 s, as its reader, and give up the connection.
    """

    def __init__(self, transport: Paramiko) -> None:
        self._transport = transport
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send_user_message(self, message: Any) -> None:
        message.lane = self
        reads = threading.current_thread() is self._transport
        if reads and not self._transport.clear_to_send.is_set():
            threading.Thread(target=self._send_later, args=[message], daemon=True).start()
        else:
            self._transport._send_user_message(message)  # type: ignore[attr-defined]

    def _send_later(self, message: Any) -> None:
        # Of a connection that ended meanwhile every reader hears.
        with suppress(SSHException, EOFError, OSError):
            self._transport._send_user_message(message)  # type: ignore[attr-defined]


def dial(route: Route, name: str, secret: str | None = None) -> Connection:
    """An open connection.

    :raises Exception: paramiko's or the system's: ``login_failure.explain`` says what it means.
    """
    connection = make_connection(route, name, secret)
    with _cuts_told(connection.client):
        connection.open()
    return connection


def log_in(route: Route, name: str, sock: socket.socket) -> SSHClient:
    """A client logged in on a link that is there: what ``dial`` does, before fabric is imported.

    :raises Exception: as from ``dial``.
    """
    check_identities(route, name)
    client = SSHClient()
    host_keys.guard(client, route, name)
    settings = login_settings(route)
    with _cuts_told(client):
        client.connect(
            route.hostname, route.port, route.user, sock=sock, timeout=CONNECT_S, **settings
        )
    return client


@contextmanager
def _cuts_told(client: SSHClient) -> Iterator[None]:
    """paramiko calls a link that was lost, and a handshake that was too slow, "no session"."""
    try:
        yield
    except Exception as error:
        transport = client.get_transport()
        if str(error) != "No existing session" or transport is None or transport.is_active():
            raise
        raise EOFError from error


def adopt(client: SSHClient, route: Route, name: str) -> Connection:
    """fabric's connection of a client that is logged in."""
    connection = make_connection(route, name)
    connection.client = client
    connection.transport = client.get_transport()
    return connection


def start_session(transport: Paramiko, line: str) -> Channel:
    """``line`` in the host's shell."""
    channel = transport.open_session(window_size=WINDOW, timeout=CONNECT_S)
    channel.transport = Lane(transport)  # type: ignore[assignment]
    channel.exec_command(line)
    return channel


def make_connection(route: Route, name: str, secret: str | None = None) -> Connection:
    """fabric's connection for a route and its gateways, not yet opened, host keys guarded.

    :param name: the host as the user knows it, for messages.
    """
    # 0.1 s with what it brings: a head start logs in before.
    from fabric import Config, Connection

    check_identities(route, name)
    settings = login_settings(route)
    if secret is not None:
        settings["password"] = secret
    gateway: Connection | str | None = None
    if route.gateway is not None:
        gateway = make_connection(route.gateway, name)
    elif route.proxy_command is not None:
        gateway = route.proxy_command
    connection = Connection(
        host=route.hostname,
        user=route.user,
        port=route.port,
        gateway=gateway,
        connect_timeout=CONNECT_S,
        connect_kwargs=settings,
        # An empty SSHConfig: the route is already OpenSSH's own reading of the files. Lazy: a
        # ~/.fabric.yaml must not change what this tool does.
        config=Config(ssh_config=SSHConfig(), lazy=True),
    )
    host_keys.guard(connection.client, route, name)
    return connection


def login_settings(route: Route) -> dict[str, Any]:
    """Of ``SSHClient.connect``."""
    return {
        "key_filename": [str(path) for path in route.identities],
        "allow_agent": route.use_agent,
        "look_for_keys": False,
        "banner_timeout": CONNECT_S,
        "auth_timeout": CONNECT_S,
        "channel_timeout": CONNECT_S,
        "transport_factory": Transport,
        "compress": route.compression,
    }


def check_identities(route: Route, name: str) -> None:
    for path in route.identities:
        if not path.is_file():
            raise AuthenticationFailed(
                f"the key file {path} does not exist{did_you_mean(path)}",
                next_step="correct `identity_file` of the host in the inventory; where it was the "
                "lab's, which is down: dflashctl lab up",
                host=name,
            )
