"""What only the Proxmox host sees: its containers, its kernel's words, its own tools.

Read from /etc/pve and from cgroups: each call of ``pct`` costs 0.5 to 1 s of Perl.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.agent.files import make_private, write_all
from orchestrator.agent.looking import Failed, Limit, command, text_of
from orchestrator.agent.serve import Request

if TYPE_CHECKING:
    from orchestrator.agent.probe import Scene

PVE_ROOT = "/etc/pve"
# At the top of its path: further down it belongs to another host (one nested here, another lab).
_GROUP = re.compile(r"(?<=:)/lxc/(\d+)(?:/|$)", re.MULTILINE)
_KERNEL_LINES = 500
_CARDS = "/proc/driver/nvidia/gpus"


def containers(request: Request) -> dict[str, Any]:
    root = request.get("pve_root", str, PVE_ROOT)
    groups = running()
    return {"containers": [_container(root, number, groups) for number in _numbers(root)]}


def _numbers(root: str) -> list[int]:
    try:
        names = os.listdir(f"{root}/lxc")
    except OSError:
        return []
    return sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d+\.conf", name))


def _container(root: str, number: int, groups: dict[int, list[str]]) -> dict[str, Any]:
    config = configuration(root, number)
    return {
        "ct": number,
        "name": config.get("hostname", ""),
        "status": "running" if number in groups else "stopped",
        "frozen": any(is_frozen(path) for path in groups.get(number, [])),
        "lock": config.get("lock", ""),
        "config": config,
    }


def configuration(root: str, number: int) -> dict[str, Any]:
    """The current section (snapshots follow in brackets); keys that repeat become lists."""
    config: dict[str, Any] = {}
    for line in text_of(f"{root}/lxc/{number}.conf").splitlines():
        if line.startswith("["):
            break
        key, colon, value = line.partition(":")
        if not colon or line.startswith("#"):
            continue
        value = value.strip()
        if key in config:
            before = config[key]
            config[key] = [*(before if isinstance(before, list) else [before]), value]
        else:
            config[key] = value
    return config


def running() -> dict[int, list[str]]:
    """Container → its control groups, as its processes tell them."""
    groups: dict[int, set[str]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/cgroup") as file:
                text = file.read()
        except OSError:
            continue
        for line in text.splitlines():
            found = _GROUP.search(line)
            if found:
                _, controllers, path = line.split(":", 2)
                top = path[: path.index(found[0])] + f"/lxc/{found[1]}"
                groups.setdefault(int(found[1]), set()).add(f"{controllers}:{top}")
    return {number: sorted(paths) for number, paths in groups.items()}


def container_of(pid: int) -> int | None:
    """By its control group."""
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            found = _GROUP.search(file.read())
    except OSError:
        return None
    return int(found[1]) if found else None


def _files_of(group: str, name: str, old: str) -> str | None:
    controllers, path = group.split(":", 1)
    # A group of version 1 first by its own controller: beside it, a hybrid's unified group says
    # "frozen 0" of a container that the freezer holds.
    for candidate in (
        f"/sys/fs/cgroup/{controllers}{path}/{old}",
        f"/sys/fs/cgroup{path}/{name}",
        f"/sys/fs/cgroup/unified{path}/{name}",
    ):
        if os.path.isfile(candidate):
            return candidate
    return None


def is_frozen(group: str) -> bool:
    path = _files_of(group, "cgroup.events", "freezer.state")
    if path is None:
        return False
    try:
        text = text_of(path)
    except Failed:
        return False
    return "frozen 1" in text or "FROZEN" in text


def audit(request: Request) -> dict[str, Any]:
    """One line for each changing action, in a file of root's."""
    fields = {k: v for k, v in request.fields.items() if k not in ("id", "op", "after")}
    for key in ("who", "action", "result"):
        request.need(key, str)
    make_private(request.paths.root)
    line = json.dumps({"time": time.time(), **fields}) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    file = os.open(request.paths.audit, flags, 0o600)
    try:
        write_all(file, line.encode())
    finally:
        os.close(file)
    return {}


# Probes


def looks(scene: Scene) -> dict[str, Callable[[], Any]]:
    from orchestrator.agent.gpu import compute_applications, compute_groups
    from orchestrator.agent.probe import list_devices

    limit = scene.limit

    def run(line: str) -> Callable[[], str]:
        return partial(command, line.split(), limit)

    return {
        "date": lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host_dmesg": lambda: last_lines(kernel_log(limit), _KERNEL_LINES),
        "host_gpus": _cards,
        "host_nvidia_smi_L": run("nvidia-smi -L"),
        "host_compute_apps": lambda: compute_applications(limit),
        "host_cgroup": lambda: compute_groups(limit),
        "host_proc_devices": lambda: grep("/proc/devices", "nvidia"),
        "host_proc_driver": partial(text_of, "/proc/driver/nvidia/version"),
        "host_lsmod": run("lsmod"),
        "host_dkms": run("dkms status"),
        "host_journal": run("journalctl -n 200 -o short --no-pager"),
        "host_ls_dev": lambda: list_devices(limit),
        "pct_list": lambda: _pct_list(scene),
        "pct_status": lambda: _pct_status(scene),
        "pct_config": lambda: _pct_config(scene),
        "tasks": lambda: _tasks(scene),
        "cluster": lambda: _elsewhere(scene),
        "ps_host": _busy_tools,
        "systemctl_host": lambda: _failed_units(limit),
        "cgroup_events": lambda: _cgroup_events(scene),
    }


