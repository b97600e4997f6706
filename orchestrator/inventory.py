"""Hosts and containers as YAML: models, reading, and one message for whatever does not fit.

An inventory is a file or a folder of files. The default is ``~/.config/dflashctl/inventory.yaml``
together with ``~/.config/dflashctl/inventory.d/*.yaml``; ``--inventory`` or
``$DFLASHCTL_INVENTORY`` replaces both.

    hosts:
      pve1: {address: 10.1.2.6, user: root}
    containers:
      train-a: {host: pve1, ct: 200, gpus: [0, 1], groups: [train]}
    defaults:
      workdir: /workspace
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.errors import InventoryError
from orchestrator.inventory_files import files_of
from orchestrator.laptop_path import read_text
from orchestrator.paths import DEFAULT_WORKDIR, LaptopPaths
from orchestrator.yaml_text import Where, YamlFault, parse

# Names meet shells, file names and terminals: a narrow alphabet, and never a leading dash.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")

Lines = dict[Where, str]


def _absolute(value: str) -> str:
    if not PurePosixPath(value).is_absolute() or "\0" in value or "\n" in value:
        raise ValueError(f"{value!r} is not an absolute path")
    return value


def _no_option(value: str) -> str:
    # ssh would read a leading dash as an option of its own.
    if not value or value.startswith("-") or re.search(r"[\s\0]", value):
        raise ValueError(f"{value!r} is not a host name or address")
    return value


def _program(value: str) -> str:
    if not value or value.startswith("-") or re.search(r"[\0\n]", value):
        raise ValueError(f"{value!r} is not a program")
    return value


def _number(value: object) -> object:
    # To Python, and so to pydantic, YAML's true is 1.
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")
    return value


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Program = Annotated[str, AfterValidator(_program)]
Number = Annotated[int, BeforeValidator(_number)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Host(_Strict):
    """A Proxmox host. What is left out comes from the user's ssh config."""

    address: Annotated[str, AfterValidator(_no_option)] | None = None
    """A name, alias of the ssh config, or address; default: the host's key in the inventory."""
    port: Number | None = Field(None, ge=1, le=65535)
    """Of its sshd; default: the ssh config's, else 22."""
    user: Annotated[str, AfterValidator(_no_option)] | None = None
    """Default: the ssh config's, else root (ssh's own default is the laptop's login name)."""
    identity_file: Path | None = None
    """A private key; default: the ssh config's, and the agent's keys."""
    known_hosts: Path | None = None
    """Read in place of the user's and the system's known_hosts."""
    host_keys: Literal["strict", "accept-new"] | None = None
    """``strict`` refuses an unknown key, ``accept-new`` records it; a changed key is always
    refused. Default: the ssh config's ``StrictHostKeyChecking`` if accept-new, else strict."""
    ssh_config: Path | None = None
    """Read in place of ``~/.ssh/config``, as with ``ssh -F``."""
    pct: Program = "pct"
    """The program on the host, where it is not on root's PATH."""
    enter: Literal["pct", "lxc-attach"] = "pct"
    """How a verb for several containers of this host enters them. ``lxc-attach`` saves each of them
    the 0.5 to 1 s of processor time that ``pct`` takes to start. One container alone: ``pct``."""
    python: Program = "python3"
    """The host's interpreter for what only the host sees (GPU processes, kernel log)."""


class ContainerSettings(_Strict):
    """What a container may have and ``defaults`` may give."""

    workdir: AbsolutePath = DEFAULT_WORKDIR
    """Under it lie ``dflashctl/releases`` and ``dflashctl/runs``."""
    python: Program = "python3"
    """The interpreter inside the container: for training, and for the agent (≥ 3.10). Given by its
    absolute path its folder comes first on the PATH of runs and of ``exec``, so that ``python``,
    ``pip`` and ``torchrun`` are that environment's."""
    keep_releases: int = Field(10, ge=1)
    """How many of the last pushed releases stay. Of older ones those stay that a live run uses, or
    in which a job made or changed files; a push or launch removes the others."""
    gpus: tuple[int | str, ...] = ()
    """Indices or UUIDs that runs of this container use; empty: every visible one."""
    groups: tuple[str, ...] = ()
    """Names that stand for several containers at once: ``dflashctl ps GROUP``."""


class Container(ContainerSettings):
    host: str
    """A key of ``hosts``."""
    ct: Number = Field(ge=1, le=999_999_999)
    """Its number on that host (Proxmox: VMID)."""


class Inventory(_Strict):
    hosts: dict[str, Host] = {}
    """Name → Proxmox host."""
    containers: dict[str, Container] = {}
    """Name → container. Every verb takes these names."""
    defaults: ContainerSettings = ContainerSettings()
    """What containers have unless they say otherwise."""

    def groups(self) -> dict[str, list[str]]:
        """Group name → names of its containers, in the inventory's order."""
        found: dict[str, list[str]] = {}
        for name, container in self.containers.items():
            for group in container.groups:
                found.setdefault(group, []).append(name)
        return found


def load(source: Path | None, laptop: LaptopPaths) -> Inventory:
    """The inventory at ``source`` (file or folder), or the user's own; empty where there is none.

    ``source`` is ``--inventory`` or ``$DFLASHCTL_INVENTORY``.

    :raises InventoryError: one message, naming file, line and the nearest right key.
    """
    files = files_of(source, laptop)
    if source is not None and not files:
        raise InventoryError(
            f"inventory folder {source} holds no .yaml file",
            next_step="name another, or write one: dflashctl init",
        )
    merged: dict[str, Any] = {}
    lines: Lines = {}
    for path in files:
        _merge(merged, lines, path)
    return _check(merged, lines)


