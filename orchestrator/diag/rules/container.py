"""The container and the tools that reach into it: pct, lxc-attach, locks, freezes, reboots."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.probes import Probe
from orchestrator.diag.rules.shared import answered, container_of
from orchestrator.diag.text import Line

MISSING = (
    r"Configuration file '[^']*/lxc/\d+\.conf' does not exist",
    r"\b(?:CT|container) '?\d+'? (?:does not exist|not found|is not on this node)",
    r"no such (?:CT|container)\b|unable to find (?:CT|container|configuration file)",
    r"guest \d+ does not exist",
    r"lxc-\w+: \d+: .*(?:[Cc]ontainer is not defined|doesn't exist)",
)
STOPPED = (
    r"container '?\d+'? not running!",
    r"\bCT \d+ (?:is )?not running",
    r"can only (?:push|pull) files (?:to|from) a running CT",
    r"Failed to get init pid",
    r"\bContainer '?\d+'? is not running",
)
LOCKED = (
    r"\bCT is locked \(([\w-]+)\)",
    r"can't lock file '[^']*pve-config-\d+\.lock' - got timeout",
    r"can't lock file '[^']*/lxc/[^']*' - got timeout",
    r"\bVM is locked\b",
    r"unable to acquire lock.*(?:lxc|CT)|lock request timeout.*lxc",
)
EXEC = (
    r"ipcc_send_rec\[\d+\] failed",
    r"Unable to load access control list",
    r"lxc_attach_run_command: \d+ .*Failed to exec",
    r"lxc-attach: .*Failed to exec",
    r"lxc-attach: .*(?:Permission denied|Operation not permitted|Failed to (?:attach|enter|open|"
    r"set up|clone|send|receive|mount|switch))",
    r"400 (?:unable to parse option|Parameter verification failed|not enough arguments)",
    r"missing command at \S*pct",
    r"please run (?:this )?(?:command )?as root|you must be root",
    r"cluster not ready - no quorum",
    r"\bpct: (?:command )?not found|pct: command not found",
    r"pve-cluster\.service.*(?:failed|inactive|dead)|pmxcfs.*(?:failed|dead|crash)",
    r"Transport endpoint is not connected.*pve|/etc/pve.*Transport endpoint",
    r"startup for container '?\d+'? failed",
    r"lxc-start: .*(?:Failed|failed|not)|__lxc_start: .*Failed to initialize",
    r"Can't locate PVE/\S+\.pm|perl: .*locale.*pct died",
)


def missing(e: Evidence) -> Iterator[Finding]:
    """pve-container 4 to 6: ``Configuration file 'nodes/pve1/lxc/999.conf' does not exist`` (rc 2,
    also when the container lives on another node)."""
    hits = e.search(*MISSING)
    if hits:
        number = container_of(e)
        yield e.found(
            "ct.missing",
            f"container {number} does not exist on this node",
            hits[:3],
            "pct list; pvesh get /cluster/resources --type vm |"
            f" grep {number}   # which node has it\n"
            f"dflashctl inventory discover",
            lasting=True,
        )


def stopped(e: Evidence) -> Iterator[Finding]:
    """pve-container 4 to 6 ``container '202' not running!`` (255), ``CT 202 not running``; ``pct
    status`` says ``status: stopped``; ``pct list`` shows it."""
    number = e.container
    hits: list[Hit | Line] = list(e.search(*STOPPED))
    hits += [li for li, _ in e.probes.search(r"^\s*(?:status: stopped|State:\s+STOPPED)")]
    if number:
        hits += [li for li, _ in e.probes.search(rf"^\s*{number}\s+stopped\b")]
    # With the cluster's file system down, or no quorum, pct refuses to start and cannot know.
    # Nor was it stopped by anybody where its start is what failed.
    unable = "ipcc|quorum|startup for container|lxc-start|__lxc_start"
    exec_down = any(re.search(unable, h.line.text) for h in e.search(*EXEC))
    number = number or container_of(e)
    if hits and not exec_down:
        why = e.probes.search(r"\b(?:vzshutdown|vzstop|vzdump|oom-kill|pct (?:stop|shutdown))\b")
        yield e.found(
            "ct.stopped",
            f"container {number} is not running",
            [*hits[:3], *(li for li, _ in why[:2])],
            f"pct start {number} && pct status {number}\n"
            f"who stopped it: grep {number} /var/log/pve/tasks/index | tail -5\n"
            f"then {e.go_on}",
            lasting=e.outcome.state not in ("finished", "running"),
        )


def frozen(e: Evidence) -> Iterator[Finding]:
    """cgroup v2 ``cgroup.events``: ``frozen 1``; v1 ``freezer.state``: ``FROZEN``. A backup in
    suspend mode freezes; ``pct status`` still says running and exec hangs."""
    hits: list[Hit | Line] = []
    for li, _ in e.probes.search(r"\bfrozen[ :=]+1\b|^\s*(?:State:\s+)?(?:FROZEN|FREEZING)\b"):
        hits.append(li)
    hits += [
        li for li, _ in e.probes.search(r"freezer\S*\s*[:=]?\s*FROZEN|status: (?:frozen|paused)")
    ]
    if not hits and not answered(e):  # a log may quote such words
        said = e.search(
            r"\b(?:container|CT)\b.*\b(?:is|all|are)\b.*\bfrozen\b",
            r"^State:\s+(?:FROZEN|FREEZING)\s*$",  # lxc-info
            probes=False,
        )
        hits += [h for h in said if not e.series.after(h.line.number)]  # steps: it thawed, or text
    if hits:
        number = container_of(e)
        lock = e.probes.search(r"lock: (?:backup|snapshot|\w+)|vzdump")
        yield e.found(
            "ct.frozen",
            f"container {number} is frozen: every process in it stands still",
            [*hits[:3], *(li for li, _ in lock[:2])],
            "is a backup in suspend mode running? pvesh get /nodes/localhost/tasks --source "
            "active\n"
            f"wait for it, or: lxc-unfreeze -n {number}\n"
            f"for the future: back this container up in snapshot mode, outside of runs",
            lasting=True,
        )


def locked(e: Evidence) -> Iterator[Finding]:
    """pve-container: ``CT is locked (backup)`` (255) on start and stop; ``can't lock file
    '/run/lock/lxc/pve-config-200.lock' - got timeout`` (4) from a second push. A lock that hinders
    nobody (status runs, exec works) is a remark at most."""
    hits: list[Hit | Line] = list(e.search(*LOCKED))
    state = [li for li, _ in e.probes.search(r"^\s*lock: ?(\w+)")]
    if not hits and state and not e.series and e.outcome.state != "finished":
        hits += e.unrecovered(r"trying to acquire (?:cfs )?lock")
    if hits:
        number = container_of(e)
        text = " ".join((h.line if isinstance(h, Hit) else h).text for h in [*hits, *state])
        holder = re.search(r"lock(?:ed)?:? \(?([\w-]+)\)?", " ".join(s.text for s in state) or text)
        other = [
            p for p in e.probes if re.search(r"\bpct (?:push|pull|restore|migrate)|vzdump", p.text)
        ]
        yield e.found(
            "ct.locked",
            f"container {number}'s configuration is locked"
            + (f" ({holder[1]})" if holder and holder[1] != "file" else ""),
            [*hits[:3], *state[:1], *other[:1]],
            "who holds it: pvesh get /nodes/localhost/tasks --source active; ps ax |"
            f" grep 'pct.*{number}'\n"
            f"wait for it; only if nothing runs any more: pct unlock {number}",
        )


# What kept the command from running, told apart by the words of the way in: a remedy for one
# of these (a restart of the cluster's file system) is a danger beside another (a user not root).
NOT_ROOT = (
    r"(?:ipcc_send_rec\[\d+\] failed|access control list): Unknown error",
    r"please run (?:this )?(?:command )?as root|you must be root|You lack access to",
)
CLUSTER = (
    r"(?:ipcc_send_rec\[\d+\] failed|access control list): Connection refused",
    r"pve-cluster|pmxcfs|/etc/pve|endpoint is not connected",
)
NO_QUORUM = r"no quorum"
NO_PCT = r"pct: (?:command )?not found"
OPTIONS = r"\b400 |missing command"
START = r"startup for container|lxc-start|__lxc_start|failed to start"


def _host_refuses(e: Evidence, hits: list[Hit], lasting: bool) -> Finding | None:
    """Whatever the container: not root, no quorum, the cluster's file system down
    (``ipcc_send_rec[1] failed``), no pct."""
    host, quote = e.place, _quote(hits)
    if _say(hits, *NOT_ROOT):
        return e.found(
            "ct.exec_failed",
            f"pct needs root on the host: {quote}",
            hits[:4],
            f"connect as root: `user: root` of the host in the inventory; for once: --host "
            f"root@{host.address or 'HOST'}{f':{host.port}' if host.port else ''}\n"
            f"by hand: ssh {host.ssh_options}root@{host.address or 'HOST'} pct list",
            lasting=lasting,
        )
    if _say(hits, NO_QUORUM):
        return e.found(
            "ct.exec_failed",
            f"the host's cluster has no quorum, so pct refuses: {quote}",
            hits[:4],
            "on the host: pvecm status   # which nodes are gone? bring them back\n"
            "only if they will not come back: pvecm expected 1; then pct list",
            lasting=lasting,
        )
    if _say(hits, *CLUSTER):
        return e.found(
            "ct.exec_failed",
            f"the host's cluster filesystem does not answer, so pct cannot work: {quote}",
            hits[:4],
            "as root on the host: systemctl status pve-cluster; journalctl -u pve-cluster -n 50\n"
            "if it is dead: systemctl restart pve-cluster; pct list   # containers run on",
            lasting=lasting,
        )
    if _say(hits, NO_PCT):
        return e.found(
            "ct.exec_failed",
            f"the host has no pct on this user's PATH: {quote}",
            hits[:4],
            "is it a Proxmox host? connect as root, or set `pct` of the host in the inventory",
            lasting=lasting,
        )
    return None


def _container_refuses(e: Evidence, hits: list[Hit], lasting: bool) -> Finding | None:
    """Options that pct took for its own (``400 unable to parse option``), a container that does not
    start."""
    number, quote = container_of(e), _quote(hits)
    if _say(hits, OPTIONS):
        return e.found(
            "ct.exec_failed",
            f"pct took the command's words for its own: {quote}",
            hits[:4],
            f"put -- before the command: pct exec {number} -- COMMAND",
            lasting=lasting,
        )
    if _say(hits, START):
        return e.found(
            "ct.exec_failed",
            f"container {number} does not start: {quote}",
            hits[:4],
            f"on the host: pct start {number} --debug\n"
            f"journalctl -u pve-container@{number} -n 50; pct config {number}",
            lasting=lasting,
        )
    return None


def exec_failed(e: Evidence) -> Iterator[Finding]:
    """The way in is broken otherwise, such as by lxc-attach's ``Failed to exec``. A tmux that it
    cannot find is ``tmux.missing``, another program ``env.path``."""
    hits = [h for h in e.search(*EXEC) if not re.search(r'["/]tmux\b', h.line.text)]
    if not hits:
        return
    number = container_of(e)
    lasting = not any(e.outcome.moved_on(h.line.number) for h in hits)
    told = _host_refuses(e, hits, lasting) or _container_refuses(e, hits, lasting)
    yield told or e.found(
        "ct.exec_failed",
        f"pct or lxc-attach failed before the command ran: {_quote(hits)}",
        hits[:4],
        f"as root on the host, by hand: pct exec {number} -- true; pct status {number}\n"
        "dflashctl doctor looks at each step of the way in",
        lasting=lasting,
    )


def _say(hits: list[Hit], *patterns: str) -> bool:
    return any(re.search(pattern, h.line.text) for pattern in patterns for h in hits)


def _quote(hits: list[Hit]) -> str:
    return hits[0].line.text.strip()[:120]


_BOOT = r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"


def rebooted(e: Evidence) -> Iterator[Finding]:
    """``/proc/sys/kernel/random/boot_id`` is another one than the run recorded; or the task log,
    the journal and ``uptime`` tell of a restart during the run. A restart after the run's own end
    is none of its business."""
    if e.outcome.state == "finished" or _ended_by_itself(e):
        return
    at: list[Probe | Line | Hit] = [p for p in e.probes if _two_boots(p)]
    if not e.probes.named("boot_?id"):  # else the ids decide: a task log tells of last week, too
        at += [
            li
            for li, _ in e.probes.search(
                r"\bvzreboot\b|boot id (?:changed|differs)|system boot.*(?:during|after)|"
                r"-- (?:Boot|Reboot) "
            )
        ]
    at += e.search(
        r"[Bb]oot[ _]id (?:changed|differs|is (?:now|another|not))",
        r"(?:container|CT) \S* ?(?:was |has been |been )?(?:rebooted|restarted) (?:under|"
        r"during|while)",
        r"different boot[ _]id|new boot[ _]id",
        probes=False,
    )
    if at:
        number = container_of(e)
        yield e.found(
            "ct.rebooted",
            f"container {number} was restarted under the run",
            at[:4],
            f"why: grep {number} /var/log/pve/tasks/index | tail; journalctl --list-boots |"
            " tail -3\n"
            f"{e.go_on}",
            confidence=0.93,
        )


def _ended_by_itself(e: Evidence) -> bool:
    """The supervisor recorded an exit code. A container that goes down sends signals, which are
    recorded as such, or by shells and handlers as 128 + their number; or records nothing."""
    end = e.outcome.exit
    return (
        end is not None and end.reason == "failed" and not end.signal and 0 < (end.code or 0) < 128
    )


def _two_boots(probe: Probe) -> bool:
    """Two different boot ids under one probe that is about them."""
    if "boot" not in probe.key.lower() and "boot_id" not in probe.text:
        return False
    value = probe.value
    if isinstance(value, dict):
        about = "boot" in probe.key.lower()
        ids = [
            str(v)
            for k, v in value.items()
            if isinstance(v, (str, int))
            and (about or "boot" in str(k))
            and not re.search(r"time|date|when|host", str(k))
        ]
        return len(ids) >= 2 and len(set(ids)) >= 2
    ids = re.findall(_BOOT, probe.text)
    if len(ids) >= 2:
        return len(set(ids)) >= 2
    labelled = re.findall(
        r"(?:run|start|recorded|before|then|old|was|launch|now|current|after|new)\w*[ :=]+"
        r"([0-9a-f][0-9a-f.-]{3,})",
        probe.text,
    )
    return len(labelled) >= 2 and len(set(labelled)) >= 2


RULES = (missing, stopped, frozen, locked, exec_failed, rebooted)
