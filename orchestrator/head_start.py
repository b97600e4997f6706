"""A connection that is begun before it is known what for.

Until a verb can say which container it means it imports for 0.2 s (typer, pydantic, yaml). ssh
needs none of that. So what the inventory says of each container is kept as JSON, and while the very
same files lie there, the container that the command line names is connected to at once, and its
agent asked for. Whatever is begun here is handed only to who asks for exactly the same later: the
whole inventory is still read, and decides. A connection that nobody took is closed unused.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import pct
from orchestrator.agent import loader
from orchestrator.inventory_files import Stamp, files_of, stamp
from orchestrator.laptop_path import laptop_path
from orchestrator.paths import LaptopPaths
from orchestrator.private_file import read_json, write_private
from orchestrator.route import CONNECT_S, Destination, PlainSettings, Route, find_route

if TYPE_CHECKING:
    import paramiko
    from fabric import Connection

    from orchestrator.inventory import Host, Inventory

VERBS = ("exec", "launch", "pull", "push", "status", "stop", "tail")
"""Those that reach the container that they are given, whatever else they are given."""
NOT_WITH = {"--help", "--dry-run", "--inventory", "--host", "--ct"}
"""What reaches nothing, or is not in the file."""
PATHS = ("identity_file", "known_hosts", "ssh_config")
# A login on a near host takes 0.03 s alone and 0.15 s beside the verb's imports, which cost nothing
# once pct computes. A far host's is mostly waiting: the imports need not wait for that.
ALONE_S = 0.2


@dataclass(frozen=True)
class Way:
    """To one container: all that a connection and its agent's start depend on."""

    name: str
    """The host's, in the inventory."""
    address: str
    settings: PlainSettings
    line: str = ""
    """What its shell is given."""

    def leads_to(self, host: Destination) -> bool:
        """Whether a connection to ``host`` would be the same one."""
        same = (host.name, host.address) == (self.name, self.address)
        return same and plain(host.settings) == self.settings


class HeadStart:
    """One connection and one session on it, on their way in a thread."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self._known = threading.Event()
        self._imported = threading.Event()
        self._route: Route | None = None
        self._client: paramiko.SSHClient | None = None
        self._connection: Connection | None = None
        self._channel: paramiko.Channel | None = None
        self._error: BaseException | None = None
        self._unwanted = False
        # A daemon: a user who gives up must not wait for a host that does not answer.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def route(self) -> Route:
        """:raises DflashctlError: what is wrong with the ssh config."""
        self._known.wait()
        if self._route is None:
            assert self._error is not None
            raise self._error
        return self._route

    def connection(self) -> Connection:
        """The open connection.

        :raises Exception: paramiko's or the system's, as from ``login.dial``.
        """
        self._thread.join()
        if self._client is None:
            assert self._error is not None
            raise self._error
        if self._connection is None:
            from orchestrator import login

            self._connection = login.adopt(self._client, self.route(), self.way.name)
        return self._connection

    def channel(self, line: str) -> paramiko.Channel | None:
        """The session that runs ``line``, once; None where none does."""
        if line != self.way.line:
            return None
        self._thread.join()
        channel, self._channel = self._channel, None
        return channel

    def assist(self) -> None:
        """Import what it needs, then leave it the interpreter for a moment.

        Here, while it waits for ``ssh -G`` and for sshd: threads that import beside one another
        take turns, and the connection would wait for all the others' imports.
        """
        try:
            _import_paramiko()
        finally:
            self._imported.set()
        self._thread.join(ALONE_S)

    def drop(self) -> None:
        """Nobody wants it."""
        self._unwanted = True
        if self._client is not None:
            self._client.close()

    def _run(self) -> None:
        usual = sys.getswitchinterval()
        # A login is a dozen short answers, each of which would wait 5 ms for a thread that imports.
        sys.setswitchinterval(0.0005)
        try:
            self._route = find_route(self.way)
            self._known.set()
            self._log_in(self._route)
        except Exception as error:  # noqa: BLE001 - whoever takes it is told, in his own thread
            self._error = error
        finally:
            sys.setswitchinterval(usual)
            self._known.set()

    def _log_in(self, route: Route) -> None:
        sock = None
        if route.gateway is None and route.proxy_command is None:
            # sshd takes 10 ms to answer: paramiko is imported meanwhile.
            sock = socket.create_connection((route.hostname, route.port), CONNECT_S)
        self._imported.wait()
        from orchestrator import login

        if sock is None:
            self._connection = login.dial(route, self.way.name)
            self._client = self._connection.client
        else:
            self._client = login.log_in(route, self.way.name, sock)
        transport = self._client.get_transport()
        if self._unwanted or transport is None:
            self._client.close()
        else:
            self._channel = login.start_session(transport, self.way.line)


_begun: HeadStart | None = None
"""A process has one command line."""


def begin(words: Sequence[str]) -> None:
    """Connect, if ``words`` are a verb's of one container that is known from before."""
    global _begun
    way = known_way(words, dict(os.environ), LaptopPaths())
    if way is None:
        return
    _begun = HeadStart(way)
    _begun.assist()


