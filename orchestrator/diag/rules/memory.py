"""Host memory: the OOM killer, pinned memory, /dev/shm, too many threads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.shared import container_of
from orchestrator.diag.text import Line
from orchestrator.diag.tracebacks import Failure

OOM_KERNEL = (
    r"(?:Memory cgroup o|O)ut of memory: Kill(?:ed)? process \d+",
    r"oom-kill:constraint=",
    r"invoked oom-killer",
    r"oom_reaper: reaped process",
    r"systemd-oomd.*[Kk]illed|earlyoom.*(?:SIGTERM|SIGKILL|[Kk]illing)",
    r"Task in \S+ killed as a result of limit of",
)
OOM_LOG = (
    r"killed by (?:the )?(?:kernel )?OOM(?:[ -]killer)?",
    r"\bOOM[ -]?[Kk]ill(?:ed|er)\b(?!.{0,20}(?:=|: ?)0)",
    r"Detected [1-9]\d* oom[-_]kill event|^srun: error: \S+: tasks? \S+: Out Of Memory",
    r"killed due to the node running low on memory",  # ray's own watcher
)
KILLED = (
    r"DataLoader worker \(pid[^)]*\) is killed by signal: Killed",
    r"^\S*:? ?(?:line \d+: +\d+ )?Killed\b",
    r"exitcode\s*: ?-9\b|\(exitcode: -9\)|Signal 9 \(SIGKILL\)|exits with return code = -9\b",
    r"BrokenProcessPool|A process in the process pool was terminated abruptly",
    r"\b(?:exit|rc|code|status)\D{0,12}137\b",
)


def oom_killed(e: Evidence) -> Iterator[Finding]:
    """Linux 4 to 6.x kernel log (``Memory cgroup out of memory: Killed process 4120
    (python3)``), cgroup v2 ``memory.events``: ``oom_kill 1``, v1 ``memory.oom_control``:
    ``oom_kill 1``. A kill in another container, or one that the run outlived, is not this run's."""
    if e.outcome.state in ("finished", "running"):
        return
    number = container_of(e)
    kernel: list[Line] = [h.line for h in e.search(*OOM_KERNEL, system=True)]
    victims = {
        m[1] for li in kernel if (m := re.search(r"Kill(?:ed)? process (\d+)", li.text)) is not None
    }
    worker = e.search(*KILLED)
    if kernel:  # torch's words when it learns only that the worker is gone
        worker += e.search(r"DataLoader worker \(pid\(s\) [^)]*\) exited unexpectedly")
    said = e.search(*OOM_LOG, probes=False)
    by_kill = bool(worker) or _recorded_kill(e, kernel)
    if _ended_by_itself(e) and not by_kill and not said:
        return  # these kills are somebody else's or long past
    # A counter alone says "once since boot": it counts if a kill, or silence, fits it.
    unfit = not by_kill and _other_reason(e)
    if kernel and unfit:
        return
    counters = [] if unfit else _counters(e)
    if not (kernel or counters or said):
        if not worker or "DataLoader" not in worker[0].line.text or e.probes:
            return
        counters = [worker[0].line]  # the OOM killer alone sends a lone worker SIGKILL
    who = f" (PID {', '.join(sorted(victims))})" if victims else ""
    group = any("emory cgroup" in li.text or "CONSTRAINT_MEMCG" in li.text for li in kernel)
    yield e.found(
        "mem.oom_killed",
        f"the kernel's OOM killer ended it{who}"
        + (": the container's memory limit was hit" if group or (counters and not kernel) else ""),
        [*kernel[:3], *counters[:2], *said[:2], *worker[:2]],
        f"pct config {number} | grep memory; pct set {number} --memory MORE_MIB\n"
        f"fewer or smaller loaders: num_workers, prefetch_factor, pinned buffers, shuffle buffers\n"
        f"watch it: cat /sys/fs/cgroup/memory.peak /sys/fs/cgroup/memory.events",
        confidence=0.95 if kernel or counters else 0.8,
    )


REFUSED = r"DefaultCPUAllocator: [^\n]*you tried to allocate (\d+) bytes"
_ABSURD = 64 << 30  # one tensor of more is rather a wrong shape than a full machine