def _merge(merged: dict[str, Any], lines: Lines, path: Path) -> None:
    """Add ``path``'s hosts and containers to ``merged``; a name may be given only once."""
    data, here = _read(path)
    for section, value in data.items():
        known = merged.setdefault(section, {} if isinstance(value, dict) else value)
        if isinstance(known, dict) and isinstance(value, dict):
            for name in value:
                if name in known:
                    at: Where = (section, str(name))
                    first, second = lines.get(at, "another file"), here.get(at, path)
                    raise InventoryError(
                        f"{second}: {section} {name!r} was already given at {first}",
                        next_step="remove or rename one of the two",
                    )
            known.update(value)
    for where, line in here.items():
        lines.setdefault(where, line)


def _read(path: Path) -> tuple[dict[str, Any], Lines]:
    """A file's content and, for each key path, the ``file:line`` it stands at."""
    instead = "give --inventory FILE, or --host H --ct N without one"
    text = read_text(path, "inventory", instead, wrong=InventoryError, absent=InventoryError)
    try:
        data, lines = parse(text)
    except YamlFault as fault:
        place = f"{path}:{fault.line}" if fault.line else str(path)
        raise InventoryError(
            f"inventory {place}: {fault.problem}",
            next_step="correct it there, or in the line above; "
            "`dflashctl inventory list` reads it again",
        ) from None
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise InventoryError(
            f"inventory {path} is a {type(data).__name__}, not a mapping",
            next_step="it has the keys hosts, containers and defaults",
        )
    return {str(k): v for k, v in data.items()}, {
        where: f"{path}:{line}" for where, line in lines.items()
    }


def _check(data: dict[str, Any], lines: Lines) -> Inventory:
    defaults = data.get("defaults")
    containers = data.get("containers")
    try:
        # Defaults are checked on their own first, so that a mistake there is told once.
        base = Inventory(defaults=defaults if defaults is not None else {}).defaults
        if isinstance(containers, dict):
            given = base.model_dump(exclude_unset=True)
            data = data | {
                "containers": {
                    name: {**given, **value} if isinstance(value, dict) else value
                    for name, value in containers.items()
                }
            }
        inventory = Inventory.model_validate({k: v for k, v in data.items() if v is not None})
    except ValidationError as error:
        raise _explain(error, lines) from None
    for kind, names in (("host", inventory.hosts), ("container", inventory.containers)):
        for name in names:
            if not NAME.match(str(name)):
                place = lines.get((f"{kind}s", str(name)), "inventory")
                raise InventoryError(
                    f"{place}: {name!r} is no name for a {kind}",
                    next_step="use letters, digits, dots, dashes and underscores",
                )
    _check_references(inventory, lines)
    return inventory


def _check_references(inventory: Inventory, lines: Lines) -> None:
    groups = inventory.groups()
    for name, container in inventory.containers.items():
        where = lines.get(("containers", name), "inventory")
        if container.host not in inventory.hosts:
            raise InventoryError(
                f"{where}: container {name!r} is on host {container.host!r}, "
                f"which is not under hosts{nearest(container.host, inventory.hosts)}",
                next_step=f"write it there: hosts: {{{container.host}: {{address: NAME}}}}",
            )
        if name in groups:
            raise InventoryError(
                f"{where}: {name!r} is both a container and a group",
                next_step="give one of them another name",
            )


TOLD = 8
"""Mistakes of one message."""

# pydantic speaks of Python's types.
_OF_YAML = {
    "tuple_type": "it should be a list, such as [a, b]",
    "dict_type": "it should be a mapping of names to settings",
    "model_type": "it should be a mapping of settings, such as {key: value}; {} for none",
}


def _explain(error: ValidationError, lines: Lines) -> InventoryError:
    """A line for each mistake, as many as a screen takes."""
    told = list(dict.fromkeys(_sentence(one, lines) for one in error.errors()))
    more = [f"and {len(told) - TOLD} more"] if len(told) > TOLD else []
    return InventoryError(
        "\n    ".join([*told[:TOLD], *more]),
        next_step="correct it there; `dflashctl inventory list` reads it again",
    )


def _sentence(mistake: ErrorDetails, lines: Lines) -> str:
    where: Where = mistake["loc"]
    place = next(
        (lines[where[:n]] for n in range(len(where), 0, -1) if where[:n] in lines), "inventory"
    )
    owner = " ".join(str(part) for part in where[:-1])
    if mistake["type"] == "extra_forbidden":
        hint = nearest(str(where[-1]), _keys_at(where))
        what = f"unknown key {where[-1]!r}{f' in {owner}' if owner else ''}{hint}"
    else:
        label = " ".join(str(part) for part in where if not str(part).startswith("function-"))
        said = _OF_YAML.get(mistake["type"]) or mistake["msg"].removeprefix("Value error, ")
        what = f"{label}: {said}"
    return f"{place}: {what}"


def _keys_at(where: Where) -> list[str]:
    models: dict[str, type[BaseModel]] = {
        "hosts": Host,
        "containers": Container,
        "defaults": ContainerSettings,
    }
    model = models.get(str(where[0]), Inventory) if len(where) > 1 else Inventory
    return list(model.model_fields)


def nearest(wrong: str, right: Any, cutoff: float = 0.5) -> str:
    """``; did you mean 'workdir'?``, or what there is to choose from, or nothing."""
    choices = [str(name) for name in right]
    close = difflib.get_close_matches(wrong, choices, n=1, cutoff=cutoff)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(choices)}" if 0 < len(choices) <= 12 else ""
