"""``probe``: what ``diag`` reads beside the log, as text named like the command that prints it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from orchestrator.agent import process
from orchestrator.agent.files import read_record
from orchestrator.agent.looking import Failed, Limit, Look, at_once, command, text_of
from orchestrator.agent.program import boot_id, which
from orchestrator.agent.protocol import AgentError
from orchestrator.agent.records import exit_record, run_record, supervisor_record
from orchestrator.agent.serve import Request
from orchestrator.paths import RunPaths

COMMANDS = {
    "uptime": "uptime",
    "nvidia_smi": "nvidia-smi --query-gpu=index,name,memory.used,memory.total,utilization.gpu,"
    "temperature.gpu,clocks.sm --format=csv",
    "nvidia_smi_L": "nvidia-smi -L",
    "nvidia_smi_q": "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK,POWER",
    "nvidia_smi_topo": "nvidia-smi topo -m",
    "df": "df -h",
    "inodes": "df -i",
    "shm": "df -h /dev/shm",
    "free": "free -h",
    "nproc": "nproc",
    "ip_addr": "ip -o addr",
    "dmesg": "dmesg --time-format iso",
}
FILES = {
    "proc_driver": "/proc/driver/nvidia/version",
    "mounts": "/proc/self/mounts",
    "loadavg": "/proc/loadavg",
}
SIDES = ("container", "host")
WANTED = ("python3", "python", "tmux", "gcc", "cc", "clang", "nvidia-smi", "git", "py-spy")
"""``which``: what a run or its diagnosis may need."""

_VARIABLES = (
    *("NCCL", "TORCH", "CUDA", "PYTORCH", "OMP", "MKL", "TRITON", "HF_", "LD_", "PATH", "TZ"),
    *("PYTHON", "NVIDIA", "GLOO", "TMPDIR", "DFLASH", "MASTER", "WORLD", "RANK"),
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASS", "CREDENTIAL", "AUTH")


class Scene(NamedTuple):
    """What the looks are about."""

    run: RunPaths | None
    """Null without a run to ask about."""
    python: str
    ct: int | None
    pve_root: str
    limit: Limit
    """Of all looks together, from the moment of the request."""


def probe(request: Request) -> dict[str, Any]:
    side = request.get("side", str, "container")
    if side not in SIDES:
        raise AgentError("request.invalid", f"no such side: {side!r}", field="side")
    run = None
    if request.get("run_id", str) is not None:
        from orchestrator.agent.status import find

        run = find(request)
    scene = Scene(
        run=run,
        python=request.get("python", str, "python3"),
        ct=request.get("ct", int),
        pve_root=request.get("pve_root", str, "/etc/pve"),
        limit=Limit(request.get("timeout_s", (int, float), 3.0)),
    )
    known = looks(side, scene)
    without = request.get("without", list, [])
    names = request.get("names", list) or [name for name in known if name not in without]
    unknown = [name for name in [*names, *without] if name not in known]
    if unknown:
        raise AgentError("request.invalid", f"no such probes: {unknown}", field="names")
    results: dict[str, Any] = {}

    def tell(name: str, look: Look) -> None:
        results[name] = _as_answer(look)
        request.send({"probe": name, **results[name]})

    at_once({name: known[name] for name in names}, scene.limit.left_s, tell)
    return {"probes": results}


def _as_answer(look: Look) -> dict[str, Any]:
    """``text`` is what a person would have seen: of a failed look, why."""
    answer: dict[str, Any] = {"ok": look.ok, "seconds": look.seconds}
    if look.ok:
        answer["text"] = look.value if isinstance(look.value, str) else None
        answer["value"] = look.value
    else:
        answer |= {"text": look.error, "value": None, "error": look.error}
    return answer


def looks(side: str, scene: Scene) -> dict[str, Callable[[], Any]]:
    """Every look at a machine of this side, by name: what is here is looked at. ``diag`` reads the
    text by these names, as what the command of that name would print."""
    if side == "host":
        from orchestrator.agent import host

        return host.looks(scene)
    found: dict[str, Callable[[], Any]] = {
        name: partial(command, line.split(), scene.limit) for name, line in COMMANDS.items()
    }
    found |= {name: partial(text_of, path) for name, path in FILES.items()}
    found |= {
        "now": lambda: time.strftime("%Y-%m-%d %H:%M:%S"),
        "date": lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "boot_id": lambda: _boot_ids(scene.run),
        "ls_dev": lambda: list_devices(scene.limit),
        "tmux": lambda: _tmux(scene),
        "ps": process_table,
        "memory_events": lambda: control_group("memory.events", "memory/memory.oom_control"),
        "cgroup_events": lambda: control_group("cgroup.events", "freezer/freezer.state"),
        "memory": _memory,
        "ulimits": lambda: text_of(f"/proc/{_pid(scene.run) or 'self'}/limits"),
        "ulimit_l": lambda: _locked_memory(scene.run),
        "locale": _locale,
        "env": lambda: _environment(scene.run),
        "which": lambda: "\n".join(which(name) or f"{name}: not found" for name in WANTED),
        "exit_record": lambda: exit_record(scene.run) if scene.run else None,
        "last_log_write": lambda: _last_write(scene.run),
        "nccl_flight": lambda: _flight(scene.run),
        "compile_cache": lambda: compile_caches(_variables_of(scene.run)),
        "pip_list": lambda: _ask_python(scene, _LIST),
        "pip_check": lambda: _ask_python(scene, CHECK),
    }
    return found


def _boot_ids(run: RunPaths | None) -> dict[str, str | None]:
    record = run_record(run) if run else {}
    return {"at_start": record.get("boot_id"), "now": boot_id()}


def list_devices(limit: Limit) -> str:
    """``ls -l`` of the nodes; plain files among them are what matters."""
    return command(["sh", "-c", "ls -l /dev/nvidia* /dev/nvidia-caps/* 2>&1"], limit)


def _tmux(scene: Scene) -> str:
    if which("tmux") is None:
        return "tmux: not found"
    sessions = command(["tmux", "ls"], scene.limit)
    if scene.run is None:
        return sessions
    target = f"={scene.run.run_id}:"
    pane = command(["tmux", "capture-pane", "-p", "-J", "-t", target], scene.limit)
    shown = [line for line in pane.splitlines() if line.strip()][-3:]
    return "\n".join([sessions, *(f"pane: {line}" for line in shown)])


def process_table() -> str:
    """As ``ps ax``, with what a process in state D waits for. From /proc: ps may be missing."""
    tick = os.sysconf("SC_CLK_TCK")
    lines = ["    PID TTY      STAT   TIME COMMAND"]
    for pid, one in sorted(process.table().items()):
        text = process.command(pid)
        if not text or pid == os.getpid():
            continue
        waits = ""
        if one.state == "D":
            try:
                waits = f" (wchan: {text_of(f'/proc/{pid}/wchan')})"
            except Failed:
                waits = " (wchan: ?)"
        seconds = one.cpu_ticks // tick
        clock = f"{seconds // 60}:{seconds % 60:02d}"
        lines.append(f"{pid:>7} {one.terminal:<8} {one.state:<4} {clock:>6} {text[:300]}{waits}")
    return "\n".join(lines)


def control_group(name: str, old: str) -> str:
    """A file of the (unified) group, or its relative of version 1; the path with one-line texts."""
    for path in (f"/sys/fs/cgroup/{name}", f"/sys/fs/cgroup/{old}"):
        if os.path.exists(path):
            text = text_of(path)
            return text if name == "memory.events" else f"{path}: {' '.join(text.split())}"
    raise Failed(f"no {name} under /sys/fs/cgroup")


def _memory() -> str:
    lines = []
    for name in ("memory.max", "memory.high", "memory.current", "memory.peak", "memory.swap.max"):
        path = f"/sys/fs/cgroup/{name}"
        if os.path.exists(path):
            lines.append(f"{name} {text_of(path)}")
    for name in ("limit_in_bytes", "usage_in_bytes", "max_usage_in_bytes", "failcnt"):
        path = f"/sys/fs/cgroup/memory/memory.{name}"
        if os.path.exists(path):
            lines.append(f"memory.{name} {text_of(path)}")
    return "\n".join(lines) or text_of("/proc/meminfo", 200)


def _pid(run: RunPaths | None) -> int | None:
    """The run's command, if it lives."""
    child = ((supervisor_record(run) if run else None) or {}).get("child")
    if child and process.alive(child["pid"], child["start"] or -1):
        return int(child["pid"])
    return None


