"""tmux, and the ways in which a run ends without saying why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.probes import SIGNAL_NAMES, SIGNALS
from orchestrator.diag.rules.shared import container_of, run_of
from orchestrator.diag.text import Line

TMUX_MISSING = (
    r"\btmux: (?:command )?not found",
    r"/tmux: No such file or directory",
    r'Failed to exec "(?:\S*/)?tmux"',
    r"TmuxCommandNotFound",
    r'exec: "tmux": executable file not found',
    r"(?:command not found|No such file or directory|not installed): '?tmux'?",
    r"\btmux is not installed|no tmux (?:in|on|found)",
)
TMUX_GONE = (
    r"no server running on \S+",
    r"error connecting to \S*tmux\S* \((?:No such file or directory|Connection refused)\)",
    r"can't find session|session not found|no sessions?\b|no current (?:session|client)",
    r"failed to connect to server",
)
TMUX_ENDED = (
    r"\[(?:lost server|server exited)[^\]]*\]",
    r"server exited unexpectedly",
    r"tmux: server.*(?:killed|segfault|exited|died)",
    r"segfault.*\btmux\b|\btmux(?:: server)?\[\d+\]: segfault|Killed process \d+ \(tmux",
    r"lost server",
)
_PROCESSES = r"^(?:ct_)?(?:ps|proc(?!_driver))"
HANGUP = (
    r"Received (?:1|Signals\.SIGHUP|SIGHUP) death signal",
    r"closing signal SIGHUP",
    r"got signal: 1\b",
    r"^Hangup$|Hangup\s+\S+|\bSIGHUP\b.*(?:received|caught|shut|exit|leav)|(?:received|"
    r"caught) SIGHUP",
)
STOPPED = (
    r"^\^C|\^CTraceback|^\s*\^C\s*$",
    r"^KeyboardInterrupt\b|Detected KeyboardInterrupt, attempting graceful shutdown",
    r"Received (?:2|Signals\.SIGINT|SIGINT) death signal",
    r"closing signal SIGINT",
    r"got signal: 2\b",
    r"\b(?:received|caught|got) (?:a )?(?:signal )?(?:SIGINT|2 \(SIGINT\)|Ctrl-?C|signal 2\b)",
    r"\b(?:stop(?:ped)?|cancel+ed|interrupted|aborted|killed) by (?:a |the )?(?:user|person|"
    r"operator|hand|request|dflashctl)",
    r"\bstop (?:was )?requested|dflashctl\s+stop\b|slurmstepd: .*CANCELLED",
    r'"event": ?"(?:stopped|stopping)"',
)
BY_SIGNAL = "a signal"
"""Whom our supervisor names where it got a signal and no `stop` had been asked for."""


def tmux_missing(e: Evidence) -> Iterator[Finding]:
    """A shell's ``tmux: command not found``, lxc-attach's ``Failed to exec "tmux"``, libtmux's
    ``TmuxCommandNotFound``, or ``which`` in a container that has none."""
    hits = e.search(*TMUX_MISSING)
    if hits and not e.progress:
        yield e.found(
            "tmux.missing",
            "the container has no tmux",
            hits[:3],
            f"pct exec {container_of(e)} -- sh -c 'apt-get update && apt-get install -y tmux'\n"
            "then launch again",
        )


def tmux_socket(e: Evidence) -> Iterator[Finding]:
    """``tmux ls`` finds no server (3.x ``no server running on /tmp/tmux-0/default``, ``error
    connecting to … (No such file or directory)``) while the trainer lives: something cleaned /tmp.
    SIGUSR1 makes the server open its socket again."""
    gone: list[Hit] = [h for h in e.search(*TMUX_GONE) if _tmux(h)]
    lives = _lives(e) and not _server_gone(e)
    # A log that holds tmux's refusal alone is what somebody saw who came back to the session.
    alone = not e.probes and all("error connecting" in li.text for li in e.lines if li.text.strip())
    if gone and (lives or alone):
        server = [li for li, _ in e.probes.search(r"\btmux\b.*(?:new-session|: server|-d\b)")]
        # A busy machine may have been too slow to list its processes.
        listed = any(_SERVER.search(probe.text) for probe in e.probes.named(_PROCESSES))
        yield e.found(
            "tmux.socket_lost",
            f"tmux's socket {'' if listed else 'or its server '}is gone"
            + (", the run itself lives" if lives else ""),
            [*gone[:2], *server[:1]],
            "in the container: pkill -USR1 -o tmux   # the server makes its socket anew\n"
            "tmux ls; dflashctl attach\n"
            "keep cleaners off it: echo 'x /tmp/tmux-*' > /etc/tmpfiles.d/tmux.conf",
            severity="warning",
            confidence=0.9 if listed else 0.6,
            lasting=True,
        )


def tmux_died(e: Evidence) -> Iterator[Finding]:
    """The server ended under the run: ``[lost server]``, ``[server exited]``, torchrun's ``Received
    1 death signal`` (SIGHUP comes from a terminal that went), or no server, no process and a log
    that stops in mid-step."""
    if e.outcome.state == "finished":
        return
    gone = [h for h in e.search(*TMUX_GONE) if _tmux(h)]
    if _lives(e):
        if gone and _server_gone(e):
            yield e.found(
                "tmux.died",
                "tmux's server has ended; the run lives on without it",
                gone[:2],
                f"nothing is lost: dflashctl tail {run_of(e)} follows the log, dflashctl stop ends "
                "the run\n"
                "who ended it: journalctl -n 200 | grep -i -e tmux -e oom",
                severity="warning",
                lasting=True,
            )
        return
    ended: list[Hit | Line] = list(e.search(*TMUX_ENDED, system=True))
    hangup = e.search(*HANGUP)
    record = e.outcome.exit
    if record is not None and record.signal == 1:
        ended.append(record.line)
    session_lives = e.probes.has(r"^\S+: \d+ windows? \(created")
    strong = ended or (hangup and not session_lives)
    # Of a terminal that went comes SIGHUP; a session may be gone long after its run's own end.
    own_end = record is not None and (record.code is not None or record.signal not in (None, 1))
    silent_end = (
        gone
        and not own_end
        and e.outcome.last_step_line
        and not e.errors
        and e.outcome.ended is None
    )
    if not (strong or silent_end):
        return
    yield e.found(
        "tmux.died",
        "tmux (or the terminal above it) ended and took the run with it",
        [*ended[:2], *hangup[:2], *gone[:2]],
        "who ended it: journalctl -n 200 | grep -i -e tmux -e logind -e oom; last -x | head\n"
        "start it through `pct exec` (dflashctl launch), not by ssh into the container:\n"
        "systemd's KillUserProcesses ends what a login leaves behind\n"
        f"{e.go_on}",
        confidence=0.9 if strong else 0.75,
    )


def interrupted(e: Evidence) -> Iterator[Finding]:
    """Python's ``KeyboardInterrupt``, torchrun's ``Received 2 death signal`` / ``got signal: 2``,
    exit 130, the supervisor's reason ``stopped``."""
    record = e.outcome.exit
    asked = record is not None and bool(record.stopped_by)
    if e.outcome.state == "finished" and not asked:
        return
    at: list[Hit | Line] = [*e.unrecovered(*STOPPED)]
    if record is not None and (
        record.signal == 2
        or 130 in (record.code, record.shell, *record.pipe)
        or re.search(r"stop|interrupt|cancel", record.reason)
    ):
        at.append(record.line)
    if record is not None and record.stopped_by not in ("", BY_SIGNAL):
        yield e.found(
            "run.interrupted",
            f"stopped by {record.stopped_by}{_at_time(record.stopped_at)}",
            [record.line, *(a for a in at if a is not record.line)][:4],
            f"nothing is broken: {e.go_on}",
            confidence=0.99,
            wanted=True,
        )
    elif at:
        by_signal = record is not None and record.stopped_by == BY_SIGNAL
        when = _at_time(record.stopped_at) if record is not None else ""
        yield e.found(
            "run.interrupted",
            f"a signal told the run to stop{when}: Ctrl-C in its pane, or the container's shutdown"
            if by_signal
            else "the run was stopped by a person or by `stop`",
            at[:4],
            f"nothing is broken: {e.go_on}\n"
            "who stopped it: dflashctl status; on the host the task log",
            # What our supervisor recorded is at least an end in good order.
            severity="info"
            if e.outcome.state == "running"
            else "warning"
            if by_signal
            else "fatal",
            confidence=0.85,
        )


