"""What was read beside the log, found again by its content and not by the probe's name.

A probe is text as a command printed it, or a small JSON value. People name probes as they like, so
every parser here looks at all of them and recognizes its own tables. Keys only break ties.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from orchestrator.diag.text import Line, parse_time, read_lines

MAX_LINES = 20_000


@dataclass(frozen=True)
class Probe:
    key: str
    value: Any
    """As it was given."""
    text: str
    lines: tuple[Line, ...]

    def __contains__(self, words: str) -> bool:
        return words in self.text


@dataclass(frozen=True)
class Mount:
    """A row of ``df``; sizes as printed, ``percent`` used (of inodes if ``inodes``)."""

    line: Line
    size: str
    percent: int
    path: str
    inodes: bool = False


@dataclass(frozen=True)
class Node:
    """A row of ``ls -l /dev/nvidia*``."""

    line: Line
    path: str
    kind: str
    """``c`` for a character device, ``-`` for a plain file, ``d`` …"""
    major: int | None
    mode: str


@dataclass(frozen=True)
class Exit:
    """How the run's processes ended, as far as anyone wrote it down."""

    line: Line
    code: int | None = None
    """The trainer's own, if it is known apart from the shell's."""
    signal: int | None = None
    shell: int | None = None
    pipe: tuple[int, ...] = ()
    reason: str = ""
    stopped_by: str = ""
    """Who asked our supervisor to stop it; ``a signal`` where only that came."""
    stopped_at: float | None = None


