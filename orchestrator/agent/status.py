"""What state a run is in, derived from what lies in its folder and from who lives.

Nothing is stored that could become untrue: the supervisor's identity (PID, start time, boot id),
its exit record and the last lines of the trainer's telemetry are all there is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
from typing import Any

from orchestrator.agent import process
from orchestrator.agent.files import tail_lines
from orchestrator.agent.program import boot_id
from orchestrator.agent.protocol import AgentError
from orchestrator.agent.records import (
    ENDED,
    exit_record,
    heartbeat,
    run_record,
    supervisor_record,
)
from orchestrator.agent.serve import Request
from orchestrator.paths import HostPaths, RunPaths

STARTING_S = 30.0
"""A folder without a supervisor is ``starting`` for this long, then it never started."""

STALL_AT_LEAST_S = 300.0
STALL_STEPS = 20
"""``stalled`` after this many of the run's own median step times without any line."""
STALL_COMPILING_S = 1800.0
"""Compiling says nothing for minutes on a large model, nor does loading it."""
STALL_QUIET_S = 1800.0
STALL_QUIET_TIMES = 3
"""A validation may be silent for so long, or for so many times what this run's longest took."""

# Of trainer/telemetry.py, whose pydantic the agent has not.
_QUIET = frozenset({"validating", "validated", "evaluating"})
_PREPARING = {"started", "data"}
"""The target is loaded, the data made or tokenized: hours, where the target writes its answers."""
_COMPILING = {"plan", "compiling", "compiled", "resumed"}
_SILENT = ("preparing", "compiling")
_STEP_FIELDS = ("step", "steps", "loss", "tau", "tokens_per_s", "eta_s", "epoch")
_COUNTS = ("step", "steps")
_RECORD_FIELDS = ("name", "command", "release", "gpus", "who", "created", "predecessor", "session")


def listing(request: Request) -> dict[str, Any]:
    limit = request.get("limit", int)
    lines = request.get("lines", int, 0)
    live = request.get("live", bool, False)
    runs: list[dict[str, Any]] = []
    for paths in folders(request.paths):
        full = limit is not None and len(runs) >= limit
        if full and os.path.exists(paths.exit):
            continue
        found = summary(paths, lines=lines)
        # A run that lives is told however many newer ones have ended.
        if found["state"] not in ENDED or not (live or full):
            runs.append(found)
    return {"runs": runs, "time": time.time()}