def refused(e: Evidence) -> Iterator[Finding]:
    """torch's allocator for the CPU got nothing from the system (``Error code 12``)."""
    hits = [h for h in e.unrecovered(REFUSED) if int(h[1]) <= _ABSURD]
    if hits:
        yield e.found(
            "mem.oom_killed",
            f"the machine's memory is used up: {int(hits[0][1]) / 2**20:.0f} MiB were refused",
            hits[:3],
            "free -g; cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.peak; ulimit -v\n"
            f"pct config {container_of(e)} | grep memory; "
            f"pct set {container_of(e)} --memory MORE_MIB\n"
            "fewer or smaller loaders: num_workers, prefetch_factor, batch size",
            confidence=0.85,
        )


def _recorded_kill(e: Evidence, kernel: list[Line]) -> bool:
    """The exit record tells of a KILL that was not our own last resort."""
    record = e.outcome.exit
    if record is None:
        return False
    asked = record.signal == 15 or 143 in (record.code, record.shell)
    if asked and any("SIGTERM" in li.text for li in kernel):
        return True  # earlyoom asks before it kills
    killed = record.signal == 9 or 137 in (record.code, record.shell, *record.pipe)
    return killed and not record.stopped_by


def _ended_by_itself(e: Evidence) -> bool:
    """By a code, by another signal than KILL, or because somebody asked for it."""
    record = e.outcome.exit
    return record is not None and (
        bool(record.stopped_by) or record.code is not None or record.signal not in (None, 9)
    )


def _counters(e: Evidence) -> list[Line]:
    """Counters of the container's control group that tell of a kill.

    Version 1's ``failcnt`` counts how often the limit was met, which the page cache does all day:
    it stands in for ``oom_kill`` only where that is absent (before Linux 4.13)."""
    kills = e.probes.search(r"\boom(?:_group)?_kill[\s:=\"]+(\d+)")
    found = [li for li, m in kills if int(m[1]) > 0]
    found += [li for li, _ in e.probes.search(r"\bunder_oom[\s:=\"]+1\b")]
    if not kills:
        met = e.probes.search(r"\bmemory\.failcnt\D{1,4}(\d+)")
        found += [li for li, m in met if int(m[1]) > 0]
    return found


def _other_reason(e: Evidence) -> bool:
    """An exception of its own ended the run."""
    return any(
        f.headed
        and f.line.source == "log"
        and not e.recovered(f.line)
        and not re.search(
            r"BrokenProcessPool|DataLoader worker|Connection (?:reset|closed)|"
            r"EOFError|BrokenPipe|NCCL|RemoteError|Watchdog",
            f.text,
        )
        for f in e.errors
    )


PINNED = (
    r"ibv_reg_(?:mr|dmabuf_mr)\w* failed(?: with error)?.*(?:Cannot allocate memory|errno 12)",
    r"Call to ibv_(?:reg_mr|create_cq|create_qp)\w* failed with error Cannot allocate memory",
    r"ibv_create_(?:cq|qp).*Cannot allocate memory",
    r"RLIMIT_MEMLOCK",
    r"(?:mlock|mlockall|MAP_LOCKED|io_uring_\w+).*(?:Cannot allocate memory|ENOMEM|not permitted)",
    r"[Mm]ax(?:imum)? locked memory.*(?:too (?:small|low)|exceeded|insufficient)",
    r"[Ff]ailed to (?:register|pin|lock) (?:host |pinned |page-locked )?memory",
    r"cudaHostRegister.*(?:failed|error|out of memory)|cudaErrorHostMemoryAlreadyRegistered",
    r"(?:GDR|gdr_pin_buffer|nv_peer_mem|UCX).*(?:failed to register|ulimit|memlock)",
)


def _pinning(failure: Failure) -> bool:
    return "OS call failed or operation not supported" in failure.message and any(
        re.search(r"pin_memory|pinned|cudaHost|HostAlloc", fr.code) for fr in failure.frames
    )


