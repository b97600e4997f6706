"""What a live diagnosis reads: the end of the log, looks at the container, looks at its host.

Nothing here fails because a machine is ill: what could not be read is itself evidence.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.alarm import best_of
from orchestrator.changes import Past, changes, drift, installed
from orchestrator.channel import AgentChannel
from orchestrator.environment.lock import Environment, parse
from orchestrator.errors import DflashctlError, RunNotFound
from orchestrator.fleet import Fleet
from orchestrator.paths import ContainerPaths, RunPaths
from orchestrator.pct import FROZEN, SaidBy, frozen
from orchestrator.request import Request
from orchestrator.run import RunRef, RunSummary
from orchestrator.run_files import EVENT_LINES, comparable

# Some 20 MB at the usual 100 bytes a line: a second on a fast link, and the cause is near the end.
LINES = 200_000
METRIC_LINES = 5_000
# From the request to the last look, on either side: 0.6 s to start and open the channel, 0.4 s of
# pct, these, 0.3 s to judge make 3 s in all, also where nvidia-smi and df hang. A card that nobody
# holds, without a persistence daemon, may need longer; of a run that lives it does not.
LOOK_LIMIT_S = 1.5
# For the agent's own word that a look was late, and the way back.
LATE_S = 0.4
# The host's side from the open connection on, where its agent is slow to start.
HOST_LIMIT_S = 3.0
# Of use only where something has failed.
AFTERWARDS = frozenset({"pip_check"})
STACKS_LIMIT_S = 10.0


@dataclass
class Collected:
    """Everything that could be read of one run."""

    ref: RunRef
    log: Path
    """Empty where there is no log."""
    probes: dict[str, Any] = field(default_factory=dict)
    """Text or small JSON values by the names that ``orchestrator.diag`` reads."""
    summary: RunSummary | None = None
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``run.json`` and ``environment.json``, for whoever keeps them; no rule reads them."""
    error: DflashctlError | None = None
    """What kept the container from being asked."""


def collect(fleet: Fleet, ref: RunRef, log: Path) -> Collected:
    """Ask the container and its host at once; ``log`` is written."""
    found = Collected(ref, log)
    log.touch()
    found.probes["ct"] = ref.target.ct
    if (launched := launch_time(ref.run_id or "")) is not None:
        found.probes["run_started"] = launched
    beside: Looks | None = None
    try:
        channel = fleet.container(ref.target)
        until = time.monotonic() + HOST_LIMIT_S
        beside = Looks("host", partial(_ask_host, fleet, ref, channel))
        _ask_container(fleet, channel, ref, found)
    except RunNotFound:
        # Nothing to diagnose; `doctor` looks at containers.
        raise
    except DflashctlError as error:
        found.error = error
        found.probes["ssh" if error.ct is None else "pct"] = raw(error)
    if beside is not None:
        # It looked while the container did.
        found.probes.update(beside.taken(until - time.monotonic()))
    return found


Answers = Iterator[dict[str, Any]]


class Looks:
    """What one machine is asked to look at, taken as it comes: who is late keeps nobody waiting."""

    def __init__(self, side: str, ask: Callable[[], Answers]) -> None:
        self.side = side
        self._found: dict[str, Any] = {}
        self._heard = time.monotonic()
        self._error: DflashctlError | None = None
        self._thread = threading.Thread(target=self._take, args=(ask,), daemon=True)
        self._thread.start()

    def _take(self, ask: Callable[[], Answers]) -> None:
        try:
            for look in ask():
                value = look["value"] if look["ok"] else look.get("error", "")
                self._found[look["probe"]] = value
                self._heard = time.monotonic()
        except DflashctlError as error:
            self._error = error

    def taken(self, limit_s: float) -> dict[str, Any]:
        """After ``limit_s`` at most, or once a slow link that still brings some brings no more."""
        until = time.monotonic() + limit_s
        while (left := max(until, self._heard + LATE_S) - time.monotonic()) > 0:
            self._thread.join(left)
            if not self._thread.is_alive():
                break
        # A copy: a machine that is late may still be adding to its own.
        found = dict(self._found)
        if self._error is not None:
            # The container's own channel tells of a host that is not reached.
            found.setdefault(f"{self.side}_agent", self._error.what)
        elif self._thread.is_alive():
            found[f"{self.side}_agent"] = f"looked no further: {len(found)} looks are all it told"
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


