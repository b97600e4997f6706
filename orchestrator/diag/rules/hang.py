"""Alive and silent: how long, against the run's own rhythm, and who is the odd one out."""

from __future__ import annotations

import re
from calendar import timegm
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from time import gmtime

from orchestrator.diag.evidence import Evidence
from orchestrator.diag.finding import Finding, Quote
from orchestrator.diag.flight import first_mismatch, read_dumps
from orchestrator.diag.probes import Probe
from orchestrator.diag.rules.shared import run_of, spoke
from orchestrator.diag.stacks import odd_one_out, summary
from orchestrator.diag.text import DEFAULT_YEAR, Line
from trainer.telemetry import QUIET_EVENTS

LONG_WORK = re.compile(
    r"(?i)\b(?:valid(?:at\w+)?|eval(?:uat\w+)?|generat(?:e|ing|ion)|benchmark|compil\w+|"
    r"autotun\w+|warm(?:ing)?[- ]?up|"
    r"(?:sav|writ|upload|load|export|merg|tokeniz|pack|download|cach|index|shuffl|quantiz)\w*)\b"
)
NO_STEP = (
    r"(?i)\bno (?:step|progress|new (?:line|step|output)|log(?: line)?s?|output|"
    r"heartbeat)\b[^\n]{0,30}?(?:for|in|since)?\D{0,6}"
    r"(\d+) ?(s|sec(?:onds)?|m|min(?:utes)?|h)\b",
    r"(?i)\bstalled\b|\bstall(?:ed)? (?:alarm|for)\b|heartbeat missing (\d+) ?(s)",
)
MINIMUM = 600.0
QUIET = 20.0
"""Of silence shorter than this nobody asks."""


def hang(e: Evidence) -> Iterator[Finding]:
    """Silent for at least ten minutes and ten of its own intervals (an hour while it validates,
    compiles or saves and the GPUs are busy). The odd one out comes from the stacks, else from the
    GPUs' use, else from the list of waiting ranks."""
    if e.outcome.state in ("finished", "failed") or e.outcome.alive is False:
        return
    silence, at = _silence(e)
    said = e.unrecovered(*NO_STEP)
    silence = max([silence, *(_seconds(h[1], h[2]) for h in said)])
    rhythm = _rhythm(e)
    if silence < MINIMUM:
        if e.probes.alive and silence >= max(QUIET, 3 * rhythm) and not _long_work(e, silence):
            limit = _duration(max(MINIMUM, 10 * rhythm))
            yield e.found(
                "run.hang",
                f"silent for {silence:.0f} s; a hang is named after {limit}; look before: "
                f"dflashctl attach {run_of(e)}",
                at[:2],
                f"wait, or look at once: dflashctl status {run_of(e)}; "
                f"dflashctl attach {run_of(e)}",
                severity="info",
                confidence=0.5,
                lasting=True,
            )
        return
    if silence < 10 * rhythm or _long_work(e, silence) or not (e.series or spoke(e)):
        return
    odd = odd_one_out(e.probes)
    title = f"no step and no log line for {_duration(silence)}"
    if (recorded := first_mismatch(read_dumps(e.probes))) is not None:
        title += f"; {recorded.text}"
    if odd is not None:
        title += f"; the odd one out is {odd.who}: {odd.where}"
        if odd.moved is not None:
            title += " (it moved between two samples)" if odd.moved else " (it did not move)"
    elif waiting := _waiting(e):
        title += f"; the odd one out is rank {waiting}"
    elif (idle := _idle_gpu(e)) is not None:
        title += f"; GPU {idle[0]} is idle while the others spin"
        at = [*at, idle[1]]
    last = [li for li in e.lines if li.number == e.outcome.last_line]
    where = [Quote("stacks", None, line) for line in summary(e.probes)[:3]]
    yield e.found(
        "run.hang",
        title,
        [*where, *at[:3], *said[-1:], *([odd.line] if odd else []), *last[:1]],
        "what does the odd one wait for: a lock, a queue, a disk (state D), a collective?\n"
        f"then dflashctl stop {run_of(e)}; {e.go_on}" + _without_py_spy(e),
        confidence=0.88,
        lasting=True,
    )


def _without_py_spy(e: Evidence) -> str:
    """How to get stacks, where there are none of Python."""
    if not e.probes.named(r"^stacks_\d$") or summary(e.probes):
        return ""
    return (
        "\nno stacks of Python: install py-spy beside the run's interpreter, or, where the "
        "container\nforbids ptrace, on the host (pip install py-spy); then dflashctl diag again"
    )


