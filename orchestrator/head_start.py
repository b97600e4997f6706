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
from orchestrator.route import Destination, PlainSettings, Route, find_route

if TYPE_CHECKING:
    import paramiko
    from fabric import Connection

    from orchestrator.inventory import Host, Inventory

VERBS = ("exec", "launch", "pull", "push", "status", "stop", "tail")
"""Those that reach the container that they are given, whatever else they are given."""
NOT_WITH = {"--help", "--dry-run", "--inventory", "--host", "--ct"}
"""What reaches nothing, or is not in the file."""
PATHS = ("identity_file", "known_hosts", "ssh_config")


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
        self._route: Route | None = None
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

        :raises Exception: paramiko's or the system's, as from ``connection.dial``.
        """
        self._thread.join()
        if self._connection is None:
            assert self._error is not None
            raise self._error
        return self._connection

    def channel(self, line: str) -> paramiko.Channel | None:
        """The session that runs ``line``, once; None where none does."""
        if line != self.way.line:
            return None
        self._thread.join()
        channel, self._channel = self._channel, None
        return channel

    def drop(self) -> None:
        """Nobody wants it."""
        self._unwanted = True
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        from orchestrator import connection as connections

        usual = sys.getswitchinterval()
        # A login is a dozen short answers, each of which would wait 5 ms for a thread that imports.
        sys.setswitchinterval(0.0005)
        try:
            self._route = find_route(self.way)
            self._known.set()
            self._connection = connections.dial(self._route, self.way.name)
            if self._unwanted:
                self._connection.close()
            else:
                self._channel = connections.start_session(self._connection, self.way.line)
        except Exception as error:  # noqa: BLE001 - whoever takes it is told, in his own thread
            self._error = error
        finally:
            sys.setswitchinterval(usual)
            self._known.set()


_begun: HeadStart | None = None
"""A process has one command line."""


def begin(words: Sequence[str]) -> None:
    """Connect, if ``words`` are a verb's of one container that is known from before."""
    global _begun
    way = known_way(words, dict(os.environ), LaptopPaths())
    if way is None:
        return
    _begun = HeadStart(way)
    # Here, while the thread waits for `ssh -G`: threads that import beside one another take turns
    # of the interpreter, and the connection would wait for all the others' imports.
    import fabric  # noqa: F401


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