class Probes:
    """All probes of one diagnosis."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self.items: dict[str, Probe] = {k: _probe(k, v) for k, v in (values or {}).items()}

    @classmethod
    def of(cls, items: Mapping[str, Probe]) -> Probes:
        made = cls()
        made.items = dict(items)
        return made

    def __iter__(self) -> Iterator[Probe]:
        return iter(self.items.values())

    def __bool__(self) -> bool:
        return bool(self.items)

    def named(self, pattern: str) -> list[Probe]:
        """Those whose key matches."""
        return [p for p in self if re.search(pattern, p.key, re.IGNORECASE)]

    @cached_property
    def lines(self) -> list[Line]:
        return [line for probe in self for line in probe.lines]

    def search(self, pattern: str) -> list[tuple[Line, re.Match[str]]]:
        """Every line of every probe that matches."""
        compiled = re.compile(pattern)
        return [(li, m) for li in self.lines if (m := compiled.search(li.text)) is not None]

    def has(self, pattern: str) -> bool:
        return bool(self.search(pattern))

    @cached_property
    def mounts(self) -> list[Mount]:
        return list(_mounts(self))

    @cached_property
    def nodes(self) -> list[Node]:
        return [n for line in self.lines if (n := _node(line)) is not None]

    @cached_property
    def majors(self) -> dict[str, int]:
        """``/proc/devices``: driver name to major number."""
        found: dict[str, int] = {}
        for _, match in self.search(r"^\s*(\d{1,3}) (nvidia[\w-]*)\s*$"):
            found.setdefault(match[2], int(match[1]))
        return found

    @cached_property
    def exit(self) -> Exit | None:
        for probe in self:
            if (record := _exit(probe)) is not None:
                return record
        return None

    @cached_property
    def kernel(self) -> list[Line]:
        """Lines of a kernel log, of host or container."""
        found = []
        for probe in self:
            named = re.search(r"dmesg|kern|journal|syslog|messages", probe.key, re.IGNORECASE)
            for line in probe.lines:
                if named or re.match(r"\[\s*\d+\.\d+\]|.*\bkernel:|<\d>", line.raw):
                    found.append(line)
        return found

    @cached_property
    def alive(self) -> bool | None:
        """Whether the trainer still runs, if a process probe says so."""
        verdict: bool | None = None
        for probe in self.named(r"^run_state$"):
            state = probe.text.strip().strip('"')
            if state in ("starting", "preparing", "compiling", "training", "stalled"):
                return True
            if state in ("finished", "failed", "stopped"):
                return False
        for probe in self.named(r"^(?:ct_|container_)?(?:ps|proc|process|pids?|pgrep|alive|tree)"):
            said = _alive(probe)
            verdict = said if verdict is None or said is not None else verdict
        return verdict

    @cached_property
    def started(self) -> float | None:
        """When the run was launched, in seconds since the epoch."""
        for probe in self.named(r"^run_started$"):
            if isinstance(probe.value, (int, float)):
                return float(probe.value)
            return parse_time(probe.text)
        return None

    @cached_property
    def now(self) -> float | None:
        return self._time(r"^(?:now|date|ct_date|clock|time)$|^date|_now$")

    @cached_property
    def age(self) -> float | None:
        """Seconds since the run was launched; by ``date``, which says of what zone it is."""
        now = self._time(r"^date$")
        return now - self.started if now is not None and self.started is not None else None

    @cached_property
    def last_write(self) -> float | None:
        """When the log last grew."""
        return self._time(r"last_?(?:log_?)?(?:write|line|output)|log_?(?:mtime|age|stat|modified)")

    @cached_property
    def silence(self) -> tuple[float, Line] | None:
        """Seconds without a log line, if a probe states them."""
        patterns = (
            r"(?:no (?:step|log|output|line|heartbeat)|silent|unchanged|last (?:line|output|write))"
            r"[^\d\n]{0,40}(\d+(?:\.\d+)?) ?(s|sec|seconds|m|min|minutes|h|hours?)\b"
        )
        for probe in self:
            for line in probe.lines:
                match = re.search(patterns, line.text, re.IGNORECASE)
                if match is not None:
                    unit = {"m": 60, "h": 3600}.get(match[2][0].lower(), 1)
                    return float(match[1]) * unit, line
            if re.search(r"(?:age|silen|idle|stale)\w*_?s?$", probe.key) and isinstance(
                probe.value, (int, float)
            ):
                return float(probe.value), probe.lines[0]
        return None

    def _time(self, pattern: str) -> float | None:
        for probe in self.named(pattern):
            if not probe.key.startswith("host") and (time := parse_time(probe.text)) is not None:
                return time
        return None


def _probe(key: str, value: Any) -> Probe:
    if isinstance(value, str):
        text = value
    elif isinstance(value, list) and all(isinstance(v, str) for v in value):
        text = "\n".join(value)
    else:
        text = json.dumps(value, ensure_ascii=False)
    lines: list[Line] = []
    for number, raw in enumerate(text.split("\n")[:MAX_LINES], 1):
        lines.extend(read_lines(number, raw, f"probe:{key}"))
    return Probe(key, value, text, tuple(lines))


_DF = re.compile(
    r"^\S+(?: \S+)?\s+([\d.]+[KMGTPi]*B?)\s+([\d.]+[KMGTPi]*B?)\s+([\d.]+[KMGTPi]*B?|-)\s+"
    r"(\d{1,3})%\s+(/\S*)"
)


def _mounts(probes: Probes) -> Iterator[Mount]:
    for probe in probes:
        inodes = "_i" in probe.key or "inode" in probe.key.lower()
        for line in probe.lines:
            if re.search(r"\bIUse%|\bIFree\b|\bInodes\b", line.text):
                inodes = True
            elif re.search(r"\bUse%|\bSize\b|1K-blocks", line.text):
                inodes = False
            match = _DF.match(line.text.strip())
            if match is not None:
                yield Mount(line, match[1], int(match[4]), match[5], inodes)


_NODE = re.compile(
    r"^([-bcdlps])([rwxsStT-]{9})[.+@]?\s+\d+\s+\S+\s+\S+\s+"
    r"(?:(\d+),\s*(\d+)|[\d.,KMG]+)\s.*?(/dev/\S+|\bnvidia\S*)"
)


def _node(line: Line) -> Node | None:
    match = _NODE.match(line.text.strip())
    if match is None:
        return None
    path = match[5] if match[5].startswith("/") else f"/dev/{match[5]}"
    return Node(line, path, match[1], int(match[3]) if match[3] else None, match[2])


def _exit(probe: Probe) -> Exit | None:
    value = probe.value
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("{"):
            try:
                value = json.loads(text)
            except ValueError:
                return None
        elif re.search(r"exit|rc$|status$|pane_dead", probe.key):
            return _exit_text(probe, text)
        else:
            return None
    if isinstance(value, int) and not isinstance(value, bool) and "exit" in probe.key:
        return Exit(probe.lines[0], code=value)
    if not isinstance(value, dict):
        return None
    keys = {"exit_code", "code", "shell_code", "pipestatus", "trainer_code", "shell", "returncode"}
    if not keys & set(value) or not (
        "exit" in probe.key or {"signal", "pipestatus", "exit_code", "shell_code"} & set(value)
    ):
        return None
    listed = value.get("pipestatus") or value.get("pipe")
    pipe = tuple(p for p in listed if isinstance(p, int)) if isinstance(listed, list) else ()
    code = _int(value, "trainer_code", "exit_code", "code", "returncode", "rc", "trainer")
    shell = _int(value, "shell_code", "shell", "tmux_code", "pane_dead_status")
    signal = value.get("signal")
    if isinstance(signal, str):
        signal = SIGNALS.get(signal.upper().removeprefix("SIG"))
    stop = value.get("stop") if value.get("reason") == "stopped" else None
    stop = stop if isinstance(stop, dict) else {}
    at = stop.get("time")
    return Exit(
        probe.lines[0],
        code,
        signal if isinstance(signal, int) else None,
        shell,
        pipe,
        str(value.get("reason") or ""),
        str(stop.get("who") or ""),
        float(at) if isinstance(at, (int, float)) else None,
    )


SIGNALS = {
    "HUP": 1,
    "INT": 2,
    "QUIT": 3,
    "ILL": 4,
    "TRAP": 5,
    "ABRT": 6,
    "BUS": 7,
    "FPE": 8,
    "KILL": 9,
    "USR1": 10,
    "SEGV": 11,
    "USR2": 12,
    "PIPE": 13,
    "ALRM": 14,
    "TERM": 15,
    "XCPU": 24,
    "XFSZ": 25,
}
SIGNAL_NAMES = {number: f"SIG{name}" for name, number in SIGNALS.items()}


def _exit_text(probe: Probe, text: str) -> Exit | None:
    pipe = re.search(r"PIPESTATUS\D*((?:\d+[ ,]*)+)", text, re.IGNORECASE)
    code = re.search(r"(?:exit(?:ed| code| status)?|code|rc|status)\D{0,12}(\d{1,3})\b", text)
    signal = re.search(r"signal\D{0,4}(\d{1,2})\b|SIG([A-Z0-9]+)", text)
    if not (pipe or code or signal or re.fullmatch(r"\d{1,3}", text)):
        return None
    number = int(text) if re.fullmatch(r"\d{1,3}", text) else int(code[1]) if code else None
    sent = None
    if signal is not None:
        sent = int(signal[1]) if signal[1] else SIGNALS.get(signal[2])
    statuses = tuple(int(n) for n in re.findall(r"\d+", pipe[1])) if pipe else ()
    return Exit(probe.lines[0], number, sent, None, statuses)


def _int(value: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        if isinstance(value.get(key), int) and not isinstance(value[key], bool):
            return int(value[key])
    return None


_TRAINER = re.compile(r"python|torchrun|train|accelerate|deepspeed|pt_main_thread|pt_elastic")


# The agent and the supervisor are Python as well; that they live says nothing of the trainer.
_OURS = re.compile(
    r"\.pyz\b|dflashctl/agent|supervis|python3? -c |networkd-dispatcher|unattended-upgr"
)


def _alive(probe: Probe) -> bool | None:
    text = probe.text.strip()
    if re.search(
        r"\b(?:no such process|not (?:alive|running)|no (?:python|trainer|process)|gone|dead|exited"
        r"|none left|nothing|zombie|no ranks?|0 (?:of|processes))\b|^\W*(?:none|null)?\W*$",
        text,
        re.IGNORECASE,
    ):
        return False
    if re.search(r"\b(?:alive|running|still up|up \d)", text, re.IGNORECASE):
        return True
    rows = [li.text for li in probe.lines if re.search(r"\d", li.text)]
    trainers = [r for r in rows if _TRAINER.search(r) and not _OURS.search(r)]
    if trainers:
        return not all(re.search(r"<defunct>|\sZ[a-z+<]*\s", r) for r in trainers)
    return False if rows else None
