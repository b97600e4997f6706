"""``preflight``: what must hold before a run may start, looked at all at once."""

from __future__ import annotations

import glob
import json
import os
import resource
import stat
import sys
import time
from functools import cache, partial
from typing import Any

from orchestrator.agent.files import new_name, space
from orchestrator.agent.looking import Failed, Limit, Look, at_once, command
from orchestrator.agent.program import which
from orchestrator.agent.serve import Request

LIMIT_S = 10.0
MINIMUM_PYTHON = (3, 10)
FREE_BYTES = 1 << 30
"""Below this on the work folder no run is worth starting: one checkpoint is more."""
SHM_BYTES = 1 << 30
"""Docker's and LXC's small defaults (64 MB) stop data loaders and NCCL."""
TMP_BYTES = 256 << 20
"""torch.compile's cache of one model takes some 100 MB."""
TMP_INODES = 1000
MEMORY_BYTES = 1 << 30
OPEN_FILES = 4096
LOCKED_BYTES = 64 << 20

# Distributions are asked by their metadata: importing torch takes seconds.
_ASK = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return "" if u.find_spec(name) else None
print(json.dumps({"version": list(sys.version_info[:3]), "path": sys.executable,
    "modules": {n: version(n) for n in sys.argv[1:]}}))
"""


class Bad(Exception):
    """A check that did not hold: the words and what was measured."""

    def __init__(self, words: str, value: Any) -> None:
        super().__init__(words)
        self.value = value


def preflight(request: Request) -> dict[str, Any]:
    workdir = request.paths.workdir
    modules = [name for name in request.get("modules", list, []) if isinstance(name, str)]

    # Two checks read the one answer; whoever comes second waits for the first.
    @cache
    def interpreter() -> dict[str, Any]:
        return _interpreter(request.get("python", str, "python3"), modules)

    looks = {
        "python": lambda: _python(interpreter()),
        "modules": lambda: _modules(interpreter()),
        "tmux": _tmux,
        "tmp": _tmp,
        "disk": partial(_disk, workdir, request.get("release_bytes", int, 0)),
        "shm": _shm,
        "limits": _limits,
        "memory": _memory,
        "locale": _locale,
        "clock": lambda: {"time": time.time()},
        "gpu": partial(_gpu, [str(one) for one in request.get("gpus", list, [])]),
        "cpu": _cpu,
        "workdir": partial(_workdir, workdir),
        "runs": partial(_runs, request),
    }
    checks: dict[str, Any] = {}

    def tell(name: str, look: Look) -> None:
        answer: dict[str, Any] = {"ok": look.ok, "seconds": look.seconds}
        if isinstance(look.value, Bad):
            answer |= {"ok": False, "error": str(look.value), "value": look.value.value}
        elif look.ok:
            answer["value"] = look.value
        else:
            answer["error"] = look.error
        checks[name] = answer

    at_once({name: partial(_judged, look) for name, look in looks.items()}, LIMIT_S, tell)
    return {"checks": checks}


def _judged(look: Any) -> Any:
    """What it measured, or ``Bad``; whatever else it raises is a look that failed."""
    try:
        return look()
    except Bad as bad:
        return bad


def _interpreter(python: str, modules: list[str]) -> dict[str, Any]:
    path = python if "/" in python else which(python) or python
    if path == sys.executable and not modules:
        # It is the one that runs this.
        return {"version": list(sys.version_info[:3]), "path": path, "modules": {}}
    text = command([path, "-c", _ASK, *modules], LIMIT_S, check=True)
    answer: dict[str, Any] = json.loads(text.splitlines()[-1])
    return answer


def _python(answer: dict[str, Any]) -> dict[str, Any]:
    value = {"version": ".".join(map(str, answer["version"])), "path": answer["path"]}
    if tuple(answer["version"]) < MINIMUM_PYTHON:
        raise Bad(f"Python {value['version']} is older than 3.10", value)
    return value


def _modules(answer: dict[str, Any]) -> dict[str, Any]:
    found = {name: version for name, version in answer["modules"].items() if version is not None}
    missing = [name for name in answer["modules"] if name not in found]
    if missing:
        words = f"{answer['path']} has no {', '.join(missing)}"
        raise Bad(words, {"found": found, "missing": missing})
    return {"found": found, "missing": []}


def _tmux() -> dict[str, Any]:
    from orchestrator.agent.tmux import socket_path

    path = which("tmux")
    if path is None:
        raise Failed("there is no tmux")
    value = {"path": path, "version": command([path, "-V"], LIMIT_S).removeprefix("tmux ")}
    folder = os.path.dirname(socket_path())
    place = os.path.dirname(folder)
    try:
        # tmux makes its folder and its socket there: by trying, full and read-only are known alike.
        mine = new_name(place, ".dflashctl-")
        os.mkdir(mine, 0o700)
        os.rmdir(mine)
    except OSError as error:
        words = f"tmux cannot keep its socket in {place}: {error.strerror}"
        raise Bad(words, {**value, "place": place}) from error
    if why := _unusable(folder):
        raise Bad(f"tmux cannot keep its socket in {folder}: {why}", {**value, "folder": folder})
    return value


def _unusable(folder: str) -> str:
    """Why tmux would refuse the folder of its socket, or ""; it makes a missing one itself."""
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return ""
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}, not {os.getuid()}"
    return "it is open to all users" if found.st_mode & stat.S_IRWXO else ""


def _tmp() -> dict[str, Any]:
    """Where compilers build and everybody's temporary files go, unless TMPDIR says otherwise."""
    path = "/tmp"
    found = os.statvfs(path)
    free = found.f_bavail * found.f_frsize
    value: dict[str, Any] = {"path": path, "free": free}
    if found.f_flag & os.ST_NOEXEC:
        raise Bad(
            f"{path} is mounted noexec: what torch.compile builds there cannot be loaded",
            value | {"noexec": True},
        )
    if free < TMP_BYTES:
        raise Bad(f"{path} has only {free / 1e6:.0f} MB free", value)
    if found.f_files and found.f_favail < TMP_INODES:
        raise Bad(f"{path} has only {found.f_favail} inodes left", value)
    return value