def _at_time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime(" at %Y-%m-%d %H:%M:%S UTC")


_SIGNALLED = (
    r"exitcode\s*: ?-(\d{1,2})\b",
    r"\(exitcode: -(\d{1,2})\)",
    r"Signal (\d{1,2}) \(SIG\w+\) received",
    r"\bexits with return code = -(\d{1,2})\b",  # DeepSpeed's launcher
    r"process \d+ terminated with signal SIG(\w+)",
    r"(?:exit(?:ed)?(?: code| status| with)?|rc|status)[ =:]+(?:code )?(13[0-9]|14[0-3])\b",
    r"killed by signal:? ?\(?(\w+)|died with <Signals\.SIG(\w+)",
    r"(?:received|caught) (?:SIG(TERM|KILL|HUP|SEGV|BUS|ABRT))",
    r"Received (15|9|Signals\.SIGTERM) death signal|got signal: (15|9)\b",
    # Of our agent, where a run has no end on record.
    r"the supervisor was killed and left no record",
)
_BARE = (
    r"^(?:\S+: line \d+: +\d+ )?(Killed|Terminated|Segmentation fault|Bus error|Aborted|"
    r"Illegal instruction|Floating point exception)(?: \(core dumped\))?(?:\s.*)?$",
    r"^FatalPythonError|Fatal Python error: (\w+)",
)


