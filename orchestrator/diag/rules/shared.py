"""Small readings that several rules need: a host's name, a path's mount, a PID's container."""

from __future__ import annotations

import re
from collections.abc import Iterable

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.place import Place
from orchestrator.diag.probes import Mount
from orchestrator.diag.text import Line

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


_AT_PORT = re.compile(r"\]?:(\d{2,5})\b|\bport (\d{2,5})\b")


def host_asked(e: Evidence, hits: Iterable[Hit]) -> Place:
    """The host that was to be reached: of a live diagnosis its target, of a log the host and port
    that the lines name."""
    hits = list(hits)
    if e.place.host and not any(h.line.source == "log" for h in hits):
        return e.place
    name = host_of(hits)
    if not name:
        return Place(host="HOST", address="HOST", user="root")
    line = next(h.line.text for h in hits if name in h.line.text)
    port = _AT_PORT.search(line, line.index(name))
    number = int(port[1] or port[2]) if port is not None else None
    return Place(host=name, address=name, port=number, user="root")


def target_of(e: Evidence) -> str:
    """The words that name the container to dflashctl; ``NAME`` if nobody said."""
    return e.place.container or "NAME"


def run_of(e: Evidence) -> str:
    """The run's id for a verb's command line, where no word at all would mean the newest run;
    ``RUN`` if nobody said."""
    return e.run_name or "RUN"


def mount_of(e: Evidence, path: str) -> Mount | None:
    """The row of ``df`` that ``path`` lies on."""
    best: Mount | None = None
    for mount in e.probes.mounts:
        inside = path == mount.path or path.startswith(mount.path.rstrip("/") + "/")
        if inside and not mount.inodes and (best is None or len(mount.path) > len(best.path)):
            best = mount
    return best


def container_of(e: Evidence) -> str:
    """The container's number, from whatever names it; ``CT`` if nothing does."""
    if e.container:
        return e.container
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


def spoke(e: Evidence) -> bool:
    """The log has a word of the program's own, beside our supervisor's and watcher's."""
    return any(not _bookkeeping(line) for line in e.lines)


def _bookkeeping(line: Line) -> bool:
    return (
        not line.text.strip()
        or line.tag in ("supervisor", "watch")
        or line.quiet
        or bool(re.match(r"dflashctl\b|\[?(?:supervisor|watch|agent|launcher)\b", line.text))
    )


def answered(e: Evidence) -> bool:
    """The container itself has just said that the run lives: it is reached, and not frozen."""
    return e.outcome.state == "running" and bool(e.probes.named(r"^run_state$"))


def path_in(text: str) -> str:
    """A file's path in an error message."""
    match = re.search(r"['\"`]((?:/|\./|\w+/)[^'\"`]+)['\"`]", text) or re.search(
        r"(?<![\w/.])(/[\w.@%+=:,~-]+(?:/[\w.@%+=:,~*-]+)+)", text
    )
    return match[1] if match else ""
