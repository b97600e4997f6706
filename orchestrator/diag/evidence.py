"""Everything a rule may look at: the log's lines, exceptions and steps, the probes, the outcome."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.diag import scan, scope, steps, tracebacks
from orchestrator.diag.finding import Finding, Quote, Severity
from orchestrator.diag.outcome import Outcome, read_outcome
from orchestrator.diag.place import KEY, Place
from orchestrator.diag.probes import Probe, Probes
from orchestrator.diag.search import Hit, Text, distinct
from orchestrator.diag.text import Line, read_lines
from orchestrator.diag.tracebacks import Failure

_OWN_NUMBER = (
    r"\b(?:container|CT|pct (?:exec|push|status|start|config|pull)) '?(\d{3,9})'?\b",
    r"pve-config-(\d{3,9})\.lock|/lxc/(\d{3,9})\.conf",
    r"\bct(\d{3,9})\b|dflashctl\b.*?\b[A-Za-z][\w.-]*/(\d{3,5})\b",
)
_RAISE = re.compile(r"(?:^|:) *raise [\w.]+\(")


NO_CONFIG = "none"
"""What the probe ``run_config`` says of a run that is not our trainer's."""
GO_ON = "dflashctl play resume --set config=FILE goes on from the newest complete checkpoint"
GO_ON_OWN = "dflashctl launch --env DFLASH_RESUME=CHECKPOINT goes on, if your program reads that"


class Evidence:
    """One run, as far as it was seen. Rules only read it."""

    def __init__(
        self,
        lines: Sequence[Line],
        probes: Probes,
        *,
        total: int | None = None,
        place: Place | None = None,
    ) -> None:
        self.lines = list(lines)
        self.probes = probes
        self.place = place or Place()
        self.container = self._container()
        self.probes = scope.of_this_run(probes, self.container)
        self.total = total if total is not None else (lines[-1].number if lines else 0)
        self.failures: list[Failure] = tracebacks.parse(self.lines)
        for probe in probes:
            self.failures += tracebacks.parse(probe.lines)
        self.series = steps.read_series(self.lines)
        self.outcome: Outcome = read_outcome(self.lines, self.series, self.failures, self.probes)

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
        place = Place.among(probes)
        shown = {k: v for k, v in (probes or {}).items() if k != KEY or not place.host}
        return cls(lines, Probes(shown), total=scanned.total, place=place)

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
        A traceback's source line ``raise ValueError(f"…")`` steps back for the exception it made.
        """
        hits = self._text.search(patterns)
        kept = []
        for hit in hits:
            if hit.line.quiet and not quiet:
                continue
            if not (log if hit.line.source == "log" else probes):
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
        said = {hit.line.number for hit in kept if hit.line.source == "log"}
        return [
            hit
            for hit in kept
            if hit.line.source != "log" or self._raised_at.get(hit.line.number) not in said
        ]

    @cached_property
    def _raised_at(self) -> dict[int, int]:
        """Of every ``raise`` that a traceback of the log shows as source: the line that names the
        exception."""
        text = {li.number: li.text for li in self.lines}
        return {
            number: f.line.number
            for f in self.failures
            if f.headed and f.line.source == "log"
            for number in range(f.first, f.line.number)
            if _RAISE.search(text.get(number, ""))
        }

    def unrecovered(self, *patterns: str, probes: bool = True) -> list[Hit]:
        """What :meth:`search` finds, without the lines of the log that the run survived."""
        return [h for h in self.search(*patterns, probes=probes) if not self.recovered(h.line)]

    def _container(self) -> str:
        """The run's container, where somebody says which it is: probe ``ct``, the controller's
        lines, pct's answers. Empty if nobody does: control groups and lists name the neighbours
        as well."""
        for probe in self.probes.named(r"^(?:ct|vmid|container)$"):
            if (match := re.search(r"\d{3,9}", probe.text)) is not None:
                return match[0]
        asked = self.probes.named(r"^(?:pct_status|pct|pct_config)$")
        lines = [*distinct(self.lines), *(li for probe in asked for li in probe.lines)]
        hits = Text(lines).search(_OWN_NUMBER)
        return next((g for hit in hits for g in hit.match.groups() if g), "")

    @cached_property
    def _text(self) -> Text:
        """The log's lines, then the probes': one text, because most rules ask for both."""
        return Text([*distinct(self.lines), *self.probes.lines])

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

    @cached_property
    def go_on(self) -> str:
        """How this run is taken up again: only one with a trainer's config by the playbook, which
        without words goes on with the newest run of all."""
        config = next((p.text.strip() for p in self.probes.named(r"^run_config$")), "")
        if config == NO_CONFIG:
            return GO_ON_OWN
        if config:
            return GO_ON.replace("--set config=FILE", self._resumed(config))
        return f"{GO_ON}\na program of one's own: {GO_ON_OWN}"

    def _resumed(self, config: str) -> str:
        words = [self.place.container, f"--set config={config}"]
        words += [f"--set run={self.run_name}"] if self.run_name else []
        return " ".join(word for word in words if word)

    @cached_property
    def run_name(self) -> str:
        """The run's id, where a probe says it."""
        return next((p.text.strip() for p in self.probes.named(r"^run_name$")), "")

    @cached_property
    def python(self) -> str:
        """The interpreter that the inventory names, where a probe says it."""
        return next((p.text.strip() for p in self.probes.named(r"^run_python$")), "")

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
        wanted: bool = False,
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
            wanted=wanted,
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
