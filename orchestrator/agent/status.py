"""What state a run is in, derived from what lies in its folder and from who lives.

Nothing is stored that could become untrue: the supervisor's identity (PID, start time, boot id),
its exit record and the last lines of the trainer's telemetry are all there is.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from typing import Any

from orchestrator.agent import process
from orchestrator.agent.files import read_record, tail_lines
from orchestrator.agent.program import boot_id
from orchestrator.agent.protocol import AgentError
from orchestrator.agent.serve import Request
from orchestrator.paths import HostPaths, RunPaths

STARTING_S = 30.0
"""A folder without a supervisor is ``starting`` for this long, then it never started."""

STALL_AT_LEAST_S = 300.0
STALL_STEPS = 20
"""``stalled`` after this many of the run's own median step times without any line."""
STALL_COMPILING_S = 1800.0
"""Compiling says nothing for minutes on a large model."""

ENDED = ("finished", "failed", "stopped")
_COMPILING = {"started", "plan", "compiling", "compiled", "resumed"}
_STEP_FIELDS = ("step", "steps", "loss", "tau", "tokens_per_s", "eta_s", "epoch")
_RECORD_FIELDS = ("name", "command", "release", "gpus", "who", "created", "predecessor", "session")


def listing(request: Request) -> dict[str, Any]:
    limit = request.get("limit", int)
    lines = request.get("lines", int, 0)
    live = request.get("live", bool, False)
    runs: list[dict[str, Any]] = []
    for paths in folders(request.paths):
        if limit is not None and len(runs) >= limit:
            break
        found = summary(paths, lines=lines)
        if not live or found["state"] not in ENDED:
            runs.append(found)
    return {"runs": runs, "time": time.time()}


def status(request: Request) -> dict[str, Any]:
    paths = find(request)
    stall = request.get("stall_s", (int, float))
    found = summary(paths, lines=request.get("lines", int, 10), stall_s=stall)
    supervisor = read_record(paths.supervisor)
    root = supervisor["pid"] if supervisor and _lives(supervisor) else None
    members = [] if found["ended"] else process.Tree(paths.run_id, root).members()
    return {
        **found,
        "record": read_record(paths.record),
        "exit": read_record(paths.exit),
        "supervisor": supervisor,
        "processes": process.describe(members),
    }


def find(request: Request) -> RunPaths:
    """The run that the request names, else the newest."""
    run_id = request.get("run_id", str)
    if run_id is None:
        newest = folders(request.paths)
        if not newest:
            raise AgentError("run.not_found", "there is no run here")
        return newest[0]
    if "/" in run_id or run_id.startswith(".") or not run_id:
        raise AgentError("request.invalid", f"not a run id: {run_id!r}", field="run_id")
    paths = request.paths.run(run_id)
    if not os.path.isdir(paths.root):
        raise AgentError("run.not_found", f"there is no run {run_id} here", run_id=run_id)
    return paths


def folders(paths: HostPaths) -> list[RunPaths]:
    """All runs, the newest first (by the time their folder was made)."""
    try:
        entries = [entry for entry in os.scandir(paths.runs) if not entry.name.startswith(".")]
    except FileNotFoundError:
        return []
    found = []
    for entry in entries:
        run = RunPaths(entry.path)
        try:
            made = os.stat(run.record).st_mtime
        except OSError:
            continue
        found.append((made, entry.name, run))
    return [run for _, _, run in sorted(found, reverse=True, key=lambda item: item[:2])]


def live_runs(paths: HostPaths) -> list[dict[str, Any]]:
    """run.json of each run that has not ended."""
    return [read_record(run.record) or {} for run in folders(paths) if not _ended(run)]


def _ended(paths: RunPaths) -> bool:
    return state_of(paths) in ENDED


def state_of(paths: RunPaths) -> str:
    return str(summary(paths, lines=0)["state"])