def _disk(workdir: str, release_bytes: int) -> dict[str, Any]:
    free, total = space(_existing(workdir))
    inodes = os.statvfs(_existing(workdir)).f_favail
    value = {"path": workdir, "free": free, "total": total, "free_inodes": inodes}
    needed = FREE_BYTES + 2 * release_bytes
    if free < needed:
        parts = f"{FREE_BYTES / 1e9:.1f} GB for a checkpoint"
        if release_bytes >= 5e7:
            parts += f", {2 * release_bytes / 1e9:.1f} GB for the code: pushed, then laid out"
        left = f"{free / 1e9:.1f} GB" if free >= 1e8 else f"{free / 1e6:.0f} MB"
        words = f"{left} left, and a run needs {needed / 1e9:.1f} GB"
        raise Bad(f"{workdir} has only {words} ({parts})", value | {"needed": needed})
    if os.statvfs(_existing(workdir)).f_files and inodes < 10_000:
        raise Bad(f"{workdir} has only {inodes} inodes left", value)
    return value


def _existing(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _shm() -> dict[str, Any]:
    free, total = space("/dev/shm")
    value = {"free": free, "total": total}
    # A gigabyte that others use a little of is enough.
    if total < SHM_BYTES or free < SHM_BYTES / 2:
        raise Bad(f"/dev/shm has only {free / 1e6:.0f} MB free", value)
    return value


def _limits() -> dict[str, Any]:
    value: dict[str, Any] = {}
    low = []
    for name, number, wanted in (
        ("open_files", resource.RLIMIT_NOFILE, OPEN_FILES),
        ("locked_memory", resource.RLIMIT_MEMLOCK, LOCKED_BYTES),
    ):
        _, hard = resource.getrlimit(number)
        value[name] = None if hard == resource.RLIM_INFINITY else hard
        if name == "locked_memory" and not glob.glob("/dev/nvidia[0-9]*"):
            continue  # Only a GPU's driver and NCCL lock memory.
        if hard != resource.RLIM_INFINITY and hard < wanted:
            shown = f"{hard / 1e6:.0f} MB" if number == resource.RLIMIT_MEMLOCK else str(hard)
            low.append(f"{name.replace('_', ' ')} is limited to {shown}")
    if low:
        raise Bad(", ".join(low), value)
    return value


def _memory() -> dict[str, Any]:
    limit = _first_number("memory.max", "memory/memory.limit_in_bytes")
    used = _first_number("memory.current", "memory/memory.usage_in_bytes")
    with open("/proc/meminfo") as file:
        rows = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file}
    value: dict[str, Any] = {"total": rows["MemTotal"], "available": rows["MemAvailable"]}
    # Version 1 writes "no limit" as the largest number of pages.
    if limit is not None and limit < rows["MemTotal"]:
        cached = min(rows.get("Cached", 0), used or 0)
        value |= {"limit": limit, "used": used}
        value["available"] = min(value["available"], limit - (used or 0) + cached)
    if value["available"] < MEMORY_BYTES:
        raise Bad(f"only {value['available'] / 1e9:.1f} GB of memory are available", value)
    return value