def _locked_memory(run: RunPaths | None) -> str:
    """In KiB as ``ulimit -l`` has it."""
    for line in text_of(f"/proc/{_pid(run) or 'self'}/limits").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return soft if soft == "unlimited" else str(int(soft) // 1024)
    raise Failed("no limit is told")


def _locale() -> str:
    """As the container gave it to us: Python itself sets LC_CTYPE in its own environment."""
    pairs = text_of("/proc/self/environ").split("\0")
    return "\n".join(pair for pair in sorted(pairs) if pair.startswith(("LANG", "LC_")))


def _variables_of(run: RunPaths | None) -> dict[str, str]:
    """Of the run's command, else of what it was started with."""
    pid = _pid(run)
    if pid is None:
        start = (read_record(run.start) if run else None) or {}
        return dict(start.get("environment", os.environ))
    pairs = text_of(f"/proc/{pid}/environ").split("\0")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs) if key}


def _environment(run: RunPaths | None) -> str:
    """Of the variables, what bears on training; no secrets."""
    kept = []
    for name, value in sorted(_variables_of(run).items()):
        pair = f"{name}={value}"
        if name.startswith(_VARIABLES) and not any(word in name.upper() for word in _SECRET):
            kept.append(pair)
    return "\n".join(kept)


def _flight(run: RunPaths | None) -> dict[str, Any]:
    from orchestrator.agent.flight import dumps

    record = run_record(run) if run else {}
    return dumps(run, _variables_of(run), float(record.get("created") or 0.0))