def _silence(e: Evidence) -> tuple[float, list[Line | Probe]]:
    now, write = e.probes.now, e.probes.last_write
    at: list[Line | Probe] = list(
        e.probes.named(r"last_?(?:log_?)?(?:write|line)|log_?mtime|^now$")
    )
    if now is not None and write is not None:
        return now - write, at
    stated = e.probes.silence
    if stated is not None:
        return stated[0], [stated[1]]
    if now is not None:
        dated = [li for li in e.lines[-200:] if li.time is not None]
        if dated and dated[-1].time is not None:
            return _apart(now, dated[-1].time), [*at, dated[-1]]
        clocked = [li for li in e.lines[-20:] if li.day_time is not None]
        if (
            clocked
            and clocked[-1].day_time is not None
            and e.lines[-1].number - clocked[-1].number < 3
        ):
            return (now % 86400 - clocked[-1].day_time) % 86400, [*at, clocked[-1]]
    return 0.0, []


def _apart(now: float, then: float) -> float:
    """A stamp without a year is of this year or the last."""
    if gmtime(then).tm_year == DEFAULT_YEAR:
        year = gmtime(now).tm_year
        parts = gmtime(then)
        then = float(timegm((year, *parts[1:6])))
        if then > now + 86400:
            then = float(timegm((year - 1, *parts[1:6])))
    return now - then


def _rhythm(e: Evidence) -> float:
    """Median seconds between step lines."""
    times = [s.line.time if s.line.time is not None else s.line.day_time for s in e.series.steps]
    stamps = [t for t in times if t is not None]
    gaps = [b - a for a, b in pairwise(stamps) if b > a]
    return median(gaps) if gaps else 0.0


def _long_work(e: Evidence, silence: float) -> bool:
    """Its last words announce long work, and nothing says that this work has stopped."""
    last = [li for li in e.lines[-4:] if not li.tag.startswith(("watch", "supervisor"))]
    announced = [
        li
        for li in last
        if LONG_WORK.search(li.text)
        and not re.search(r"(?i)done|finished|complete|\btook\b|saved", li.text)
    ]
    announced = [*announced, *_phase(e)]
    if not announced:
        return False
    blocked = e.probes.has(
        r"not responding|\bD[lsN+<]*\s|nfs_wait|rpc_wait|timed out|io_schedule"
    ) or (_idle_gpu(e) is not None)
    expected = 0.0
    for _, match in e.probes.search(
        r"(?i)(?:valid|eval|compil|sav|checkpoint)[^\n]*?(?:about|took|last(?: time)?|usually|"
        r"expected)\D{0,12}(\d+(?:\.\d+)?) ?(s|min|m|h)"
    ):
        expected = max(expected, _seconds(match[1], match[2]))
    busy = _utilisation(e)
    if blocked:
        return False
    bound = max(3600.0 if busy and min(u for u, _ in busy) > 20 else 1200.0, 2 * expected)
    return silence < bound


def _phase(e: Evidence) -> list[Line]:
    """The trainer's last event, if it began a phase without step lines."""
    for probe in e.probes.named(r"^events$"):
        last = next((li for li in reversed(probe.lines) if li.text.strip()), None)
        said = re.search(r'"event": ?"(\w+)"', last.text) if last is not None else None
        if last is not None and said is not None and said[1] in {*QUIET_EVENTS, "compiling"}:
            return [last]
    return []


def _utilisation(e: Evidence) -> list[tuple[float, Line]]:
    return [(float(m[1]), li) for li, m in e.probes.search(r"^\s*\d+,.*?,\s*(\d{1,3}) ?%")] or [
        (float(m[1]), li) for li, m in e.probes.search(r"MiB \|\s+(\d{1,3})%")
    ]


def _idle_gpu(e: Evidence) -> tuple[str, Line] | None:
    rows = _utilisation(e)
    idle = [(u, li) for u, li in rows if u < 5]
    if len(rows) >= 2 and len(idle) == 1 and all(u > 50 for u, _ in rows if u >= 5):
        match = re.match(r"\s*(\d+),", idle[0][1].text)
        return (match[1] if match else "?"), idle[0][1]
    return None


def _waiting(e: Evidence) -> str:
    """The one rank that is missing from a list of waiting ranks."""
    for hit in reversed(
        e.search(
            r"(?i)rank_?s?_?(?:waiting|blocked)\W+((?:\d+[, ]+)+\d+)|"
            r"waiting\D{0,10}ranks?\W+((?:\d+[, ]+)+\d+)"
        )
    ):
        ranks = {int(r) for r in re.findall(r"\d+", hit[1] or hit[2])}
        missing = set(range(max(ranks) + 2)) - ranks
        inner = [r for r in missing if r <= max(ranks)]
        if len(inner) == 1:
            return str(inner[0])
    return ""


def _seconds(value: str, unit: str) -> float:
    if not value:
        return 0.0
    return float(value) * {"m": 60.0, "h": 3600.0}.get(unit[:1].lower() if unit else "s", 1.0)


def _duration(seconds: float) -> str:
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


RULES = (hang,)