_WORKERS = r"DataLoader worker \(pid\(s\) [^)]*\) exited unexpectedly(?! with exit code)"


def workers_gone(e: Evidence) -> Iterator[Finding]:
    """torch found its loader's workers gone, and none of them left a word: a signal's work. One
    that raised something is named by its own traceback."""
    hits = e.unrecovered(_WORKERS)
    at = {h.line.number for h in hits}
    told = any(
        f.line.source == "log" and f.frames and f.name != "Empty" and f.line.number not in at
        for f in e.errors
    )
    if hits and not told:
        yield e.found(
            "run.killed",
            "its loader's workers are gone without a word: killed for memory, or crashed",
            hits[:2],
            "on the host: journalctl -k --since -2h | grep -i -e oom -e killed -e segfault\n"
            "in the container: cat /sys/fs/cgroup/memory.events; df -h /dev/shm\n"
            "num_workers=0 shows an error of the dataset's own; fewer workers need less memory",
            confidence=0.55,
        )


def killed(e: Evidence) -> Iterator[Finding]:
    """A signal ended it: torchrun ``exitcode : -9`` and ``Signal 9 (SIGKILL) received by PID``, the
    shell's ``Killed`` or 128+N. Only what no other finding explains ends up as the root cause."""
    if e.outcome.state in ("finished", "running"):
        return
    hits = e.unrecovered(*_SIGNALLED, *_BARE)
    record = e.outcome.exit
    if record is not None and record.pipe and record.pipe[0] == 0 and not hits:
        return  # another member of the pipe got the signal
    number = record.signal if record is not None else None
    at: list[Hit | Line] = list(hits)
    if record is not None:
        codes = [c for c in (record.code, record.shell, *record.pipe[:1]) if c and 128 < c < 160]
        number = number or (codes[0] - 128 if codes else None)
        if number:
            at.append(record.line)
    if number is None and hits:
        number = _signal(hits[0])
    own_end = record is not None and record.code is not None
    silent = not (at or own_end or e.errors) and e.outcome.alive is False and not e.outcome.ended
    if silent and e.outcome.last_step_line:
        at += [p.lines[0] for p in e.probes.named("ps|proc|alive") if p.lines]
    if number == 6 and (
        e.failures or e.search(r"Watchdog|terminate called after|NCCL error|Assertion")
    ):
        return  # an abort is somebody's answer to an error that was printed
    if at and number != 2:
        name = SIGNAL_NAMES.get(number or 0, "a signal nobody recorded")
        yield e.found(
            "run.killed",
            f"the run was ended by {name}, and nothing recorded says by whom",
            at[:4],
            "journalctl -k --since -2h | grep -i -e oom -e killed -e segfault   # on the host\n"
            "in the container: last -x | head; journalctl -n 100; cat "
            "/sys/fs/cgroup/memory.events\n"
            "a segfault: rerun with python -X faulthandler",
            confidence=0.6,
        )


