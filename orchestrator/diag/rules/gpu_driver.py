"""Reaching the GPU at all: driver, device nodes, permission, visible devices, who holds it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.probes import Node
from orchestrator.diag.rules.shared import container_of, in_container
from orchestrator.diag.text import Line

MISMATCH = (
    r"[Dd]river/library version mismatch|LibRmVersionMismatch|NVML/RM version mismatch",
    r"unsupported display driver ?/ ?cuda driver combination",
    r"API mismatch: the client has (?:the )?version",
    r"\bError 80[34]:|Cuda failure 80[34]\b|cudaErrorSystemDriverMismatch|"
    r"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    r"forward compatibility was attempted on non supported HW|cudaErrorCompatNotSupported",
    r"driver version is insufficient for CUDA runtime version|cudaErrorInsufficientDriver",
    r"NVIDIA driver on your system is too old",
)
DRIVER_MISSING = (
    r"Found no NVIDIA driver on your system",
    r"couldn't communicate with the NVIDIA driver",
    r"libcuda\.so(?:\.1)?: cannot open shared object file",
    r"libcuda\.so(?:\.1)?(?: cannot found| not found)|[Cc]ould not (?:load|find)[^\n]*libcuda",
    r"NVML Shared Library Not Found|libnvidia-ml\.so(?:\.1)?: cannot open|"
    r"couldn't find libnvidia-ml",
    r"Module nvidia not found|could not insert 'nvidia'|[Dd]river [Nn]ot [Ll]oaded",
    r"nvidia-smi: (?:command )?not found",
    r"nvidia-container-cli: initialization error: (?:driver|nvml)\b",
    r"failed to detect NVIDIA devices",
    r"CUDA driver initialization failed|you might not have a CUDA gpu|CUDA_ERROR_NO_DRIVER",
    r"CUDA_ERROR_STUB_LIBRARY",
    r"CUDA driver is a stub library",
)
FABRIC = (r"system not yet initialized|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY",)
NONE = (
    r"No CUDA GPUs are available",
    r"no CUDA-capable device is detected|cudaErrorNoDevice|CUDA_ERROR_NO_DEVICE",
    r"invalid device ordinal|cudaErrorInvalidDevice|Invalid device id|"
    r"AcceleratorError: .*invalid device",
    r"No devices (?:were )?found",
    r"(?:CUDA|GPU) (?:is )?(?:not available|unavailable)|no GPUs? (?:found|available|visible|"
    r"detected)",
    r"Attempting to deserialize object on a CUDA device but torch\.cuda\.is_available\(\) is False",
    r"Attempting to deserialize object on CUDA device \d+ but torch\.cuda\.device_count\(\) is \d+",
    r"ProcessGroupNCCL is only supported with GPUs, no GPUs found",
    r"requested \d+ GPUs?,? (?:but )?(?:only )?\d+ (?:are|is) (?:visible|available)",
    r"device >= 0 && device < num_gpus|No supported gpu backend found|You requested gpu: \[",
)
UNKNOWN_INIT = (
    r"CUDA unknown error - this may be due to an incorrectly set up environment",
    r"CUDA (?:driver )?initialization(?:: |\b.*)(?:CUDA unknown error|[Uu]nexpected error|"
    r"initialization error)",
    r"CUDA error: (?:unknown error|initialization error|operation not supported)",
    r"cudaErrorUnknown|cudaErrorInitializationError|CUDA_ERROR_UNKNOWN|cuInit.* (?:999|3)\b",
    r"Error 999\b|returned 999\b|Cuda failure 'unknown error'|Cuda failure 999",
    r"initialization error.*cuda|cuda.*initialization error",
)
PERMISSION = (
    r"(?:open|openat|ioctl)\([^\n]*/dev/nvidia[^\n]*\) ?= ?-1 (?:EPERM|EACCES)",
    r"/dev/nvidia\S*['\"]?:? (?:Permission denied|Operation not permitted)",
    r"(?:Permission denied|Operation not permitted|PermissionError)[^\n]*/dev/nvidia",
    r"Failed to initialize NVML: (?:Insufficient Permissions|Unknown Error)",
    r"CUDA_ERROR_OPERATING_SYSTEM|OS call failed or operation not supported on this OS",
)
BUSY = (
    r"devices?(?:\(s\))? (?:is/are|are|is) busy or unavailable",
    r"all CUDA-capable devices are busy|cudaErrorDevicesUnavailable|CUDA_ERROR_DEVICE_UNAVAILABLE",
    r"exclusive(?:-process)? (?:mode|thread).*(?:in use|already)|device already in use by another",
    r"Free memory on device[^\n]* on startup is less than desired GPU memory utilization",  # vLLM
    r"GPU \S+ is (?:in use|leased|held|busy)|GPUs are (?:in use|leased): GPU \S+ by ",
)


def mismatch(e: Evidence) -> Iterator[Finding]:
    """CUDA error 803 and NVML's ``Driver/library version mismatch`` (the host's module was
    upgraded, the container's library was not, or the reverse), NVRM's ``API mismatch``, 804 and
    35."""
    hits = e.search(*MISMATCH, system=True)
    if not hits or not (e.search(*MISMATCH) or e.search(*NONE, *UNKNOWN_INIT, *DRIVER_MISSING)):
        return  # the kernel's own word on some other process
    old = any("too old" in h.line.text or "insufficient" in h.line.text for h in hits)
    versions = e.probes.search(
        r"NVML library version|NVRM version|client has|Kernel Module|Driver Version"
    )
    number = container_of(e)
    yield e.found(
        "gpu.driver_mismatch",
        "the driver is older than the CUDA that torch was built for"
        if old
        else "the container's NVIDIA library and the host's kernel module differ",
        [*hits[:4], *(li for li, _ in versions[:2])],
        f"on the host: cat /proc/driver/nvidia/version\n"
        f"in the container: nvidia-smi --version; ls -l /usr/lib/x86_64-linux-gnu/libcuda.so.*\n"
        "install the same version inside (NVIDIA-Linux-*.run --no-kernel-module), pct reboot "
        f"{number};\n"
        "after a host upgrade reboot the host or reload the modules"
        + (
            "\nor take a torch wheel for an older CUDA: pip install torch --index-url …/cu126"
            if old
            else ""
        ),
        confidence=0.93,
    )


def driver_missing(e: Evidence) -> Iterator[Finding]:
    """torch's ``Found no NVIDIA driver on your system``, nvidia-smi's ``couldn't communicate with
    the NVIDIA driver``, a linker that finds no ``libcuda.so.1``."""
    hits = e.search(*DRIVER_MISSING)
    # torch says "driver initialization failed" also of a mask that names no card.
    if e.probes.has(r"^GPU \d+: |^\d+, NVIDIA ") and not e.progress:
        hits = [h for h in hits if "driver initialization failed" not in h.line.text]
    gone = [h for h in hits if not e.recovered(h.line)]
    only_smi = hits and all("nvidia-smi: " in h.line.text for h in hits)
    if not gone or (only_smi and not e.search(*NONE, *UNKNOWN_INIT)) or e.search(*MISMATCH):
        return
    number = container_of(e)
    yield e.found(
        "gpu.driver_missing",
        "no NVIDIA driver is to be had in the container or on the host",
        hits[:4],
        "on the host: nvidia-smi; lsmod | grep nvidia; dkms status; modprobe nvidia nvidia_uvm\n"
        "(a new kernel without headers leaves no module: apt install proxmox-default-headers)\n"
        f"in container {number}: install the user-space driver of the host's version\n"
        "(NVIDIA-Linux-*.run --no-kernel-module)",
    )


def node_invalid(e: Evidence) -> Iterator[Finding]:
    """A plain file in a device node's place (a bind mount made before the module was loaded) or a
    stale major number (the module's number is dynamic and changes at a reboot): CUDA's ``unknown
    error`` (999) although nvidia-smi works."""
    invalid, refused = _invalid_nodes(e), _refused_opens(e)
    if not invalid and not refused:
        return
    majors, number = e.probes.majors, container_of(e)
    how = "a device node points to no driver"
    if invalid:
        node = invalid[0]
        how = f"{node.path} is a plain file"
        if node.kind == "c":
            how = f"{node.path} has major {node.major}, the driver has {_want(node, majors)}"
    yield e.found(
        "gpu.node_invalid",
        how,
        [*(n.line for n in invalid[:2]), *refused[:1], *_cuda_fails(e)[:2]],
        f"on the host: ls -l /dev/nvidia*; grep nvidia /proc/devices; nvidia-modprobe -u -c 0\n"
        f"in /etc/pve/lxc/{number}.conf: lxc.cgroup2.devices.allow: c "
        f"{majors.get('nvidia-uvm') or 'MAJOR'}:* rwm and the "
        f"bind mounts\npct stop {number}; rm the plain files under the rootfs's /dev; pct "
        f"start {number}",
        confidence=0.96,
    )


def uvm_missing(e: Evidence) -> Iterator[Finding]:
    """``/dev/nvidia-uvm`` absent gives CUDA's ``unknown error`` (999) although nvidia-smi works."""
    if _invalid_nodes(e) or _refused_opens(e):
        return
    absent = [
        li
        for li, _ in e.probes.search(
            r"/dev/nvidia-uvm\S*['\"]?:? (?:No such file|missing|absent|not found)"
            r"|cannot access '?/dev/nvidia-uvm|nvidia-uvm[^\n]*(?:ENOENT|does not exist|"
            r"missing|absent)"
        )
    ]
    absent += [h.line for h in e.search(r"/dev/nvidia-uvm\S*:? No such file", probes=False)]
    trouble = _cuda_fails(e)
    at: list[Hit | Line] = [*absent[:2], *trouble[:2]]
    guessed = not absent and _nothing_but_unknown(e)
    if not absent and not guessed:
        if not trouble or not _uvm_unlisted(e) or e.probes.has(r"/dev/nvidia-uvm\b"):
            return
        at += [n.line for n in e.probes.nodes[:3]]
    number = container_of(e)
    yield e.found(
        "gpu.uvm_missing",
        "CUDA cannot start: in a container /dev/nvidia-uvm is then usually absent or of before "
        "the host's last start"
        if guessed
        else "/dev/nvidia-uvm is absent in the container: nvidia-smi works, CUDA does not",
        at,
        "on the host: modprobe nvidia_uvm && nvidia-modprobe -u -c 0 && ls -l /dev/nvidia-uvm*\n"
        f"in /etc/pve/lxc/{number}.conf:\n"
        "lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file\n"
        "lxc.mount.entry: /dev/nvidia-uvm-tools dev/nvidia-uvm-tools none "
        "bind,optional,create=file\n"
        f"pct reboot {number}; at boot: echo nvidia_uvm >> /etc/modules-load.d/nvidia.conf",
        confidence=0.6 if guessed else 0.93,
    )


def _nothing_but_unknown(e: Evidence) -> bool:
    """A log with CUDA's ``unknown error`` at its start, and nobody looked at the nodes or says
    more."""
    said = e.search(r"CUDA unknown error - this may be due to", probes=False)
    told = e.search(*MISMATCH, *DRIVER_MISSING, *PERMISSION, *FABRIC, *BUSY)
    return bool(said) and not (e.progress or e.probes.nodes or told or e.probes.has(r"\bXid\b"))


def fabric(e: Evidence) -> Iterator[Finding]:
    """CUDA 802, ``system not yet initialized``: on machines with NVSwitch every card waits for
    nvidia-fabricmanager, which must be of the driver's very version."""
    hits = e.unrecovered(*FABRIC)
    if hits:
        yield e.found(
            "gpu.driver_missing",
            "the driver waits for the NVSwitch fabric: nvidia-fabricmanager does not run on the "
            "host",
            hits[:3],
            "on the host: systemctl status nvidia-fabricmanager; journalctl -u "
            "nvidia-fabricmanager -n 20\n"
            "its version must be the driver's: cat /proc/driver/nvidia/version; dpkg -l "
            "'nvidia-fabricmanager*'\n"
            "systemctl enable --now nvidia-fabricmanager",
        )


def _cuda_fails(e: Evidence) -> list[Hit]:
    """The surest words first."""
    return [*e.search(*UNKNOWN_INIT), *e.search(*NONE, *DRIVER_MISSING)]


def _refused_opens(e: Evidence) -> list[Line]:
    found = e.probes.search(r"/dev/nvidia\S*[^\n]*(?:ENXIO|ENODEV|No such device)")
    return [li for li, _ in found]


def _uvm_unlisted(e: Evidence) -> bool:
    """The list of nodes has a card and no nvidia-uvm."""
    listed = {n.path for n in e.probes.nodes}
    has_gpu = any(re.fullmatch(r"/dev/nvidia\d+", path) for path in listed)
    return has_gpu and "/dev/nvidia-uvm" not in listed


def _invalid_nodes(e: Evidence) -> list[Node]:
    return [n for n in e.probes.nodes if _invalid(n, e.probes.majors)]


def _invalid(node: Node, majors: dict[str, int]) -> bool:
    if "nvidia" not in node.path or "/caps" in node.path:
        return False
    if node.kind == "d":
        return node.path.rstrip("/") not in ("/dev/nvidia-caps", "/dev/nvidia-caps-imex-channels")
    if node.kind == "l":
        return False
    if node.kind != "c":
        return True
    want = _want(node, majors)
    return want is not None and node.major is not None and node.major != want


def _want(node: Node, majors: dict[str, int]) -> int | None:
    name = node.path.removeprefix("/dev/")
    if name.startswith("nvidia-uvm"):
        return majors.get("nvidia-uvm")
    if re.fullmatch(r"nvidia(?:\d+|ctl|-modeset)", name):
        return majors.get("nvidia") or majors.get("nvidia-frontend")
    return None


def permission(e: Evidence) -> Iterator[Finding]:
    """EPERM (the cgroup's device list lacks ``c 195:* rwm``, or systemd reloaded it away: NVML's
    ``Unknown Error``) or EACCES (mode or mapped owner of the node)."""
    hits = [h for h in e.search(*PERMISSION) if "(publickey" not in h.line.text]
    closed = [
        n
        for n in e.probes.nodes
        if n.kind == "c" and "nvidia" in n.path and "rw" not in n.mode[6:9]
    ]
    trouble = e.search(*UNKNOWN_INIT, *NONE)
    if closed and trouble and not hits:
        at: list[Hit | Line] = [*(n.line for n in closed[:2]), *trouble[:2]]
    elif hits:
        at = [*hits[:4], *(n.line for n in closed[:1]), *trouble[:2]]
    else:
        return
    number = container_of(e)
    yield e.found(
        "gpu.permission",
        "the container may not open the GPU's device nodes",
        at,
        f"in /etc/pve/lxc/{number}.conf: lxc.cgroup2.devices.allow: c 195:* rwm\n"
        "lxc.cgroup2.devices.allow: c MAJOR_OF_UVM:* rwm   (grep nvidia-uvm /proc/devices)\n"
        f"pct reboot {number}; modes: chmod 666 /dev/nvidia* on the host; in an unprivileged "
        "container\n"
        f"dev0: /dev/nvidia0,mode=0666 in the config sets the owner",
        confidence=0.9,
    )


def none(e: Evidence) -> Iterator[Finding]:
    """``No CUDA GPUs are available`` (100), ``invalid device ordinal`` (101): the driver
    answers, no device is visible, usually by CUDA_VISIBLE_DEVICES or by fewer GPUs than ranks."""
    hits = [
        h for h in e.search(*NONE) if not re.search(r"using cpu|fall", h.line.text, re.IGNORECASE)
    ]
    if e.progress and not e.errors:  # a run on CPUs, where a probe rightly finds no device
        hits = [h for h in hits if h.line.source == "log"]
    warned = e.search(r"CUDA_VISIBLE_DEVICES ?[=:] ?['\"]?(?:\s*$|-1\b|\S+)", quiet=True)
    if hits:
        yield e.found(
            "gpu.none",
            "no such GPU is visible to the process",
            [*hits[:3], *warned[:1]],
            "echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L; ls -l /dev/nvidia[0-9]*\n"
            "the index counts from 0 within the visible ones; use UUIDs: "
            "CUDA_VISIBLE_DEVICES=GPU-…\n"
            "as many ranks as GPUs: torchrun --nproc-per-node $(nvidia-smi -L | wc -l)",
            confidence=0.85,
        )


def busy(e: Evidence) -> Iterator[Finding]:
    """CUDA 46 ``device(s) is/are busy or unavailable`` (exclusive mode), or an out-of-memory in
    which another process holds the card. Host PIDs lead to the container by their cgroup."""
    hits: list[Hit | Line] = list(e.search(*BUSY))
    number = container_of(e)
    holders = _holders(e, number)
    oom = e.search(r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation")
    crowded = [h for h in oom if _mostly_others(h.line.text, e)]
    if not hits and not (oom and (holders or crowded)):
        return
    at = [*hits[:2], *crowded[:1], *(oom[:1] if not hits else [])]
    foreign = {in_container(li.text) for li in holders} - {"", number}
    pids = {m[1] for li in holders if (m := re.search(r"\b(\d{3,7})\b", li.text)) is not None}
    who = (f" by PID {', '.join(sorted(pids)[:4])}" if pids else "") + (
        f" in container {', '.join(sorted(foreign))}" if foreign else ""
    )
    yield e.found(
        "gpu.busy",
        f"the GPU is held{who or ' by another process'}",
        [*at, *holders[:3]],
        "on the host: nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv\n"
        "cat /proc/PID/cgroup   # …/lxc/NNN/… is the container\n"
        "stop that run (dflashctl stop), or take other GPUs; exclusive mode: nvidia-smi -c 0",
        confidence=0.93 if hits or holders else 0.85,
    )


def _holders(e: Evidence, number: str) -> list[Line]:
    """Lines of probes that tie a GPU process to another container, or to none of ours."""
    found = [
        li
        for li, _ in e.probes.search(r"^\s*(?:/proc/)?\d{2,7}\S*\s.*(?:lxc|cgroup)")
        if in_container(li.text) not in ("", number) and number != "CT"
    ]
    if number == "CT":
        found = [li for li, _ in e.probes.search(r"^\s*\d{2,7}\s.*/lxc")]
    if not found:
        return []
    apps = [p for p in e.probes if re.search(r"compute_?apps|gpu_?proc|pmon|nvidia", p.key)]
    used = [
        li
        for p in apps
        for li in p.lines
        if any(
            re.search(rf"\b{m[1]}\b", li.text)
            for f in found
            if (m := re.search(r"\b(\d{2,7})\b", f.text)) is not None
        )
    ]
    return [*used, *found]


def _mostly_others(text: str, e: Evidence) -> bool:
    """torch names who holds the memory: ``Process 81 has 60.20 GiB memory in use. … this process
    has 3.10 GiB``. Ranks of our own run on one card are no stranger."""
    own = re.search(r"this process has ([\d.]+) (GiB|MiB)", text)
    others = re.findall(r"Process (\d+) has ([\d.]+) (GiB|MiB) memory in use", text)
    if not others or own is None:
        return False
    held = sum(float(v) * (1 if u == "GiB" else 1 / 1024) for _, v, u in others)
    mine = float(own[1]) * (1 if own[2] == "GiB" else 1 / 1024)
    ours = {m[1] for h in e.search(r"\(pid: (\d+)\)|\bpid[ =:]+(\d+)") if (m := h.match)}
    return held > 2 * mine and not {p for p, _, _ in others} & ours


RULES = (mismatch, driver_missing, fabric, node_invalid, uvm_missing, permission, none, busy)
