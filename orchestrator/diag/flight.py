"""NCCL flight-recorder dumps: which collective, which rank is missing, who called another one.

torch writes one dump a rank (``TORCH_FR_DUMP_TEMP_FILE`` + rank; older:
``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``) as a pickle; the agent turns it into the JSON that is read here
(``orchestrator/agent/flight.py``). Fields by version 2.x of the format (torch 2.13, also of gloo):
``entries`` with ``collective_seq_id``, ``profiling_name`` (``nccl:all_reduce``), ``state``
(scheduled, started, completed), ``input_sizes``.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.diag.probes import Probe


@dataclass(frozen=True)
class Call:
    """One collective of one rank."""

    rank: int
    group: str
    sequence: int
    name: str
    sizes: str
    state: str
    frame: str = ""


@dataclass(frozen=True)
class Mismatch:
    """The first collective of a group on which the ranks differ."""

    group: str
    sequence: int
    calls: tuple[Call, ...]
    missing: tuple[int, ...]
    """Ranks that never made it."""

    @property
    def text(self) -> str:
        names = sorted({f"{c.name} {c.sizes}".strip() for c in self.calls})
        by_name = {
            name: [c.rank for c in self.calls if f"{c.name} {c.sizes}".strip() == name]
            for name in names
        }
        if len(names) > 1:
            smallest = min(names, key=lambda n: len(by_name[n]))
            odd = ", ".join(map(str, by_name[smallest]))
            at = next((c.frame for c in self.calls if c.rank in by_name[smallest] and c.frame), "")
            return (
                f"collective {self.sequence} of group {self.group} differs: rank {odd} called "
                f"{smallest}"
                + (f" at {at}" if at else "")
                + f", others {', '.join(n for n in names if n != smallest)}"
            )
        absent = ", ".join(map(str, self.missing))
        return (
            f"rank {absent} never called {names[0]}, number {self.sequence} of group {self.group}"
        )


def read_dumps(probes: Iterable[Probe]) -> dict[int, list[Call]]:
    """Rank to its calls, from every probe that holds a dump (one a probe, or a mapping by rank)."""
    found: dict[int, list[Call]] = {}
    for probe in probes:
        value = _value(probe)
        if not isinstance(value, dict):
            continue
        if "entries" in value:
            found[_rank(value, probe.key)] = _calls(value, _rank(value, probe.key))
        else:
            for key, dump in value.items():
                if isinstance(dump, dict) and "entries" in dump:
                    rank = _rank(dump, str(key))
                    found[rank] = _calls(dump, rank)
    return found


def _value(probe: Probe) -> Any:
    if not isinstance(probe.value, str):
        return probe.value
    if '"entries"' not in probe.value:
        return None
    try:
        return json.loads(probe.value)
    except ValueError:
        return None


def _rank(dump: Mapping[str, Any], key: str) -> int:
    if isinstance(dump.get("rank"), int):
        return int(dump["rank"])
    match = re.search(r"(\d+)\D*$", key)
    return int(match[1]) if match else 0


def _calls(dump: Mapping[str, Any], rank: int) -> list[Call]:
    calls = []
    entries = dump.get("entries")
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or entry.get("is_p2p"):
            continue
        group = entry.get("process_group") or entry.get("pg_name") or "0"
        label = "/".join(map(str, group)) if isinstance(group, (list, tuple)) else str(group)
        sequence = entry.get("collective_seq_id", entry.get("seq_id"))
        if not isinstance(sequence, int):
            continue
        sizes, frames = (_items(entry.get(key)) for key in ("input_sizes", "frames"))
        frames = [f for f in frames if isinstance(f, dict)]
        user = next((f for f in frames if "/torch/" not in str(f.get("filename"))), None)
        calls.append(
            Call(
                rank,
                label,
                sequence,
                re.sub(r"^\w+:", "", str(entry.get("profiling_name", "?"))),  # nccl:, gloo:
                "x".join(map(str, sizes[0]))
                if sizes and isinstance(sizes[0], (list, tuple))
                else "",
                str(entry.get("state", "")),
                f"{user.get('filename')}:{user.get('line')}" if user else "",
            )
        )
    return calls


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def first_mismatch(dumps: Mapping[int, list[Call]]) -> Mismatch | None:
    """The earliest collective that not every rank made, or not in the same way. Buffers are rings:
    what is older than the youngest rank's first entry is not compared."""
    if len(dumps) < 2:
        return None
    groups: dict[str, dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    members: dict[str, set[int]] = defaultdict(set)
    for rank, made in dumps.items():
        for call in made:
            groups[call.group][call.sequence][rank] = call
            members[call.group].add(rank)
    found: list[Mismatch] = []
    for group, sequences in groups.items():
        ranks = members[group]
        if len(ranks) < 2:
            continue
        start = max(min(s for s, calls in sequences.items() if r in calls) for r in ranks)
        for sequence in sorted(s for s in sequences if s >= start):
            calls = sequences[sequence]
            missing = tuple(sorted(ranks - set(calls)))
            kinds = {(c.name, c.sizes) for c in calls.values()}
            if missing or len(kinds) > 1:
                ordered = tuple(calls[r] for r in sorted(calls))
                found.append(Mismatch(group, sequence, ordered, missing))
                break
    return min(found, key=lambda m: m.sequence) if found else None