def _import_paramiko() -> None:
    """Without invoke, which takes as long as all the rest. paramiko runs a ``Match exec`` with it,
    in an ssh config that it is never given here; fabric imports it later."""
    if "paramiko" in sys.modules or "invoke" in sys.modules:
        return
    sys.modules["invoke"] = None  # type: ignore[assignment]
    try:
        import paramiko  # noqa: F401
    finally:
        del sys.modules["invoke"]


def take(host: Destination) -> HeadStart | None:
    """The connection to ``host`` that was begun; the second who asks gets none."""
    global _begun
    if _begun is None or not _begun.way.leads_to(host):
        return None
    taken, _begun = _begun, None
    return taken


def end() -> None:
    """Close what nobody took."""
    global _begun
    begun, _begun = _begun, None
    if begun is not None:
        begun.drop()


def known_way(words: Sequence[str], environment: dict[str, str], laptop: LaptopPaths) -> Way | None:
    """To the one container among ``words``; None where there is none, or any doubt."""
    asked = list(words[: words.index("--")] if "--" in words else words)
    if not asked or asked[0] not in VERBS:
        return None
    if NOT_WITH & {word.partition("=")[0] for word in asked}:
        return None
    kept = read_json(laptop.ways) or {}
    ways = kept.get("containers")
    if not isinstance(ways, dict):
        return None
    named = [word for word in asked[1:] if word in ways]
    if len(named) != 1 or kept.get("files") != current_stamp(environment, laptop):
        return None
    return _read(ways[named[0]])


def current_stamp(environment: dict[str, str], laptop: LaptopPaths) -> Stamp | None:
    """Of the inventory that a verb without ``--inventory`` would read."""
    given = environment.get("DFLASHCTL_INVENTORY")
    return stamp(files_of(laptop_path(given) if given else None, laptop))


def remember(laptop: LaptopPaths, files: Stamp | None, inventory: Inventory) -> None:
    """Keep what was read, for the next command.

    :param files: the stamp of its files from before they were read.
    """
    if files is None or (read_json(laptop.ways) or {}).get("files") == files:
        return
    ways = {}
    for name, container in inventory.containers.items():
        host = inventory.hosts[container.host]
        ways[name] = {
            "name": container.host,
            "address": host.address or container.host,
            "settings": _as_json(host),
            "agent": [container.ct, container.python, host.pct],
        }
    # It only saves time: a full disk is no reason to give up a verb.
    with contextlib.suppress(OSError):
        write_private(laptop.ways, json.dumps({"files": files, "containers": ways}))


def plain(settings: Any) -> PlainSettings:
    """The same, without what a connection does not depend on."""
    names = [field.name for field in fields(PlainSettings)]
    return PlainSettings(**{name: getattr(settings, name) for name in names})


def _as_json(host: Host) -> dict[str, Any]:
    found = {name: value for name, value in asdict(plain(host)).items() if value is not None}
    return {name: str(value) if name in PATHS else value for name, value in found.items()}


def _read(entry: Any) -> Way | None:
    try:
        given: dict[str, Any] = {
            name: Path(value) if name in PATHS else value
            for name, value in entry["settings"].items()
        }
        ct, python, program = entry["agent"]
        line = pct.shell_line(pct.exec_argv(int(ct), loader.argv(str(python)), pct=str(program)))
        return Way(str(entry["name"]), str(entry["address"]), PlainSettings(**given), line)
    except (AttributeError, KeyError, TypeError, ValueError):
        # Of another version of this tool.
        return None