def pinned(e: Evidence) -> Iterator[Finding]:
    """NCCL's ``Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory``, libibverbs'
    ``RLIMIT_MEMLOCK is 65536 bytes``; ``ulimit -l`` small. Free memory is not the matter."""
    hits: list[Hit | Failure] = [*e.search(*PINNED, system=True)]
    limit = [
        p.lines[0]
        for p in e.probes.named(r"ulimit_?l|memlock")
        if re.search(r"\d", p.text) and "unlimited" not in p.text
    ]
    limit += [li for li, _ in e.probes.search(r"(?i)max locked memory\D+\d+")]
    if limit:  # cudaHostAlloc's refusal names no cause: the call and the limit do
        hits += [f for f in e.errors if _pinning(f) and not e.recovered(f.line)]
    if not hits:
        return
    number = container_of(e)
    yield e.found(
        "mem.pinned_limit",
        "memory could not be pinned: the locked-memory limit is too small",
        [*hits[:3], *limit[:1]],
        f"on the host: echo 'lxc.prlimit.memlock: unlimited' >> /etc/pve/lxc/{number}.conf\n"
        f"pct reboot {number}   # then, inside: ulimit -l  must say unlimited",
        confidence=0.93,
    )


SHM = (
    r"insufficient shared memory \(shm\)",
    r"out of shared memory|raise your shared memory limit",
    r"unable to (?:allocate|open|resize|mmap|write to)[^\n]*(?:shared memory|</?torch_|/dev/shm)",
    r"unable to write to file </torch_",
    r"unable to mmap \d+ bytes from file <filename not specified>",  # passed by descriptor
    r"(?:No space left on device|ENOSPC|Errno 28|Bus error)[^\n]*/dev/shm",
    r"/dev/shm[^\n]*(?:No space left on device|ENOSPC|is full)",
    r"Call to posix_fallocate failed ?: No space left on device",
    r"Error while creating shared memory segment",
    r"failed to extend /dev/shm/nccl-",
    r"DataLoader worker \(pid[^)]*\) is killed by signal: Bus error",
    r"\bshm_open\b[^\n]*(?:failed|No space)|SharedMemory[^\n]*No space left",
)


def shm_full(e: Evidence) -> Iterator[Finding]:
    """torch's loaders (``Unexpected bus error encountered in worker … insufficient shared memory``,
    ``unable to write to file </torch_…>``), NCCL (``Error while creating shared memory segment
    /dev/shm/nccl-…``, ``Call to posix_fallocate failed``), ``df`` of /dev/shm at 100 %."""
    hits: list[Hit] = e.search(*SHM)
    if any("Too many open files" in h.line.text for h in hits):
        return
    mounts = [m for m in e.probes.mounts if m.path == "/dev/shm"]
    full = [m.line for m in mounts if m.percent >= 97]
    weak = [
        h
        for h in e.search(
            r"^(?:\S+: )?Bus error|exitcode\s*: ?-7\b|\(exitcode: -7\)|Signal 7 \(SIGBUS\)",
            r"No space left on device",
        )
    ]
    record = e.outcome.exit
    ends = (record.signal, record.code, record.shell, *record.pipe) if record is not None else ()
    bus = [record.line] if record is not None and {7, 135} & {c for c in ends if c} else []
    roomy = bool(mounts) and not full and all(m.percent < 90 for m in mounts)
    if roomy and not any("shm" in h.line.text or "shared memory" in h.line.text for h in hits):
        return
    if hits or (full and (weak or bus)):
        yield e.found(
            "shm.full",
            "/dev/shm is too small"
            + (f" ({mounts[0].size}, {mounts[0].percent} % used)" if full else ""),
            [*hits[:3], *weak[:1], *bus, *full[:1]],
            f"on the host, in /etc/pve/lxc/{container_of(e)}.conf (then pct reboot):\n"
            "lxc.mount.entry: tmpfs dev/shm tmpfs rw,nosuid,nodev,create=dir,size=32G 0 0\n"
            "leftovers of dead runs: ls -la /dev/shm; rm /dev/shm/nccl-* /dev/shm/torch_*\n"
            "or fewer loader workers (num_workers, prefetch_factor)",
            confidence=0.93 if hits else 0.8,
        )


THREADS = (
    r"libgomp: Thread creation failed|OMP: Error #34|unable to allocate necessary resources "
    r"for OMP",
    r"pthread_create failed|pthread_create: Resource temporarily unavailable",
    r"OpenBLAS blas_thread_init: pthread_create",
    r"RuntimeError: can't start new thread",
    r"fork: (?:retry: )?Resource temporarily unavailable|BlockingIOError: \[Errno 11\]",
    r"cgroup: fork rejected by pids controller",
)