def status(request: Request) -> dict[str, Any]:
    paths = find(request)
    stall = request.get("stall_s", (int, float))
    found = summary(paths, lines=request.get("lines", int, 10), stall_s=stall)
    supervisor = supervisor_record(paths)
    root = supervisor["pid"] if supervisor and _lives(supervisor) else None
    members = [] if found["ended"] else process.Tree(paths.run_id, root).members()
    if members and found["state"] in ENDED:
        left = ", ".join(str(one.pid) for one in members[:4])
        found["reason"] = f"{found['reason']}; left of it: PID {left}, which stop ends"
    return {
        **found,
        "record": run_record(paths),
        "exit": exit_record(paths),
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
    # The record first: of a thousand runs it settles all but one or two with one look.
    open_ones = [run for run in folders(paths) if not os.path.exists(run.exit)]
    return [run_record(run) for run in open_ones if not _ended(run)]


def in_the_way(paths: HostPaths, gpus: list[Any]) -> list[dict[str, Any]]:
    """The runs that live here and keep another on ``gpus`` from being started unless it is forced:
    every one, except where both name their GPUs and share none. A run that names none may use all
    of them.
    """
    wanted = set(map(str, gpus))
    busy = []
    for run in live_runs(paths):
        theirs = set(map(str, run.get("gpus") or []))
        if wanted and theirs and not wanted & theirs:
            continue
        run_id, who = run.get("run_id"), run.get("who")
        words = f"{run_id} of {who}" if who else str(run_id)
        shared = sorted(wanted & theirs)
        found = {"run_id": run_id, "name": run.get("name"), "who": who}
        busy.append({**found, "gpus": shared, "words": words})
    return busy


def _ended(paths: RunPaths) -> bool:
    return state_of(paths) in ENDED


def state_of(paths: RunPaths) -> str:
    return str(summary(paths, lines=0)["state"])


class Folder:
    """All that a run's folder says, read once."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.record = run_record(paths)
        self.supervisor = supervisor_record(paths)
        self.ending = exit_record(paths)
        self.beat = heartbeat(paths)
        self.steps = _records(paths.metrics)
        self.step = self.steps[-1] if self.steps else {}
        self.events = _records(paths.events)
        self.event = self.events[-1] if self.events else {}
        self.now = time.time()
        self.rebooted = self.record.get("boot_id") not in (None, boot_id())
        self.alive = self.supervisor is not None and self.ending is None and _lives(self.supervisor)

    def state(self) -> tuple[str, str | None]:
        """The state before stalls are looked for, and why it is so where that needs words."""
        if self.ending is not None:
            reason = str(self.ending.get("reason"))
            return reason, self.ending.get("error") or reason
        if self.rebooted:
            return "failed", "the container was rebooted under the run"
        if self.supervisor is None:
            if self.now - (self.record.get("created") or 0.0) < STARTING_S:
                return "starting", None
            return "failed", "it never started"
        if self.alive:
            return self._phase(), None
        child = self.supervisor.get("child")
        if child and process.alive(child["pid"], child["start"] or -1):
            return self._phase(), "the supervisor is gone, the command runs on"
        return "failed", "the supervisor was killed and left no record"

    def _phase(self) -> str:
        """Of this attempt: a run that was restarted compiles again."""
        begun = (self.supervisor or {}).get("attempt_started") or 0.0
        spoken = _time(self.event) >= begun and self.event.get("event")
        stepped = bool(self.step) and _time(self.step) >= begun
        if not (stepped and _time(self.step) >= _time(self.event)):
            if spoken in _PREPARING:
                return "preparing"
            if spoken in _COMPILING:
                return "compiling"
        if stepped or spoken:
            return "training"
        return "training" if _size(self.paths.log) else "starting"

    def patience(self, state: str) -> float:
        """Seconds of silence that this phase explains."""
        if state in _SILENT:
            return STALL_COMPILING_S
        gaps = _gaps(self.steps)
        usual = max(STALL_AT_LEAST_S, STALL_STEPS * gaps[len(gaps) // 2] if gaps else 0.0)
        if self.event.get("event") in _QUIET and _time(self.event) >= _time(self.step):
            before = [
                _time(end) - _time(start)
                for start, end in itertools.pairwise(self.events)
                if start.get("event") == self.event["event"]
            ]
            return max(usual, STALL_QUIET_S, STALL_QUIET_TIMES * max(before, default=0.0))
        return usual

    def idle(self) -> float | None:
        """Seconds since the last line of any kind, by the clock that stamps the files.

        On a network mount that is the server's, and it may be minutes off: the heartbeat, written
        every second, tells what it shows now.
        """
        now = self.now
        if self.alive:
            with contextlib.suppress(OSError):
                now = os.stat(self.paths.heartbeat).st_mtime
        newest = 0.0
        for path in (self.paths.log, self.paths.metrics, self.paths.events):
            with contextlib.suppress(OSError):
                newest = max(newest, os.stat(path).st_mtime)
        return round(max(0.0, now - newest), 1) if newest else None


def summary(paths: RunPaths, *, lines: int, stall_s: float | None = None) -> dict[str, Any]:
    """The fields of the contract; null where nothing is known (yet)."""
    run = Folder(paths)
    supervisor, ending = run.supervisor or {}, run.ending or {}
    state, reason = run.state()
    idle = run.idle()
    patience = run.patience(state)
    if stall_s is not None:
        # Whoever thinks of steps with `--stall 2m` wants no alarm at each compile.
        patience = max(stall_s, patience) if state in _SILENT else stall_s
    if run.alive and state in (*_SILENT, "training") and idle is not None and idle > patience:
        state = "stalled"
    return {
        "run_id": paths.run_id,
        **{key: run.record.get(key) for key in _RECORD_FIELDS},
        **{key: _number(run.step, key) for key in _STEP_FIELDS},
        "host": run.record.get("hostname"),
        "state": state,
        "reason": reason,
        "stopping": run.ending is None and os.path.exists(paths.stop),
        "started": supervisor.get("started"),
        "ended": ending.get("ended"),
        "exit_code": ending.get("exit_code"),
        "signal": ending.get("signal"),
        "attempt": supervisor.get("attempt"),
        "attempts": ending.get("attempts"),
        "phase": run.event.get("event"),
        "metrics_time": run.step.get("time"),
        "alive": run.alive,
        "rebooted": run.rebooted,
        "boot_id": run.record.get("boot_id"),
        "idle_s": idle,
        "stall_after_s": patience,
        "log_bytes": _size(paths.log),
        "lost_bytes": (run.ending or run.beat).get("lost_bytes", 0),
        "heartbeat_s": round(run.now - run.beat["time"], 1) if run.beat.get("time") else None,
        "last_lines": tail_lines(paths.log, lines) if lines else [],
        "run_dir": paths.root,
    }


def _number(line: dict[str, Any], key: str) -> float | None:
    """Of a trainer that is not ours a field may be anything; the laptop is promised numbers."""
    found = line.get(key)
    if not isinstance(found, (int, float)) or not math.isfinite(found):
        return None
    return int(found) if key in _COUNTS else found


def _time(line: dict[str, Any]) -> float:
    found = line.get("time")
    return float(found) if isinstance(found, (int, float)) else 0.0


def _lives(supervisor: dict[str, Any]) -> bool:
    same_boot = supervisor.get("boot_id") == boot_id()
    return same_boot and process.alive(supervisor["pid"], supervisor["start"])


def _gaps(steps: list[dict[str, Any]]) -> list[float]:
    """Seconds from line to line, sorted."""
    times = [line["time"] for line in steps if isinstance(line.get("time"), (int, float))]
    return sorted(after - before for before, after in itertools.pairwise(times))


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