CACHE_FILES = 5_000
"""A long project's cache holds 100,000 files; whether there is one is what matters."""


def compile_caches(variables: dict[str, str]) -> str:
    """Where inductor and Triton keep what they compiled, how much, and the newest."""
    home = variables.get("HOME") or os.path.expanduser("~")
    user = variables.get("USER") or variables.get("LOGNAME") or "root"
    inductor = f"{variables.get('TMPDIR') or '/tmp'}/torchinductor_{user}"
    places = {
        "inductor": variables.get("TORCHINDUCTOR_CACHE_DIR") or inductor,
        "triton": variables.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache",
    }
    return "\n".join(f"{name}: {path}, {_contents(path)}" for name, path in places.items())


def _contents(root: str) -> str:
    files, size, newest = 0, 0, 0.0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            files, size, newest = files + 1, size + status.st_size, max(newest, status.st_mtime)
        if files >= CACHE_FILES:
            break
    if not files:
        return "nothing in it"
    more = "more than " if files >= CACHE_FILES else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest))
    return f"{more}{files} files, {size / 1e6:.1f} MB, newest of {when}"


def _last_write(run: RunPaths | None) -> str | None:
    if run is None or not os.path.exists(run.log):
        return None
    written = os.stat(run.log).st_mtime
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))


_LIST = """
import importlib.metadata as m
have = {}
for d in m.distributions():
    if d.name:
        have.setdefault(d.name, d.version)  # the first on sys.path is the one that is imported
print("\\n".join(sorted(f"{name} {version}" for name, version in have.items())))
"""
# In pip's own words: `python -m pip check` takes 1.2 s beside torch, this 0.3 s.
CHECK = """
import importlib.metadata as m, re
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
plain = lambda name: re.sub(r"[-_.]+", "-", name).lower()
have, said = {}, []
for d in m.distributions():
    if d.name:
        have.setdefault(plain(d.name), d)
for d in have.values():
    for text in d.requires or ():
        try:
            need = Requirement(text)
        except ValueError:
            continue
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        other = have.get(plain(need.name))
        if other is None:
            said.append(f"{d.name} {d.version} requires {need.name}, which is not installed.")
        elif not need.specifier.contains(other.version, prereleases=True):
            said.append(
                f"{d.name} {d.version} has requirement {text.split(';')[0].strip()}, "
                f"but you have {other.name} {other.version}."
            )
print("\\n".join(sorted(said)) or "No broken requirements found.")
"""


def _ask_python(scene: Scene, code: str) -> str:
    return command([scene.python, "-c", code], scene.limit, check=True)