def _signal(hit: Hit) -> int | None:
    words = {
        "Killed": 9,
        "Terminated": 15,
        "Segmentation": 11,
        "Segmentation fault": 11,
        "Bus error": 7,
        "Bus": 7,
        "Aborted": 6,
        "Illegal instruction": 4,
        "Signals.SIGTERM": 15,
        "Floating point exception": 8,
    }
    group = next((g for g in hit.match.groups() if g), "")
    if group.isdigit():
        return int(group) - 128 if int(group) > 128 else int(group)
    return words.get(group) or SIGNALS.get(group)


def masked(e: Evidence) -> Iterator[Finding]:
    """``python train.py | tee log`` returns tee's code: 0 for a failed run without pipefail, tee's
    1 or 141 for a good one. The record's ``pipestatus`` or the log's own last words disagree."""
    record = e.outcome.exit
    if record is None:
        return
    outer = record.shell if record.shell is not None else record.code
    inner = record.pipe[0] if record.pipe else record.code if record.shell is not None else None
    failures = [
        f for f in e.errors if f.line.source == "log" and f.headed and not e.recovered(f.line)
    ]
    said = e.outcome.ended
    hidden = outer == 0 and (
        inner not in (None, 0) or (record.code == 0 and (said is not None or bool(failures)))
    )
    done = e.outcome.done_line is not None
    blamed = bool(outer) and (inner == 0 or (done and inner is None)) and done
    if not (hidden or blamed):
        return
    last = [said] if said is not None else [f.line for f in failures[-1:]]
    finish = [li for li in e.lines if li.number == e.outcome.done_line]
    title = (
        "the shell said 0, the trainer failed"
        if hidden
        else f"the trainer finished; the {outer} is the pipe's, not its own"
    )
    yield e.found(
        "exit.masked",
        title,
        [record.line, *last, *finish[:1]],
        "put `set -o pipefail` at the top of start_training.sh, or drop `| tee`:\n"
        "dflashctl launch keeps log and exit code apart by itself",
        confidence=0.9,
        severity="fatal" if hidden else "warning",
        lasting=True,
    )


def _tmux(hit: Hit) -> bool:
    return "tmux" in hit.line.text or "tmux" in hit.line.source or "server" in hit.line.text


_SERVER = re.compile(r"(?m)(?:\d:\d\d|^\s*\d+\s.*?)\s+(?:/\S*/)?tmux(?:: server)?(?:\s|$)")


def _server_gone(e: Evidence) -> bool:
    """A whole process list (it has PID 1) without a tmux server in it."""
    return any(
        re.search(r"^\s*1\s", probe.text, re.MULTILINE) and not _SERVER.search(probe.text)
        for probe in e.probes.named(_PROCESSES)
    )


def _lives(e: Evidence) -> bool:
    if e.outcome.alive is not None:
        return e.outcome.alive
    silence = e.probes.silence
    now, write = e.probes.now, e.probes.last_write
    if now is not None and write is not None:
        return now - write < 120
    return silence is not None and silence[0] < 120


RULES = (tmux_missing, tmux_socket, tmux_died, interrupted, killed, workers_gone, masked)
