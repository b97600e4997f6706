"""Everything a rule may look at: the log's lines, exceptions and steps, the probes, the outcome."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from orchestrator.diag import scan, scope, steps, tracebacks
from orchestrator.diag.finding import Finding, Quote, Severity
from orchestrator.diag.outcome import Outcome, read_outcome
from orchestrator.diag.probes import Probe, Probes
from orchestrator.diag.text import Line, read_lines
from orchestrator.diag.tracebacks import Failure

_OWN_NUMBER = (
    r"\b(?:container|CT|pct (?:exec|push|status|start|config|pull)) '?(\d{3,9})'?\b",
    r"pve-config-(\d{3,9})\.lock|/lxc/(\d{3,9})\.conf",
    r"\bct(\d{3,9})\b|dflashctl\b.*?\b[A-Za-z][\w.-]*/(\d{3,5})\b",
)


@dataclass(frozen=True)
class Hit:
    """A place where a pattern was found."""

    line: Line
    match: re.Match[str]

    def __getitem__(self, group: int | str) -> str:
        return self.match[group] or ""


class Evidence:
    """One run, as far as it was seen. Rules only read it."""

    def __init__(self, lines: Sequence[Line], probes: Probes, *, total: int | None = None) -> None:
        self.lines = list(lines)
        self.probes = probes
        self.container = self._container()
        self.probes = scope.of_this_run(probes, self.container)
        self.total = total if total is not None else (lines[-1].number if lines else 0)
        self.failures: list[Failure] = tracebacks.parse(self.lines)
        for probe in probes:
            self.failures += tracebacks.parse(probe.lines)
        self.series = steps.read_series(self.lines)
        self.outcome: Outcome = read_outcome(self.lines, self.series, self.failures, probes)

    # -- how it is made -------------------------------------------------------------------------

    @classmethod
    def from_log(cls, path: Path | None, probes: Mapping[str, Any] | None = None) -> Evidence:
        """From a file of any size (constant memory) and a dictionary of probes."""
        scanned = scan.scan_file(path) if path is not None else scan.Scan()
        return cls.from_scan(scanned, probes)

    @classmethod
    def from_text(cls, text: str | bytes, probes: Mapping[str, Any] | None = None) -> Evidence:
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        return cls.from_scan(scan.scan_bytes(data), probes)

    @classmethod
    def from_scan(cls, scanned: scan.Scan, probes: Mapping[str, Any] | None) -> Evidence:
        lines = [li for n, raw in scanned.lines.items() for li in read_lines(n, raw)]
        return cls(lines, Probes(probes), total=scanned.total)

    # -- what rules ask -------------------------------------------------------------------------

    def search(
        self,
        *patterns: str,
        log: bool = True,
        probes: bool = True,
        quiet: bool = False,
        system: bool = False,
        named: str = "",
    ) -> list[Hit]:
        """Lines that match any of ``patterns`` (regular expressions), log first, in order.

        Left out are flags, echoed commands and config dumps (unless ``quiet``) and whatever came
        after the run had said that it was done. The system's own journals tell of everybody, so
        they are read only by rules that ask for them (``system``). ``named`` limits the probes.
        """
        hits: list[Hit] = []
        if log:
            hits += self._log_text.search(patterns)
        if probes:
            hits += self._probe_text.search(patterns)
        kept = []
        for hit in hits:
            if hit.line.quiet and not quiet:
                continue
            if hit.line.source != "log":
                key = hit.line.source.removeprefix("probe:")
                if scope.SYSTEM.search(key) and not system:
                    continue
                if named and not re.search(named, key):
                    continue
            done = self.outcome.done_line
            if done is not None and hit.line.source == "log" and hit.line.number > done:
                continue
            kept.append(hit)
        return kept

    def _container(self) -> str:
        """The run's container, where somebody says which it is: probe ``ct``, the controller's
        lines, pct's answers. Empty if nobody does: control groups and lists name the neighbours
        as well."""
        for probe in self.probes.named(r"^(?:ct|vmid|container)$"):
            if (match := re.search(r"\d{3,9}", probe.text)) is not None:
                return match[0]
        hits = self._log_text.search(_OWN_NUMBER)
        asked = [p for p in self.probes.named(r"^(?:pct_status|pct|pct_config)$")]
        hits += _Text([li for probe in asked for li in probe.lines]).search(_OWN_NUMBER)
        return next((g for hit in hits for g in hit.match.groups() if g), "")

    @cached_property
    def _log_text(self) -> _Text:
        return _Text(distinct(self.lines))

    @cached_property
    def _probe_text(self) -> _Text:
        return _Text(self.probes.lines)

    @cached_property
    def errors(self) -> list[Failure]:
        """Exceptions that ended something: not those ignored at exit, not torchrun's summary."""
        done = self.outcome.done_line
        return [
            f
            for f in self.failures
            if not f.ignored
            and f.name != "ChildFailedError"
            and (done is None or f.line.source != "log" or f.first < done)
        ]

    def raised(self, type_: str, message: str = "") -> list[Failure]:
        """Errors whose type's last part matches ``type_`` wholly and whose message has
        ``message``."""
        return [
            f
            for f in self.errors
            if re.fullmatch(type_, f.name) and (not message or re.search(message, f.message))
        ]

    def recovered(self, line: Line) -> bool:
        """The run made progress after ``line`` of the log, so that line did not end it."""
        if line.source != "log":
            return False
        if self.outcome.state == "finished":
            return True
        after = self.series.after(line.number)
        if line.number < self.outcome.attempt_line and after:
            return True
        if len(after) >= 2 and self._advances(after):
            return True
        return self.outcome.moved_on(line.number)

    @staticmethod
    def _advances(after: Sequence[steps.Step]) -> bool:
        numbers = [s.step for s in after if s.step is not None]
        return not numbers or len(set(numbers)) >= 2

    @cached_property
    def progress(self) -> list[steps.Step]:
        """The last attempt's steps: of the trainer's own records if a probe holds them (they tell
        more than the log's lines), else of the log."""
        for probe in self.probes.named(r"metrics"):
            recorded = steps.read_series(probe.lines)
            if len(recorded) >= max(3, len(self.series) // 2):
                start = max(recorded.restarts(), default=0)
                return [s for s in recorded.steps if s.number >= start]
        last = self.series.after(self.outcome.attempt_line)
        return last if len(last) >= 4 else self.series.steps

    # -- how rules answer -----------------------------------------------------------------------

    def found(
        self,
        code: str,
        title: str,
        at: Iterable[Hit | Line | Failure | Probe | Quote],
        remedy: str,
        *,
        severity: Severity = "fatal",
        confidence: float = 0.9,
        lasting: bool = False,
    ) -> Finding:
        """A finding from the places ``at``.

        ``lasting``: it matters although the run goes on (a slow run, an unfused kernel); otherwise
        a finding that the run survived becomes a remark.
        """
        places = list(at)
        lines = [_line(p) for p in places]
        log = [li for li in lines if li is not None and li.source == "log"]
        recovered = bool(log) and len(log) == len(places) and all(self.recovered(li) for li in log)
        if recovered and not lasting:
            severity = "info"
        quotes = [q for p in places if (q := _quoted(p)) is not None]
        rank = next((li.rank for li in log if li.rank is not None), None)
        position = min((_first(p) for p in places if _in_log(p)), default=0)
        extent = max((p.last for p in places if isinstance(p, Failure) and _in_log(p)), default=0)
        unique = tuple(dict.fromkeys(quotes))[:8]
        return Finding(
            code,
            severity,
            confidence,
            title[:300],
            unique,
            remedy,
            position,
            extent,
            rank,
            recovered and not lasting,
        )


def _line(place: Hit | Line | Failure | Probe | Quote) -> Line | None:
    if isinstance(place, (Hit, Failure)):
        return place.line
    if isinstance(place, Probe):
        return place.lines[0] if place.lines else None
    return place if isinstance(place, Line) else None


def _quoted(place: Hit | Line | Failure | Probe | Quote) -> Quote | None:
    if isinstance(place, Quote):
        return place
    line = _line(place)
    return Quote.of(line) if line is not None else None


def _in_log(place: Hit | Line | Failure | Probe | Quote) -> bool:
    line = _line(place)
    return line is not None and line.source == "log"


def _first(place: Hit | Line | Failure | Probe | Quote) -> int:
    if isinstance(place, Failure):
        return place.first
    line = _line(place)
    return line.number if line is not None else 0


SAME_SHAPE = 24  # lines of one shape that are searched: half from the front, half from the back


def distinct(lines: Sequence[Line]) -> list[Line]:
    """Without the bulk of lines that differ from others only in their digits."""
    shapes = [line.text.translate(_NO_DIGITS) for line in lines]
    left = Counter(shapes)
    taken: Counter[str] = Counter()
    kept = []
    for line, shape in zip(lines, shapes, strict=True):
        taken[shape] += 1
        left[shape] -= 1
        if taken[shape] <= SAME_SHAPE // 2 or left[shape] < SAME_SHAPE // 2:
            kept.append(line)
    return kept


_NO_DIGITS = dict.fromkeys(map(ord, "0123456789"))


class _Text:
    """Lines joined once. A pattern's branches are tried only on lines that hold their literal.

    Some 900 branches over a log of 20,000 unlike lines took 17 s as plain searches.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.text = "\n".join(li.text.replace("\n", " ") for li in lines)
        self.lower = self.text.lower()
        if len(self.lower) != len(self.text):  # a few letters have longer lower forms
            self.lower = "".join(c.lower() if len(c.lower()) == 1 else c for c in self.text)
        self.starts: list[int] = []
        offset = 0
        for line in lines:
            self.starts.append(offset)
            offset += len(line.text) + 1
        self._found: dict[str, dict[int, Hit]] = {}
        self._places: dict[tuple[str, bool], list[int]] = {}

    def search(self, patterns: Iterable[str]) -> list[Hit]:
        found: dict[int, Hit] = {}
        for pattern in patterns:
            for index, hit in self._hits(pattern).items():
                found.setdefault(index, hit)
        return [found[i] for i in sorted(found)]

    def _hits(self, pattern: str) -> dict[int, Hit]:
        known = self._found.get(pattern)
        if known is None:
            known = self._found[pattern] = {}
            for literal, folded, compiled in _branches(pattern):
                for index in self._holding(literal, folded):
                    match = compiled.search(self.lines[index].text)
                    if match is not None:
                        known.setdefault(index, Hit(self.lines[index], match))
        return known

    def _holding(self, literal: str, folded: bool) -> Sequence[int]:
        """Indices of the lines that contain ``literal``."""
        if not literal:
            return range(len(self.lines))
        known = self._places.get((literal, folded))
        if known is None:
            known = []
            text = self.lower if folded else self.text
            at = text.find(literal)
            while at >= 0:
                index = bisect_right(self.starts, at) - 1
                known.append(index)
                after = self.starts[index + 1] if index + 1 < len(self.starts) else len(text)
                at = text.find(literal, after)
            self._places[literal, folded] = known
        return known


@lru_cache(maxsize=4096)
def _branches(pattern: str) -> tuple[tuple[str, bool, re.Pattern[str]], ...]:
    """A pattern's top-level alternatives, each with a literal that it cannot match without."""
    folded = pattern.startswith("(?i)")
    body = pattern.removeprefix("(?i)")
    made = []
    for branch in alternatives(body):
        literal = needle(branch)
        made.append(
            (
                literal.lower() if folded else literal,
                folded,
                re.compile(("(?i)" if folded else "") + branch),
            )
        )
    return tuple(made)


def alternatives(pattern: str) -> list[str]:
    """Split at the bars outside of groups and classes; whole if it has numbered groups, whose
    numbers a split would shift."""
    pieces, depth, start, i = [], 0, 0, 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 1
        elif char == "[":
            i = max(i, pattern.find("]", i + 2))
        elif char == "(":
            depth += 1
            if pattern[i + 1 : i + 2] != "?":
                return [pattern]
        elif char == ")":
            depth -= 1
        elif char == "|" and depth == 0:
            pieces.append(pattern[start:i])
            start = i + 1
        i += 1
    return [*pieces, pattern[start:]]


def needle(pattern: str) -> str:
    """The longest literal that every match of ``pattern`` must contain; empty if none is sure."""
    runs, run, depth, i = [""], "", 0, 0
    while i < len(pattern):
        char = pattern[i]
        literal = ""
        if char == "\\" and i + 1 < len(pattern):
            if not pattern[i + 1].isalnum():
                literal = pattern[i + 1]
            i += 1
        elif char == "[":
            end = pattern.find("]", i + 2)
            i = end if end > 0 else len(pattern)
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "|" and depth == 0:
            return ""
        elif char in "?*{":
            if depth == 0:
                run = run[:-1]
            if char == "{":
                i = pattern.find("}", i)
        elif char not in ".^$+":
            literal = char
        if literal and depth == 0:
            run += literal
        else:
            runs.append(run)
            run = ""
        i += 1
    return max([*runs, run], key=len)