def _first_number(*names: str) -> int | None:
    for name in names:
        try:
            with open(f"/sys/fs/cgroup/{name}") as file:
                return int(file.read())
        except (OSError, ValueError):
            continue
    return None


def _locale() -> dict[str, Any]:
    with open("/proc/self/environ", "rb") as file:
        pairs = dict(pair.partition(b"=")[::2] for pair in file.read().split(b"\0"))
    names = (b"LC_ALL", b"LC_CTYPE", b"LANG")
    effective = next((pairs[name] for name in names if pairs.get(name)), b"").decode()
    value = {"effective": effective}
    if "utf8" not in effective.lower().replace("-", ""):
        raise Bad(f"no UTF-8 locale ({effective or 'none is set'})", value)
    return value


def _gpu(wanted: list[str]) -> dict[str, Any]:
    if not wanted and which("nvidia-smi") is None:
        return {"wanted": [], "visible": []}
    from orchestrator.agent.gpu import cards

    visible = cards(Limit(LIMIT_S))
    names = {str(card["index"]) for card in visible} | {card["uuid"] for card in visible}
    value = {"wanted": wanted, "visible": visible}
    missing = [one for one in wanted if one not in names]
    if missing:
        words = f"GPU {', '.join(missing)} is not visible here ({len(visible)} are)"
        raise Bad(words, value)
    return value


def _cpu() -> dict[str, Any]:
    cores: float = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        pass
    return {"cores": cores, "load": os.getloadavg()[0]}


def _workdir(workdir: str) -> dict[str, Any]:
    folder = _existing(workdir)
    value = {"path": workdir, "exists": folder == workdir}
    for place in (f"{workdir}/dflashctl/{name}" for name in ("runs", "releases", "blobs", "agent")):
        while place != folder and place != "/":
            if os.path.lexists(place) and not os.path.isdir(place):
                raise Bad(f"{place} is in the way: it is no folder", value)
            place = os.path.dirname(place)
    path = new_name(folder, ".dflashctl-")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Bad(f"{folder} cannot be written: {error.strerror}", value) from error
    os.close(descriptor)
    os.unlink(path)
    return value


def _runs(request: Request) -> dict[str, Any]:
    """Bad where a start would be refused; whether it is, the start itself finds out."""
    from orchestrator.agent.status import in_the_way, live_runs

    live = [record.get("run_id") for record in live_runs(request.paths)]
    busy = in_the_way(request.paths, request.get("gpus", list, []))
    if busy:
        words = ", ".join(one["words"] for one in busy)
        raise Bad(f"running here already: {words}", {"live": live})
    return {"live": live}