def oversubscribed(e: Evidence) -> Iterator[Finding]:
    """More runnable threads than cores. Named by the failure to make threads (libgomp, OpenBLAS,
    ``can't start new thread``), or by load and throttling well above the cores while the run is
    slow. DataLoader's ``suggested max number of worker`` alone is a remark on a healthy run."""
    hits = e.unrecovered(*THREADS)
    warned = e.search(
        r"This DataLoader will create (\d+) worker processes in total\. Our suggested max number of"
        r" worker in current system is (\d+)"
    )
    cores = _cores(e)
    load = _load(e)
    busy: list[Line] = []
    if cores and load and load[0] > 2.5 * cores:
        busy.append(load[1])
    busy += [li for li, m in e.probes.search(r"nr_throttled\D+(\d+)") if int(m[1]) > 1000]
    busy += [
        li
        for li, m in e.probes.search(r"(?:threads|nr_threads|Threads)\D{1,12}(\d+)")
        if cores and int(m[1]) > 16 * cores and load and load[0] > 1.5 * cores
    ]
    slow = e.search(
        r"(?i)\b(?:data(?:loader| time| wait)?|loader)\b.{0,40}\b(?:slow|starv|behind|wait)"
    )
    # A high load alone may be a neighbour's: something of this run's own must fit it.
    own = bool(warned or slow or _threads_asked(e) > cores > 0 or _slow_data(e)) or any(
        "throttled" in li.text for li in busy
    )
    if not hits and not (busy and own):
        return
    where = [p.lines[0] for p in e.probes.named(r"nproc|cpuset|cores") if p.lines]
    yield e.found(
        "cpu.oversubscribed",
        f"more threads than the container's {int(cores) if cores else ''} cores can run".replace(
            "  ", " "
        ),
        [*hits[:3], *busy[:3], *warned[:1], *where[:1]],
        f"pct config {container_of(e)} | grep cores; pct set {container_of(e)} --cores N\n"
        "export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1; fewer DataLoader workers\n"
        "torch.set_num_threads(cores // processes)",
        severity="fatal" if hits else "warning",
        confidence=0.9 if hits else 0.8,
        lasting=not hits,
    )


def _threads_asked(e: Evidence) -> int:
    """Of OMP_NUM_THREADS, in all ranks."""
    said = r"OMP_NUM_THREADS ?[=:] ?(\d+)|\b(\d+) threads (?:a|per|each|/) ?(?:rank|process|worker)"
    asked = [int(h[1] or h[2]) for h in e.search(said, quiet=True)]
    ranks = [int(h[1]) for h in e.search(r"\b(\d+) (?:ranks|processes)\b", quiet=True)]
    return max(asked, default=0) * max([1, *ranks])


def _slow_data(e: Evidence) -> bool:
    return any(s.waiting_share is not None and s.waiting_share > 0.5 for s in e.series.steps)


def _cores(e: Evidence) -> float:
    for probe in e.probes.named(r"nproc|cores|cpus?$|cpu_count"):
        match = re.fullmatch(r"\D{0,20}(\d{1,4})\D{0,10}", probe.text.strip())
        if match is not None:
            return float(match[1])
    for _, match in e.probes.search(r"cpu\.max\D+(\d+) (\d+)|^(\d+) (100000)$"):
        quota, period = (match[1], match[2]) if match[1] else (match[3], match[4])
        return float(quota) / float(period)
    for hit in e.search(r"\b(\d{1,4}) cores\b|\bcores: ?(\d+)", quiet=True):
        return float(hit[1] or hit[2])
    for hit in e.search(r"suggested max number of worker in current system is (\d+)"):
        return float(hit[1])
    return 0


def _load(e: Evidence) -> tuple[float, Line] | None:
    for probe in e.probes.named(r"load"):
        match = re.search(r"(\d+(?:\.\d+)?)", probe.text)
        if match is not None and probe.lines:
            return float(match[1]), probe.lines[0]
    pattern = r"load average:? ?([\d.]+)|^([\d.]+) [\d.]+ [\d.]+ \d+/\d+ \d+|\bload\D{1,3}([\d.]+)"
    for line, match in e.probes.search(pattern):
        return float(next(g for g in match.groups() if g)), line
    return None


RULES = (oom_killed, refused, pinned, shm_full, oversubscribed)