def _ask_container(fleet: Fleet, channel: AgentChannel, ref: RunRef, found: Collected) -> None:
    about = channel.request("run.status", lines=0, **ref.fields)
    answer = about.result()
    summary = RunSummary.model_validate(answer)
    found.summary = summary
    run = {"run_id": summary.run_id}
    found.probes["run_state"] = summary.state
    found.probes["run_started"] = summary.created
    if summary.is_over and not answer.get("exit") and summary.reason:
        # Nothing in the run's folder tells of its end: the agent says why.
        found.probes["run_reason"] = summary.reason
    if gpus := answer.get("gpus"):
        found.probes["run_gpus"] = gpus
    looks = Looks("container", partial(_ask_looks, channel, ref, summary))
    until = time.monotonic() + LOOK_LIMIT_S + LATE_S
    log = channel.request("tail", files=[RunPaths("").log], lines=LINES, follow=False, **run)
    records = {
        name: channel.request("tail", files=[path], lines=count, follow=False, **run)
        for name, path, count in (
            ("events", RunPaths("").events, EVENT_LINES),
            ("metrics", RunPaths("").metrics, METRIC_LINES),
        )
    }
    environment = channel.request("pull.read", path=RunPaths("").environment, **run)
    stalled = summary.state == "stalled"
    stacks = _request_stacks(channel, ref, summary) if stalled else None
    with found.log.open("wb") as stream:
        for head, payload in log.frames():
            if "notice" not in head:
                stream.write(payload)
    for name, request in records.items():
        text = _whole(request)
        if text:
            found.probes[name] = text
    found.records["run.json"] = dict(answer.get("record") or {})
    if (recorded := _environment(_whole(environment))) is not None:
        found.records["environment.json"] = recorded.model_dump(mode="json")
    # While the machines are still looking.
    earlier = _compare(channel, ref, answer, found)
    found.probes.update(looks.taken(until - time.monotonic()))
    if drifted := _drift(earlier, recorded, str(found.probes.get("pip_list") or "")):
        found.probes["env_drift"] = "\n".join(drifted)
    if stacks is not None:
        # Twice: what stands in the same place both times is what hangs.
        found.probes["stacks_1"] = _stacks(fleet, ref, summary, stacks)
        again = _request_stacks(channel, ref, summary)
        found.probes["stacks_2"] = _stacks(fleet, ref, summary, again)


def _ask_looks(channel: AgentChannel, ref: RunRef, summary: RunSummary) -> Answers:
    without = [] if summary.is_over else sorted(AFTERWARDS)
    python, run_id = ref.target.settings.python, summary.run_id
    request = channel.request(
        "probe", without=without, python=python, timeout_s=LOOK_LIMIT_S, run_id=run_id
    )
    yield from (head for head, _ in request.frames())


def _drift(before: Environment | None, start: Environment | None, listed: str) -> list[str]:
    """Packages that differ from the run before, and that changed under this one."""
    if start is None:
        return []
    since = drift(before.packages, start.packages) if before is not None else []
    return since + (drift(start.packages, installed(listed)) if listed else [])


def _request_stacks(channel: AgentChannel, ref: RunRef, summary: RunSummary) -> Request:
    python = ref.target.settings.python
    return channel.request("stacks", python=python, run_id=summary.run_id, timeout_s=STACKS_LIMIT_S)


