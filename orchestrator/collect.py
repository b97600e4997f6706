"""What a live diagnosis reads: the end of the log, looks at the container, looks at its host.

Nothing here fails because a machine is ill: what could not be read is itself evidence.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.agent.protocol import CONTAINER_PROBES
from orchestrator.alarm import best_of
from orchestrator.channel import AgentChannel
from orchestrator.errors import DflashctlError, RunNotFound
from orchestrator.fleet import Fleet
from orchestrator.paths import RunPaths
from orchestrator.pct import SaidBy
from orchestrator.request import Request
from orchestrator.run import RunRef, RunSummary
from orchestrator.watch import SEED_LINES, read_metrics

# Some 20 MB at the usual 100 bytes a line: a second on a fast link, and the cause is near the end.
LINES = 200_000
EVENT_LINES = 2_000
METRIC_LINES = 5_000
HOST_LIMIT_S = 6.0
# `pip check` takes 3 s with torch installed: of use only where something has failed.
SLOW = frozenset({"pip_check"})


@dataclass
class Collected:
    """Everything that could be read of one run."""

    ref: RunRef
    log: Path
    """Empty where there is no log."""
    probes: dict[str, Any] = field(default_factory=dict)
    """Text or small JSON values by the names that ``orchestrator.diag`` reads."""
    summary: RunSummary | None = None
    error: DflashctlError | None = None
    """What kept the container from being asked."""


def collect(fleet: Fleet, ref: RunRef, log: Path) -> Collected:
    """Ask the container and its host at once; ``log`` is written."""
    found = Collected(ref, log)
    log.touch()
    if ref.target.ct is not None:
        found.probes["ct"] = ref.target.ct
    if (launched := launch_time(ref.run_id or "")) is not None:
        found.probes["run_started"] = launched
    host: dict[str, Any] = {}
    beside = threading.Thread(target=_ask_host, args=(fleet, ref, host), daemon=True)
    beside.start()
    try:
        _ask_container(fleet.container(ref.target), ref, found)
    except RunNotFound:
        # Nothing to diagnose; `doctor` looks at containers.
        raise
    except DflashctlError as error:
        found.error = error
        found.probes["ssh" if ref.target.ct is None or error.ct is None else "pct"] = raw(error)
    beside.join(HOST_LIMIT_S)
    # A copy: a host that is late may still be adding to its own.
    found.probes.update(dict(host))
    return found


def launch_time(run_id: str) -> float | None:
    """Of the stamp in a run's id, which is this laptop's local time; the container, if it answers,
    says it better."""
    match = re.search(r"-(\d{8}-\d{6})-[0-9a-f]+$", run_id)
    if match is None:
        return None
    try:
        return time.mktime(time.strptime(match[1], "%Y%m%d-%H%M%S"))
    except ValueError:
        return None


def raw(error: DflashctlError) -> str:
    """The words that a machine used, which rules know, after ours, which name the place."""
    cause = error.__cause__
    if cause is None or isinstance(cause, SaidBy):
        return str(cause or error.what)
    return f"ssh: host {error.host}: {type(cause).__name__}: {cause}"


def _ask_container(channel: AgentChannel, ref: RunRef, found: Collected) -> None:
    about = channel.request("run.status", lines=0, **ref.fields)
    python = ref.target.settings.python
    summary = RunSummary.model_validate(about.result())
    found.summary = summary
    run = {"run_id": summary.run_id}
    found.probes["run_state"] = summary.state
    found.probes["run_started"] = summary.created
    names = [name for name in CONTAINER_PROBES if summary.is_over or name not in SLOW]
    looks = channel.request("probe", names=names, python=python, **run)
    log = channel.request("tail", files=[RunPaths("").log], lines=LINES, follow=False, **run)
    records = {
        name: channel.request("tail", files=[path], lines=count, follow=False, **run)
        for name, path, count in (
            ("events", RunPaths("").events, EVENT_LINES),
            ("metrics", RunPaths("").metrics, METRIC_LINES),
        )
    }
    stacks = channel.request("stacks", python=python, **run) if summary.state == "stalled" else None
    with found.log.open("wb") as stream:
        for head, payload in log.frames():
            if "notice" not in head:
                stream.write(payload)
    for name, request in records.items():
        text = _whole(request)
        if text:
            found.probes[name] = text
    found.probes.update(_values(looks.result()))
    if stacks is not None:
        # Twice: what stands in the same place both times is what hangs.
        found.probes["stacks_1"] = _stacks(stacks.result())
        found.probes["stacks_2"] = _stacks(channel.request("stacks", python=python, **run).result())
    before = (summary.model_extra or {}).get("predecessor")
    if before:
        _compare(channel, str(before), found)


def _whole(request: Request) -> str:
    """A record that the run may not write: a shell script has no metrics."""
    try:
        pieces = [payload for head, payload in request.frames() if "notice" not in head]
    except DflashctlError:
        return ""
    return b"".join(pieces).decode("utf-8", "replace")


def _compare(channel: AgentChannel, before: str, found: Collected) -> None:
    try:
        best = best_of(read_metrics(channel, before, SEED_LINES))
    except DflashctlError:
        # Removed since, or of another container.
        return
    if best is not None:
        found.probes["predecessor"] = {"run": before, "tok_s": best}


def _ask_host(fleet: Fleet, ref: RunRef, found: dict[str, Any]) -> None:
    try:
        channel = fleet.host(ref.target.host)
        request = channel.request("probe", side="host", ct=ref.target.ct)
        for head, _ in request.frames():
            found.update(_values({"probes": {head["probe"]: head}}))
    except DflashctlError as error:
        # The container's own channel tells of a host that is not reached.
        found.setdefault("host_agent", error.what)


def _values(answer: dict[str, Any]) -> dict[str, Any]:
    """A probe's value; of one that failed, its words."""
    return {
        name: look["value"] if look["ok"] else look.get("error", "")
        for name, look in answer["probes"].items()
    }


def _stacks(answer: dict[str, Any]) -> str:
    return "\n\n".join(
        f"Process {one['pid']}: {one['command']}\n{one['text']}" for one in answer["stacks"]
    )
