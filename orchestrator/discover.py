"""What a host says of its containers, as inventory YAML. Pure but for the two readers at the end.

Nothing that is written down already is changed: what the inventory knows is left out, and an
existing file is only added to, after a check that what it said before still reads the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.channel import AgentChannel
from orchestrator.errors import InventoryError
from orchestrator.inventory import NAME, Inventory
from orchestrator.target import HostTarget
from orchestrator.yaml_text import YamlFault, one_line, parse

_NODE = re.compile(r"/dev/nvidia(\d+)\b")
HEADER = """\
# Found by `dflashctl inventory discover {host}`. Yours to edit: what stands here is never changed.
"""
# One file a GPU; the loop is the shell's, the words are ours.
READ_GPUS = ["sh", "-c", "cat /proc/driver/nvidia/gpus/*/information 2>/dev/null"]


@dataclass(frozen=True)
class Found:
    """A container that the inventory does not have yet."""

    name: str
    ct: int
    status: str
    minors: tuple[int, ...]
    """N of each /dev/nvidiaN that its configuration passes through."""
    uuids: tuple[str, ...]
    """Of these, as far as the driver tells; a UUID names the same card inside and outside."""


@dataclass(frozen=True)
class Discovery:
    """One host's containers beside what the inventory knew."""

    host: str
    settings: dict[str, Any] | None
    """The host's own entry; None where the inventory has it."""
    new: tuple[Found, ...] = ()
    known: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    """Names of the inventory whose container the host does not have."""


def minors(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The NVIDIA cards of a container's configuration.

    ``dev0: /dev/nvidia0,mode=0666`` and ``lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind …``.
    """
    found: set[int] = set()
    for key, value in config.items():
        if re.fullmatch(r"dev\d+", key) or key == "lxc.mount.entry":
            values = value if isinstance(value, list) else str(value).splitlines()
            for text in values:
                found.update(int(number) for number in _NODE.findall(str(text).split(" ")[0]))
    return tuple(sorted(found))


def uuids(text: str) -> dict[int, str]:
    """Minor number → UUID, from the driver's ``information`` files one after the other."""
    found: dict[int, str] = {}
    uuid = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "GPU UUID":
            uuid = value.strip()
        elif key.strip() == "Device Minor" and value.strip().isdecimal() and uuid:
            found[int(value)] = uuid
            uuid = ""
    return found


def discover(
    inventory: Inventory,
    host: HostTarget,
    containers: Iterable[Mapping[str, Any]],
    cards: Mapping[int, str],
) -> Discovery:
    """Compare the agent's ``ct.list`` with the inventory."""
    name = host_name(inventory, host)
    have = {c.ct: n for n, c in inventory.containers.items() if c.host == name}
    there = {int(item["ct"]): item for item in containers}
    taken = {*inventory.containers, *inventory.groups()}
    new = []
    for ct, item in sorted(there.items()):
        if ct in have:
            continue
        label = _label(str(item.get("name") or ""), name, ct, taken)
        taken.add(label)
        passed = minors(item.get("config") or {})
        known = tuple(cards[minor] for minor in passed if minor in cards)
        new.append(Found(label, ct, _word(item.get("status")), passed, known))
    return Discovery(
        name,
        None if name in inventory.hosts else _host_entry(host, name),
        tuple(new),
        tuple(have[ct] for ct in sorted(have.keys() & there.keys())),
        tuple(have[ct] for ct in sorted(have.keys() - there.keys())),
    )


def host_name(inventory: Inventory, host: HostTarget) -> str:
    """The host's key: its own, or one made of its address."""
    if host.name in inventory.hosts:
        return host.name
    for name, known in inventory.hosts.items():
        if (known.address or name, known.port, known.user) == (
            host.address,
            host.settings.port,
            host.settings.user,
        ):
            return name
    made = re.sub(r"[^A-Za-z0-9_.-]", "-", host.address).lstrip("-.")
    return made if NAME.match(made) else "host"


def _host_entry(host: HostTarget, name: str) -> dict[str, Any]:
    entry = host.settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if entry.get("address") == name:
        del entry["address"]
    return entry


def _label(hostname: str, host: str, ct: int, taken: set[str]) -> str:
    """The container's own name where it is one and nobody has it, else ``host-ct``."""
    for name in (hostname, f"{hostname}-{ct}", f"{host}-{ct}"):
        if hostname and NAME.match(name) and name not in taken:
            return name
    number = 2
    name = f"{host}-{ct}"
    while name in taken:
        name, number = f"{host}-{ct}-{number}", number + 1
    return name


def _word(status: Any) -> str:
    """It becomes part of a comment: nothing in it may end the line."""
    return re.sub(r"[^A-Za-z0-9 _-]", "", str(status or "")).strip() or "unknown"


def render(found: Discovery) -> str:
    """The YAML of what is new; empty where nothing is."""
    if found.settings is None and not found.new:
        return ""
    parts = [HEADER.format(host=found.host)]
    if found.settings is not None:
        parts.append(f"hosts:\n  {one_line(found.host)}: {one_line(found.settings)}\n")
    if found.new:
        parts.append("containers:\n" + container_lines(found.host, found.new))
    return "".join(parts)


def container_lines(host: str, new: Sequence[Found]) -> str:
    """An entry a container, with what is worth knowing as a comment."""
    lines = []
    for item in new:
        entry: dict[str, Any] = {"host": host, "ct": item.ct}
        if item.uuids and len(item.uuids) == len(item.minors):
            entry["gpus"] = list(item.uuids)
        cards = ", ".join(f"/dev/nvidia{minor}" for minor in item.minors) or "no GPU"
        lines.append(f"  # {item.status}; {cards}\n  {one_line(item.name)}: {one_line(entry)}\n")
    return "".join(lines)


def add(old: str, found: Discovery, path: Path) -> str:
    """``old`` with the new containers appended; every entry of ``old`` reads as before.

    :raises InventoryError: the file does not end in its list of containers.
    """
    before = _tree(old)
    if not found.new:
        return old
    joint = "" if old.endswith("\n") or not old else "\n"
    lines = container_lines(found.host, found.new)
    text = old + joint + ("" if before.get("containers") else "containers:\n") + lines
    after = _tree(text)
    wanted = {item.name for item in found.new}
    kept = {n: e for n, e in (after.get("containers") or {}).items() if n not in wanted}
    rest = {key: value for key, value in after.items() if key != "containers"}
    same = kept == (before.get("containers") or {})
    same = same and rest == {k: v for k, v in before.items() if k != "containers"}
    if not same or not wanted <= set(after.get("containers") or {}):
        raise InventoryError(
            f"{path} does not end with its containers, so nothing can be added to it safely",
            next_step="run it without --write, and paste what it prints where you want it",
        )
    return text


def _tree(text: str) -> dict[str, Any]:
    try:
        tree, _ = parse(text)
    except YamlFault:
        return {}
    return tree if isinstance(tree, dict) else {}


@dataclass
class Answers:
    """What the agent on the host said."""

    containers: list[dict[str, Any]]
    cards: dict[int, str] = field(default_factory=dict)


def ask(channel: AgentChannel) -> Answers:
    """Two requests at once: the containers, and the driver's list of cards."""
    listing = channel.request("ct.list")
    reading = channel.request("exec", command=READ_GPUS)
    _, text, _ = reading.outputs()
    return Answers(listing.result()["containers"], uuids(text.decode(errors="replace")))