def _stacks(fleet: Fleet, ref: RunRef, summary: RunSummary, inside: Request) -> str:
    """From the container, else from its host: a container may forbid ptrace or lack py-spy."""
    seen = inside.result()["stacks"]
    if not _shows_python(seen):
        try:
            outside = fleet.host(ref.target.host).request(
                "stacks",
                side="host",
                run_id=summary.run_id,
                ct=ref.target.ct,
                timeout_s=STACKS_LIMIT_S,
            )
            other = outside.result()["stacks"]
        except DflashctlError as error:
            return f"{stacks_text(seen)}\n\n(from the host: {error.what})"
        if _shows_python(other):
            seen = other
    return stacks_text(seen)


def _shows_python(stacks: list[dict[str, Any]]) -> bool:
    return any(text.startswith("Process") or "\nThread " in text for text in _texts(stacks))


def _texts(stacks: list[dict[str, Any]]) -> list[str]:
    return [str(one.get("text", "")) for one in stacks]


def stacks_text(stacks: list[dict[str, Any]]) -> str:
    """As py-spy prints them, each with its process's rank; why one was not seen."""
    blocks = []
    for one in stacks:
        rank = f" (RANK={one['rank']})" if "rank" in one else ""
        failed = f"py-spy: {one['error']}\n" if one.get("error") else ""
        blocks.append(f"Process {one['pid']}: {one['command']}{rank}\n{failed}{one['text']}")
    return "\n\n".join(blocks)


def _whole(request: Request) -> str:
    """A record that the run may not write: a shell script has no metrics."""
    try:
        pieces = [payload for head, payload in request.frames() if "notice" not in head]
    except DflashctlError:
        return ""
    return b"".join(pieces).decode("utf-8", "replace")


def _compare(
    channel: AgentChannel, ref: RunRef, answer: dict[str, Any], found: Collected
) -> Environment | None:
    """The last run before this one that did the same work: its best rate, and what differs from it.
    Returns its environment."""
    earlier = comparable(channel, answer, str(found.probes.get("events") or ""))
    if earlier is None:
        return None
    measured = {"run": earlier.run_id, "tok_s": best_of(earlier.steps)}
    found.probes["predecessor"] = measured | ({"unlike": earlier.unlike} if earlier.unlike else {})
    asked = [_ask_past(channel, ref, one) for one in (earlier.status, answer)]
    past, present = (one() for one in asked)
    lines = changes(past, present)
    nothing = "nothing in code, command, config, data, GPUs or environment"
    found.probes["changes"] = "\n".join([f"since {earlier.run_id}:", *(lines or [nothing])])
    return past.environment


def _ask_past(channel: AgentChannel, ref: RunRef, answer: Mapping[str, Any]) -> Callable[[], Past]:
    """Sends for what a run left behind; the answer is waited for when it is called."""
    run_id, record = str(answer["run_id"]), answer.get("record") or {}
    paths = ContainerPaths(ref.target.settings.workdir)
    events = channel.request(
        "tail", run_id=run_id, files=[RunPaths("").events], lines=EVENT_LINES, follow=False
    )
    name = RunPaths("").environment
    environment = channel.request("pull.read", run_id=run_id, path=name)
    release = record.get("release")
    manifest = (
        channel.request("pull.read", path=paths.release_manifest(str(release))) if release else None
    )

    def past() -> Past:
        files = _whole(manifest) if manifest is not None else ""
        return Past(run_id, record, files, _environment(_whole(environment)), _whole(events))

    return past


def _environment(text: str) -> Environment | None:
    try:
        return parse(text, "the run's environment") if text else None
    except DflashctlError:
        # Of a version that told other things.
        return None


def _ask_host(fleet: Fleet, ref: RunRef, inside: AgentChannel) -> Answers:
    """``inside``: the channel to the container, which nobody need wait for while it is frozen."""
    channel = fleet.host(ref.target.host)
    request = channel.request("probe", side="host", ct=ref.target.ct, timeout_s=LOOK_LIMIT_S)
    for head, _ in request.frames():
        if head["probe"] == "cgroup_events" and FROZEN.search(str(head.get("text"))):
            inside.give_up(frozen(ref.target.host.name, ref.target.ct))
        yield head
