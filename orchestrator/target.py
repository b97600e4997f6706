"""Which container a verb means: ``--host H --ct N``, an inventory name, or a group."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator.errors import NotFoundError, UsageError
from orchestrator.inventory import Container, ContainerSettings, Host, Inventory, nearest

# <name>-<date>-<time>-<4 hex>: see run.new_run_id.
RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*-\d{8}-\d{6}-[0-9a-f]{4}\Z")

_ADDRESS = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<v6>[0-9a-fA-F:.%\w]+)\]|(?P<name>[^:\s@]+))(?::(?P<port>\d+))?\Z"
)


class HostTarget(BaseModel):
    """A host and how to reach it."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Its key in the inventory, or what the user typed."""
    settings: Host
    near: str | None = None
    """The inventory's host that is most like a name that it lacks: a slip, if not reached."""

    @property
    def address(self) -> str:
        return self.settings.address or self.name


class Target(BaseModel):
    """One container and how to reach it."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Its key in the inventory, else ``host/ct``."""
    host: HostTarget
    ct: int
    settings: ContainerSettings

    @property
    def place(self) -> dict[str, Any]:
        """What names it in an error and in ``--json``."""
        return {"host": self.host.name, "ct": self.ct}

    @property
    def in_full(self) -> str:
        """``train-a (host pve1, container 200)``: for who has to go there."""
        return f"{self.name} (host {self.host.name}, container {self.ct})"

    @property
    def arguments(self) -> str:
        """The words that name it on a command line."""
        return self.name if "/" not in self.name else f"--host {self.host.name} --ct {self.ct}"


def resolve(
    inventory: Inventory, names: Sequence[str] = (), host: str | None = None, ct: int | None = None
) -> list[Target]:
    """The containers meant, in order, each once; empty where nothing was named.

    :raises UsageError: half a target, or a host that ssh would not take.
    :raises NotFoundError: no such container or group in the inventory.
    """
    if (host is None) != (ct is None):
        given, missing = ("--host", "--ct N") if host is not None else ("--ct", "--host H")
        raise UsageError(
            f"{given} without {missing.split()[0]}",
            next_step=f"add {missing}, or use a name of the inventory",
            host=host,
            ct=ct,
        )
    found: dict[tuple[str, int], Target] = {}
    if host is not None and ct is not None:
        target = _at(inventory, resolve_host(inventory, host), ct)
        found[target.host.name, ct] = target
    for name in names:
        for target in _named(inventory, name):
            found[target.host.name, target.ct] = target
    return list(found.values())


def everything(inventory: Inventory) -> list[Target]:
    """Every container of the inventory once, by the first of its names; one that has several work
    folders is listed for each, because its runs lie there."""
    found: dict[tuple[str, int, str], str] = {}
    for name, container in inventory.containers.items():
        found.setdefault((container.host, container.ct, container.workdir), name)
    return [_from_inventory(inventory, name) for name in found.values()]


def resolve_host(inventory: Inventory, text: str) -> HostTarget:
    """A host of the inventory, or anything ssh takes: ``[user@]name[:port]``."""
    if text in inventory.hosts:
        return HostTarget(name=text, settings=inventory.hosts[text])
    match = _ADDRESS.match(text)
    if not match or text.startswith("-"):
        raise UsageError(
            f"{text!r} is not a host",
            next_step="give a host of the inventory, or [user@]name[:port] as for ssh",
        )
    try:
        settings = Host(
            address=match["v6"] or match["name"],
            user=match["user"],
            port=int(match["port"]) if match["port"] else None,
        )
    except ValidationError as error:
        raise UsageError(
            f"{text!r} is not a host: {error.errors()[0]['msg']}",
            next_step="give it as to ssh: NAME, USER@NAME or USER@NAME:PORT",
        ) from None
    close = difflib.get_close_matches(match["name"] or "", inventory.hosts, n=1)
    if close:
        return HostTarget(name=text, settings=settings, near=close[0])
    return HostTarget(name=text, settings=settings)


def _named(inventory: Inventory, name: str) -> list[Target]:
    if name in inventory.containers:
        return [_from_inventory(inventory, name)]
    groups = inventory.groups()
    if name in groups:
        return [_from_inventory(inventory, member) for member in groups[name]]
    if "/" in name:
        # The way errors and `ps` print a container that has no name: host/ct.
        host, _, number = name.rpartition("/")
        if number.isdecimal():
            return [_at(inventory, resolve_host(inventory, host), int(number))]
    known = [*inventory.containers, *groups]
    if RUN_ID.match(name):
        raise NotFoundError(
            f"{name!r} is a run, and this takes containers",
            next_step="name the run's container (dflashctl status RUN says `where`); "
            "`play resume` takes the run as --set run=RUN",
        )
    raise NotFoundError(
        f"no container or group {name!r} in the inventory{nearest(name, known)}",
        next_step="name one of `dflashctl inventory list`, or give --host H --ct N",
    )


def _from_inventory(inventory: Inventory, name: str) -> Target:
    container = inventory.containers[name]
    host = HostTarget(name=container.host, settings=inventory.hosts[container.host])
    return Target(name=name, host=host, ct=container.ct, settings=_settings(container))


def _at(inventory: Inventory, host: HostTarget, ct: int) -> Target:
    for name, container in inventory.containers.items():
        if container.host == host.name and container.ct == ct:
            return _from_inventory(inventory, name)
    if not 1 <= ct <= 999_999_999:
        raise UsageError(
            f"--ct {ct} is not a container number",
            next_step="give the number that `pct list` on the host shows",
            host=host.name,
        )
    return Target(name=f"{host.name}/{ct}", host=host, ct=ct, settings=inventory.defaults)


def _settings(container: Container) -> ContainerSettings:
    return ContainerSettings(**container.model_dump(exclude={"host", "ct"}))
