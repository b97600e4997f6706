"""Small readings that several rules need: a host's name, a path's mount, a PID's container."""

from __future__ import annotations

import re
from collections.abc import Iterable

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.probes import Mount

_HOST = re.compile(
    r"(?:connect to host|resolve hostname|server|Connection to|Connection (?:closed|reset) by|@|"
    r"key for|host) '?\[?((?:\d{1,3}\.){3}\d{1,3}|[\w.-]+\.[\w-]+|[a-z][\w-]*\d+)\b"
)


def host_of(hits: Iterable[Hit]) -> str:
    """The host that a line names; empty if none."""
    for hit in hits:
        match = _HOST.search(hit.line.text)
        if match is not None and match[1] != "known_hosts":
            return match[1]
    return ""


def mount_of(e: Evidence, path: str) -> Mount | None:
    """The row of ``df`` that ``path`` lies on."""
    best: Mount | None = None
    for mount in e.probes.mounts:
        inside = path == mount.path or path.startswith(mount.path.rstrip("/") + "/")
        if inside and not mount.inodes and (best is None or len(mount.path) > len(best.path)):
            best = mount
    return best


def own_number(e: Evidence) -> str:
    """The run's container, where somebody says which it is: probe ``ct``, the controller's lines,
    pct's answers. Empty if nobody does: cgroups and lists name the neighbours as well."""
    for probe in e.probes.named(r"^(?:ct|vmid|container)$"):
        if (match := re.search(r"\d{3,9}", probe.text)) is not None:
            return match[0]
    pattern = (
        r"\b(?:container|CT|pct (?:exec|push|status|start|config|pull)) '?(\d{3,9})'?\b",
        r"pve-config-(\d{3,9})\.lock|/lxc/(\d{3,9})\.conf",
        r"\bct(\d{3,9})\b|dflashctl\b.*?\b[A-Za-z][\w.-]*/(\d{3,5})\b",
    )
    for hit in e.search(*pattern, quiet=True, named=r"^(?:pct_status|pct|pct_config)$"):
        return next(g for g in hit.match.groups() if g)
    return ""


def container_of(e: Evidence) -> str:
    """The container's number, from whatever names it; ``CT`` if nothing does."""
    if number := own_number(e):
        return number
    for hit in e.search(
        r"\b(?:container|CT|pct (?:exec|push|status|start|list|config|pull)) '?(\d{3,9})'?\b",
        r"pve-config-(\d{3,9})\.lock",
        r"/lxc/(\d{3,9})\b",
        r"\bct(\d{3,9})\b",
        quiet=True,
    ):
        return hit[1]
    return "CT"


def in_container(text: str) -> str:
    """The container of a cgroup path, such as ``0::/lxc/204/.lxc``."""
    match = re.search(r"/lxc(?:\.payload\.|\.monitor\.|/)(\d{3,9})", text)
    return match[1] if match else ""


def path_in(text: str) -> str:
    """A file's path in an error message."""
    match = re.search(r"['\"`]((?:/|\./|\w+/)[^'\"`]+)['\"`]", text) or re.search(
        r"(?<![\w/.])(/[\w.@%+=:,~-]+(?:/[\w.@%+=:,~*-]+)+)", text
    )
    return match[1] if match else ""
