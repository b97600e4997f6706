"""What differs between a run and the one before it: code, command, GPUs, config, data, environment.

Pure. A run that is slower than its predecessor was made so by something on this list, or by the
machine (clocks, neighbours), which a list of records cannot show.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.environment.compare import compare
from orchestrator.environment.lock import Environment
from trainer.telemetry import read_events

NAMED = 6
"""Files or fields that are named; more are counted."""


@dataclass(frozen=True)
class Past:
    """What a run left behind of how it was made."""

    run_id: str
    record: Mapping[str, Any] = field(default_factory=dict)
    """``run.json``"""
    manifest: str = ""
    """Of its release: a JSON line a file."""
    environment: Environment | None = None
    events: str = ""
    """``events.jsonl``, its beginning."""


def changes(before: Past, now: Past) -> list[str]:
    """A line for each difference that bears on the run, the likeliest cause of slowness first."""
    return [
        *_code(before, now),
        *_command(before, now),
        *_events(before, now),
        *_gpus(before, now),
        *_environment(before, now),
    ]


def _code(before: Past, now: Past) -> Iterator[str]:
    old, new = before.record.get("release"), now.record.get("release")
    git_old, git_new = (one.record.get("git") or {} for one in (before, now))
    if old == new and git_old == git_new:
        return
    said = []
    if git_old.get("commit") != git_new.get("commit"):
        said.append(f"commit {_commit(git_old)} → {_commit(git_new)}")
    elif git_old.get("dirty") or git_new.get("dirty"):
        said.append("uncommitted changes differ")
    files = _files(before.manifest, now.manifest)
    if files:
        number = "1 file differs" if len(files) == 1 else f"{len(files)} files differ"
        said.append(f"{number}: {_some(files)}")
    if said or old != new:
        yield f"code: release {old} → {new}" + "".join(f"; {one}" for one in said)


def _commit(git: Mapping[str, Any]) -> str:
    commit = str(git.get("commit") or "none")[:12]
    return commit + (" + uncommitted changes" if git.get("dirty") else "")


def _files(before: str, now: str) -> list[str]:
    old, new = _manifest(before), _manifest(now)
    if not old or not new:
        return []
    return sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))


def _manifest(text: str) -> dict[str, tuple[Any, ...]]:
    found = {}
    for line in text.splitlines():
        try:
            kind, path, *rest = json.loads(line)
        except ValueError:
            continue
        found[str(path)] = (kind, *rest)
    return found


def _command(before: Past, now: Past) -> Iterator[str]:
    old, new = before.record.get("command"), now.record.get("command")
    if old != new and old and new:
        yield f"command: {words(old)} → {words(new)}"


def words(value: Any) -> str:
    """A command's, and those of any list."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _gpus(before: Past, now: Past) -> Iterator[str]:
    old, new = before.record.get("gpus") or [], now.record.get("gpus") or []
    if old != new:
        yield f"GPUs: {', '.join(map(str, old)) or 'none'} → {', '.join(map(str, new)) or 'none'}"


def _events(before: Past, now: Past) -> Iterator[str]:
    """Of the trainer's own words: its config (``started``) and its data (``data``)."""
    for event, key, name in (("started", "config", "config"), ("data", "fingerprint", "data")):
        old, new = (last_detail(one.events, event).get(key) for one in (before, now))
        if not isinstance(old, dict) or not isinstance(new, dict) or old == new:
            continue
        left, right = flat(old), flat(new)
        fields = sorted(k for k in left.keys() | right.keys() if left.get(k) != right.get(k))
        told = [f"{k} {left.get(k)} → {right.get(k)}" for k in fields]
        yield f"{name}: {_some(told)}"


def last_detail(text: str, event: str) -> dict[str, Any]:
    """Of the last such event of an ``events.jsonl``: a run that is started again tells it again."""
    return next((one.detail for one in reversed([*read_events(text)]) if one.event == event), {})


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """``{"model.layers": 5}`` of ``{"model": {"layers": 5}}``."""
    if not isinstance(value, dict):
        return {path: value}
    found: dict[str, Any] = {}
    for key, one in value.items():
        found |= flat(one, f"{path}.{key}" if path else str(key))
    return found


def _environment(before: Past, now: Past) -> Iterator[str]:
    if before.environment is None or now.environment is None:
        return
    for one in compare(before.environment, now.environment):
        if one.weight != "harmless":
            yield f"environment: {one.key} {one.before} → {one.after} ({one.why})"


def drift(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """``torch 2.11.0 -> 2.13.0``: packages that came, went or changed; names normalized."""
    return [
        f"{name} {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def installed(text: str) -> dict[str, str]:
    """Packages of a probe's ``name version`` lines, named as an environment names them."""
    rows = [line.split() for line in text.splitlines()]
    return {re.sub(r"[-_.]+", "-", row[0]).lower(): row[1] for row in rows if len(row) == 2}


def _some(words: list[str]) -> str:
    more = f" and {len(words) - NAMED} more" if len(words) > NAMED else ""
    return ", ".join(words[:NAMED]) + more