def _cards() -> str:
    """Minor number, UUID and PCI address of every card: a kernel line names only the address. Read
    from /proc, which answers while nvidia-smi hangs on a lost card."""
    lines = []
    for address in sorted(os.listdir(_CARDS)) if os.path.isdir(_CARDS) else []:
        text = text_of(f"{_CARDS}/{address}/information")
        facts = {key: value.strip() for key, _, value in map(_fact, text.splitlines())}
        minor, uuid = facts.get("Device Minor", "?"), facts.get("GPU UUID", "?")
        lines.append(f"minor {minor}, {uuid}, {address}, {facts.get('Model', '?')}")
    return "\n".join(lines)


def _fact(line: str) -> tuple[str, str, str]:
    key, colon, value = line.partition(":")
    return key.strip(), colon, value


def kernel_log(limit: Limit) -> str:
    """With dates where dmesg can: a line from before the run is no cause of its end."""
    try:
        return command(["dmesg", "--time-format", "iso"], limit, check=True)
    except Failed:
        return command(["dmesg"], limit)


def last_lines(text: str, count: int) -> str:
    return "\n".join(text.splitlines()[-count:])


def grep(path: str, word: str) -> str:
    return "\n".join(line for line in text_of(path).splitlines() if word in line)


def _ct(scene: Scene) -> int:
    if scene.ct is None:
        raise Failed("no container was named")
    return scene.ct


def _pct_list(scene: Scene) -> str:
    """As ``pct list`` prints it; nothing at all without containers."""
    groups = running()
    rows = [_container(scene.pve_root, number, groups) for number in _numbers(scene.pve_root)]
    lines = [
        f"{row['ct']:<10} {row['status']:<10} {row['lock']:<12} {row['name']:<20}" for row in rows
    ]
    head = f"{'VMID':<10} {'Status':<10} {'Lock':<12} {'Name':<20}"
    return "\n".join([head, *lines]) if lines else ""


def _pct_status(scene: Scene) -> str:
    number = _ct(scene)
    if number not in _numbers(scene.pve_root):
        node = os.uname().nodename.split(".")[0]
        return f"Configuration file 'nodes/{node}/lxc/{number}.conf' does not exist"
    return f"status: {'running' if number in running() else 'stopped'}"


def _pct_config(scene: Scene) -> str:
    config = configuration(scene.pve_root, _ct(scene))
    rows = [
        (key, one)
        for key, value in config.items()
        for one in (value if isinstance(value, list) else [value])
    ]
    # pct's own order: sorted, raw lxc.* lines last.
    rows.sort(key=lambda row: (row[0].startswith("lxc."), row[0]))
    return "\n".join(f"{key}: {value}" for key, value in rows)


def _tasks(scene: Scene) -> str:
    """The task log's lines about the container."""
    number = _ct(scene)
    found = []
    for path in ("/var/log/pve/tasks/index", "/var/log/pve/tasks/active"):
        if os.path.exists(path):
            found += [line for line in text_of(path).splitlines() if f":{number}:" in line]
    return "\n".join(found[-20:])


def _elsewhere(scene: Scene) -> str:
    """Where the cluster has the container's configuration."""
    number = _ct(scene)
    nodes = f"{scene.pve_root}/nodes"
    if not os.path.isdir(nodes):
        raise Failed(f"there is no {nodes}")
    paths = [f"{nodes}/{node}/lxc/{number}.conf" for node in sorted(os.listdir(nodes))]
    return "\n".join(path for path in paths if os.path.exists(path))


_TOOLS = ("pct ", "vzdump", "lxc-", "pve-", "zfs ", "rsync ", "qmrestore", "pct-")


def _busy_tools() -> str:
    """Proxmox's own commands at work, with their age."""
    from orchestrator.agent import process

    now = float(text_of("/proc/uptime").split()[0])
    tick = os.sysconf("SC_CLK_TCK")
    lines = []
    for pid, one in sorted(process.table().items()):
        text = process.command(pid)
        if any(tool in text for tool in _TOOLS) and "lxc-start" not in text and pid != os.getpid():
            minutes = (now - one.start / tick) / 60
            age = f"{minutes:.0f} min" if minutes >= 1 else f"{minutes * 60:.0f} s"
            lines.append(f"{pid} {text[:200]} (running for {age})")
    return "\n".join(lines)


_UNITS = ("pve-cluster", "pvedaemon", "pvestatd", "lxcfs", "pveproxy", "corosync", "zfs-mount")


def _failed_units(limit: Limit) -> str:
    text = command(["systemctl", "show", "-p", "Id,ActiveState,Result", *_UNITS], limit, check=True)
    lines = []
    for block in text.split("\n\n"):
        unit = dict(line.partition("=")[::2] for line in block.splitlines())
        if unit.get("ActiveState") == "failed":
            lines.append(f"{unit['Id']}: failed (Result: {unit.get('Result', '?')})")
    return "\n".join(lines)


def _cgroup_events(scene: Scene) -> str:
    number = _ct(scene)
    paths = {
        _files_of(group, "cgroup.events", "freezer.state") for group in running().get(number, [])
    }
    if not paths:
        raise Failed(f"no process of container {number}")
    return "\n".join(f"{p}: {' '.join(text_of(p).split())}" for p in sorted(filter(None, paths)))
