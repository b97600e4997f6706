"""Whose line it is, and of when: a host's logs tell of every container, every card, every day.

A line of a kernel log, a journal or a task log counts for a run unless it names somebody else
(another container by its control group, unit or task; the process that the OOM killer took from
another group; a card that the run's container does not hold) or is dated before the run began.
Where nothing is named, or nobody knows the run's own container or cards, the line stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime

from orchestrator.diag.probes import Probe, Probes
from orchestrator.diag.text import Line

SYSTEM = re.compile(r"journal|syslog|messages|dmesg|kern|^auth_?log")
_SHARED = re.compile(SYSTEM.pattern + r"|^(?:host_)?tasks$|^ps_host$")
_DATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{6}[+-]\d\d:\d\d")
CLOCKS_APART_S = 5
"""The laptop's stamp in a run's id against the host's clock."""

_CONTAINER = re.compile(
    r"/lxc(?:\.payload\.|\.monitor\.|/)(\d{3,9})(?!\d)"
    r"|\blxc\.(?:payload|monitor)\.(\d{3,9})\b"
    r"|\bpve-container(?:-debug)?@(\d{3,9})\b"
    r"|\bUPID:[^:]*:(?:[^:]*:)*?vz\w+:(\d{3,9}):"
    r"|\b(?:CT|VM|lxc-start|lxc-attach:|container) '?(\d{3,9})\b"
    r"|\bveth(\d{3,9})i\d+\b"
    r"|\b(?:pct [a-z]+|vzdump|pct-\w+|lxc-\w+ -n) (\d{3,9})\b"
)
# One kill as the kernel tells it: who asked, which group, which process, that it was reaped.
_ASKED = re.compile(r"invoked oom-killer")
_GROUP = re.compile(r"oom-kill:constraint=|Task in \S+ killed as a result of limit of")
_TASK_GROUP = re.compile(r"(?:task_memcg=|Task in )([^,\s]+)")
_VICTIM = re.compile(r"(?:Kill(?:ed)? process|reaped process|pid=)\s*(\d+)")
_CARD = re.compile(r"\bNVRM\b|\bnvidia[\d-]|\bXid\b|nvidia-smi|\bGPU\b")
_ADDRESS = re.compile(r"\b(?:PCI:|GPU |pci )?((?:[0-9a-fA-F]{4,8}:)[0-9a-fA-F]{2}:[0-9a-fA-F]{2})")


def foreign(lines: Iterable[Line], number: str, buses: Iterable[str] = ()) -> set[Line]:
    """Those of one log (in its order) that speak of another container or another card.

    ``number`` is the run's container, empty if unknown; ``buses`` are its cards' PCI addresses as
    :func:`bus_of` writes them, empty if unknown.
    """
    own_cards = set(buses)
    found = set(_of_others(lines := list(lines), number)) if number else set()
    if own_cards:
        for line in lines:
            bus = bus_of(line.text) if _CARD.search(line.text) else ""
            if bus and bus not in own_cards:
                found.add(line)
    return found


def _of_others(lines: list[Line], number: str) -> Iterator[Line]:
    pending: list[Line] = []
    victims: dict[str, bool] = {}
    for line in lines:
        if _ASKED.search(line.text):
            pending.append(line)
            continue
        if _GROUP.search(line.text):
            group = _TASK_GROUP.search(line.text)
            other = group is not None and not _is_in(group[1], number)
            if other:
                yield line
                yield from pending
            pending = []
            if (pid := _VICTIM.search(line.text)) is not None:
                victims[pid[1]] = other
            elif group is not None:
                victims["next"] = other  # version 1 names the process in the line after
            continue
        killed = re.search(r"(?:Kill(?:ed)?|oom_reaper: reaped) process (\d+)", line.text)
        if killed is not None:
            other = victims.get(killed[1], victims.get("next", False))
            victims[killed[1]] = other
            if other:
                yield line
            continue
        named = {next(g for g in m.groups() if g) for m in _CONTAINER.finditer(line.text)}
        if named and number not in named:
            yield line


def _is_in(group: str, number: str) -> bool:
    """Whether a control group's path lies in the container."""
    return re.search(rf"lxc(?:\.payload\.|/){number}(?:/|$)", group) is not None


def bus_of(text: str) -> str:
    """A card's PCI address without leading zeros of its domain and without its function."""
    match = _ADDRESS.search(text)
    if match is None:
        return ""
    domain, bus, device = match[1].lower().split(":")
    return f"{int(domain, 16):x}:{bus}:{device}"


def own_buses(probes: Probes) -> set[str]:
    """PCI addresses of the cards that the run holds, else of those that its container has; empty
    if nobody said. The host's list is a line a card: ``minor 3, GPU-…, 0000:c1:00.0, NVIDIA H200``.
    """
    cards: dict[str, str] = {}
    for _, match in probes.search(r"^minor (\d+), (GPU-\S+), (\S+),"):
        cards[match[1]] = cards[match[2]] = bus_of(match[3])
    for probe in probes.named(r"^run_gpus$"):
        leased = [card for card in re.findall(r"GPU-[\w-]+", probe.text) if card in cards]
        if leased:
            return {cards[one] for one in leased}
    minors: set[str] = set()
    for probe in probes.named(r"^(?:ct_)?ls_dev$|^pct_config$"):
        minors |= set(re.findall(r"/dev/nvidia(\d+)\b", probe.text))
    return {cards[one] for one in minors if one in cards}


def stale(line: Line, started: float | None) -> bool:
    """Dated (``dmesg --time-format iso``: with an offset) before the run began."""
    match = _DATED.match(line.raw) if started is not None else None
    if match is None or started is None:
        return False
    when = datetime.fromisoformat(match[0].replace(",", ".")).timestamp()
    return when < started - CLOCKS_APART_S


def of_this_run(probes: Probes, number: str) -> Probes:
    """The probes without the lines of shared logs that are somebody else's or of before."""
    buses = own_buses(probes)
    kept = {}
    for key, probe in probes.items.items():
        if _SHARED.search(key):
            others = foreign(probe.lines, number, buses)
            lines = tuple(
                li for li in probe.lines if li not in others and not stale(li, probes.started)
            )
            if len(lines) != len(probe.lines):
                probe = Probe(key, probe.value, "\n".join(li.raw for li in lines), lines)
        kept[key] = probe
    return Probes.of(kept)