def summary(paths: RunPaths, *, lines: int, stall_s: float | None = None) -> dict[str, Any]:
    """The fields of the contract; null where nothing is known (yet)."""
    record = read_record(paths.record) or {}
    supervisor = read_record(paths.supervisor)
    ending = read_record(paths.exit)
    beat = read_record(paths.heartbeat) or {}
    steps = _records(paths.metrics)
    events = _records(paths.events)
    step = steps[-1] if steps else {}
    event = events[-1] if events else {}
    now = time.time()
    alive = supervisor is not None and ending is None and _lives(supervisor)
    rebooted = record.get("boot_id") not in (None, boot_id())
    idle = _idle(paths, now)
    state, reason = _state(paths, record, supervisor, ending, alive, rebooted, event, step, now)
    patience = stall_s if stall_s is not None else _patience(state, steps)
    if alive and state in ("compiling", "training") and idle is not None and idle > patience:
        state = "stalled"
    return {
        "run_id": paths.run_id,
        **{key: record.get(key) for key in _RECORD_FIELDS},
        **{key: step.get(key) for key in _STEP_FIELDS},
        "host": record.get("hostname"),
        "state": state,
        "reason": reason,
        "stopping": ending is None and os.path.exists(paths.stop),
        "started": (supervisor or {}).get("started"),
        "ended": (ending or {}).get("ended"),
        "exit_code": (ending or {}).get("exit_code"),
        "signal": (ending or {}).get("signal"),
        "attempt": (supervisor or {}).get("attempt"),
        "attempts": (ending or {}).get("attempts"),
        "phase": event.get("event"),
        "metrics_time": step.get("time"),
        "alive": alive,
        "rebooted": rebooted,
        "boot_id": record.get("boot_id"),
        "idle_s": idle,
        "stall_after_s": patience,
        "log_bytes": _size(paths.log),
        "lost_bytes": (ending or beat).get("lost_bytes", 0),
        "heartbeat_s": round(now - beat["time"], 1) if "time" in beat else None,
        "last_lines": tail_lines(paths.log, lines) if lines else [],
        "run_dir": paths.root,
    }


def _state(
    paths: RunPaths,
    record: dict[str, Any],
    supervisor: dict[str, Any] | None,
    ending: dict[str, Any] | None,
    alive: bool,
    rebooted: bool,
    event: dict[str, Any],
    step: dict[str, Any],
    now: float,
) -> tuple[str, str | None]:
    if ending is not None:
        return str(ending["reason"]), ending.get("error") or ending["reason"]
    if rebooted:
        return "failed", "the container was rebooted under the run"
    if supervisor is None:
        if now - record.get("created", 0.0) < STARTING_S:
            return "starting", None
        return "failed", "it never started"
    child = supervisor.get("child")
    orphaned = not alive and child and process.alive(child["pid"], child["start"] or -1)
    if not alive and not orphaned:
        return "failed", "the supervisor was killed and left no record"
    reason = "the supervisor is gone, the command runs on" if orphaned else None
    # Of an earlier attempt: a run that was restarted compiles again.
    begun = supervisor.get("attempt_started") or 0.0
    stepped = step.get("time", 0.0) >= begun
    compiling = event.get("time", 0.0) >= begun and event.get("event") in _COMPILING
    if compiling and not (stepped and step["time"] >= event["time"]):
        return "compiling", reason
    if stepped or event:
        return "training", reason
    return ("training" if _size(paths.log) else "starting"), reason


def _lives(supervisor: dict[str, Any]) -> bool:
    same_boot = supervisor.get("boot_id") == boot_id()
    return same_boot and process.alive(supervisor["pid"], supervisor["start"])


def _patience(state: str, steps: list[dict[str, Any]]) -> float:
    if state == "compiling":
        return STALL_COMPILING_S
    times = [line["time"] for line in steps if isinstance(line.get("time"), (int, float))]
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    if not gaps:
        return STALL_AT_LEAST_S
    return max(STALL_AT_LEAST_S, STALL_STEPS * gaps[len(gaps) // 2])


def _idle(paths: RunPaths, now: float) -> float | None:
    """Seconds since the last line of any kind, by the container's clock."""
    newest = None
    for path in (paths.log, paths.metrics, paths.events):
        try:
            newest = max(newest or 0.0, os.stat(path).st_mtime)
        except OSError:
            continue
    return None if newest is None else round(max(0.0, now - newest), 1)


def _records(path: str) -> list[dict[str, Any]]:
    """The last JSON lines; what does not parse (a torn last line) is passed over."""
    found = []
    for line in tail_lines(path, 64):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
