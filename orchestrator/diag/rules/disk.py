"""Disks: full, over quota, out of inodes, read-only, failing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.shared import container_of, mount_of, path_in

NO_SPACE = (
    r"No space left on device",
    r"\[Errno 28\]|\bENOSPC\b|os error 28\b|StorageFull",
    r"\[Errno 122\]|Disk quota exceeded|\bEDQUOT\b|os error 122\b",
    r"(?:cannot|could not|failed to) write.*(?:disk|device|volume|filesystem) (?:is )?full",
    r"\b(?:disk|device|volume|filesystem) (?:is )?full\b|[Nn]ot enough (?:free )?disk space",
)
# torch's zip writer hides the cause; a full disk is the usual one.
WRITER = (
    r"PytorchStreamWriter failed writing file",
    r"inline_container\.cc:\d+\][^\n]*unexpected pos \d+ vs \d+",
    r"unexpected pos \d+ vs \d+",
    r"file write failed|basic_ios::clear: iostream error",
)
# Its words where a file cannot even be made: a full disk, if there is one, else a wrong path.
UNMADE = r"File (\S+) cannot be opened\.|Parent directory (\S+) does not exist\."
THIN = (
    r"out-of-data-space|out of (?:meta)?data space|^\S+ +\S+ +t\S+ .* 100\.00\b",
    r"dm-thin|thin(?: |-)?pool.*(?:out of (?:data )?space|full|100)|"
    r"device-mapper: thin:.*(?:no free|out of)",
    r"(?:pool|pve/data).*(?:reached|Data%?)\D{0,20}100|Suspending .* out of space",
)
READONLY = (
    r"Read-only file system|\[Errno 30\]|\bEROFS\b|os error 30\b|ReadOnlyFilesystem",
    r"Remounting filesystem read-only|remounted? read-only|emergency_ro",
    r"EXT4-fs (?:error|\([^)]*\): .*(?:error|abort))|XFS \([^)]*\): .*(?:[Ss]hutting down|"
    r"corruption|error)",
    r"Buffer I/O error on dev|(?:blk_update_request|print_req_error): (?:critical )?(?:I/O|"
    r"medium) error",
    r"I/O error, dev (?:sd|nvme|vd|dm-)\w*",
    r"\[Errno 5\]|Input/output error|\bEIO\b|os error 5\b",
    r"\[Errno 116\]|Stale file handle|\bESTALE\b|os error 116\b",
    r"\[Errno 117\]|Structure needs cleaning|\bEUCLEAN\b|os error 117\b",
    r"\[Errno 121\]|Remote I/O error|\[Errno 107\]|Transport endpoint is not connected",
    r"nvme\d+: (?:controller is down|I/O \d+ .* timeout|.*removing after probe failure)",
    r"BTRFS.*(?:forced readonly|error)|pool '?\S+'? (?:is|has been) suspended|"
    r"ZFS.*(?:suspended|I/O failure)",
)
_CACHE = re.compile(
    r"torchinductor|/\.triton|triton/cache|inductor_cache|/torch_compile|TORCHINDUCTOR"
)
_SHM = re.compile(r"/dev/shm|shared memory|nccl-shm|</?torch_|posix_fallocate|shmutils|include/shm")


def full(e: Evidence) -> Iterator[Finding]:
    """Errno 28 and 122 as Python, Rust (safetensors, ``os error 28``), C++ (``PytorchStreamWriter
    failed writing file``, ``unexpected pos 704 vs 596``) and shells say them; ``df`` names the
    mount. Caches and /dev/shm have codes of their own."""
    plain = [h for h in e.search(*NO_SPACE) if not _SHM.search(h.line.text)]
    cache = [h for h in plain if _CACHE.search(h.line.text)]
    if cache:  # that path's own finding; the same error elsewhere is ours
        plain = [
            h
            for h in plain
            if not _CACHE.search(h.line.text) and h.line.source == "log" and path_in(h.line.text)
        ]
    writer = e.search(*WRITER)
    thin = e.search(*THIN, system=True)
    fulls = [
        m
        for m in e.probes.mounts
        if m.percent >= 99
        and m.path not in ("/dev/shm", "/snap")
        and not m.path.startswith(("/snap/", "/sys", "/proc", "/boot"))
    ]
    if fulls:
        writer += e.search(UNMADE)
    hits: list[Hit] = [*plain, *thin]
    if writer and (fulls or plain or not e.probes.mounts):
        hits += writer
    if not hits:
        return
    path = next((p for h in hits if (p := path_in(h.line.text))), "")
    mount = mount_of(e, path) if path else None
    named = fulls[0] if fulls else mount
    quota = any(re.search(r"quota|EDQUOT|Errno 122", h.line.text) for h in plain)
    inodes = named is not None and named.inodes
    what = "the quota is used up" if quota else "no inodes left" if inodes else "no space left"
    where = (
        f" on {named.path} ({named.size}, {named.percent} %)"
        if named
        else (f" under {path}" if path else "")
    )
    number = container_of(e)
    yield e.found(
        "disk.full",
        what + where,
        [*hits[:4], *(m.line for m in fulls[:2])],
        f"df -h; df -i; du -xh --max-depth=2 {named.path if named else '/workspace'} |"
        " sort -h | tail\n"
        "delete old checkpoints (keep the newest complete one), *.tmp files, ~/.cache\n"
        f"grow it: pct resize {number} rootfs +50G   (or the mount point mpN)"
        + ("\nthe thin pool itself: lvs -a; lvextend on the host" if thin else ""),
        confidence=0.95 if plain or thin else 0.85,
    )


def readonly(e: Evidence) -> Iterator[Finding]:
    """Errno 30, 5 and 116; ext4's ``Remounting filesystem read-only``, block layer's ``I/O error,
    dev sda``; a network mount that went stale."""
    hits = [
        h
        for h in e.search(*READONLY, system=True)
        if not re.search(r"\btty\b|pty|console|NVRM", h.line.text)
        and not _CACHE.search(h.line.text)
    ]
    log = [h for h in hits if h.line.source == "log"]
    if not log and not _writes_failed(e, hits):
        return
    path = next((p for h in hits if (p := path_in(h.line.text))), "")
    stale = any("tale file handle" in h.line.text or "116" in h.line.text for h in hits)
    yield e.found(
        "disk.readonly",
        ("a network mount went stale" if stale else "the file system is read-only or failing")
        + (f": {path}" if path else ""),
        hits[:5],
        "on the host: dmesg -T | grep -i -e ext4 -e xfs -e 'I/O error' -e nvme | tail -20\n"
        "smartctl -a /dev/nvme0; zpool status; mount | grep ' ro,'\n"
        "a network mount: umount -l and mount again; fsck only while it is unmounted",
        confidence=0.92 if log else 0.8,
    )


def _writes_failed(e: Evidence, hits: list[Hit]) -> bool:
    """The kernel log alone counts only if the run is in trouble that this explains."""
    gone = r"read-only|emergency_ro|suspended|shutting down|Shutting down"
    return (
        any(re.search(gone, h.line.text) for h in hits)
        and e.outcome.state == "failed"
        and not any(f.headed for f in e.errors)
    )


def makedirs(e: Evidence) -> Iterator[Finding]:
    """``PermissionError: [Errno 13]`` on a path of the run: an unprivileged container's mapped ids
    (``nobody nogroup``), or a mount with other owners. It has no code of its own: it is the user's
    error to mend."""
    hits = [
        f
        for f in e.raised(r"PermissionError", r"Errno (?:1|13)\b")
        if not re.search(r"/dev/|torchinductor|triton", f.message)
    ]
    if hits:
        path = path_in(hits[0].message)
        yield e.found(
            "code.error",
            f"no permission on {path or 'a path'}",
            hits[:2],
            f"ls -ldn {path}; id; mount | grep ' ro,'\n"
            f"in an unprivileged container, on the host: chown -R 100000:100000 the mounted folder",
            confidence=0.8,
        )


def unmade(e: Evidence) -> Iterator[Finding]:
    """torch's zip writer cannot make the file, and does not say why. A full disk that a probe shows
    is :func:`full`'s."""
    hits = [h for h in e.unrecovered(UNMADE) if _writes_a_file(e, h)]
    if hits:
        path = hits[0][1] or hits[0][2]
        yield e.found(
            "code.error",
            f"{path} cannot be written: no such folder, no permission or no space",
            hits[:2],
            f"in the container: mkdir -p {path.rpartition('/')[0] or '.'}; ls -ld $_; df -h $_; "
            "df -i $_; mount | grep ' ro,'\n"
            "a path without a slash at its begin counts from the folder that the run started in",
            confidence=0.75,
        )


def _writes_a_file(e: Evidence, hit: Hit) -> bool:
    raised = [f for f in e.errors if f.first <= hit.line.number <= f.last]
    return any("torch/serialization" in fr.file for f in raised for fr in f.frames)


RULES = (full, readonly, makedirs, unmade)
