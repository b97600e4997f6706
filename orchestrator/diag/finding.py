"""What a diagnosis says: findings with their evidence, and the report that orders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.diag.text import Line
from trainer.telemetry import read_steps

Severity = Literal["fatal", "warning", "info"]
ORDER: dict[str, int] = {"fatal": 0, "warning": 1, "info": 2}
QUOTE = 400
METRICS = ("probe:metrics", "probe:metrics.jsonl")


@dataclass(frozen=True)
class Quote:
    """A piece of evidence: ``source`` is ``log``, a file name, or ``probe:KEY``."""

    source: str
    line: int | None
    text: str

    @classmethod
    def of(cls, line: Line) -> Quote:
        raw = (line.raw or line.text).strip()
        if line.source in METRICS and (step := next(read_steps(raw), None)) is not None:
            # 700 characters of JSON: on two lines of a terminal no rate was among them.
            norm = step.gradient_norm
            raw = step.human() + (f" | gradient {norm:.3g}" if norm is not None else "")
        return cls(line.source, line.number, raw[:QUOTE])


@dataclass(frozen=True)
class Finding:
    """One named cause or symptom."""

    code: str
    """Of the table in ``codes.py``."""
    severity: Severity
    confidence: float
    """0..1"""
    title: str
    """One line: what happened, with the names and numbers of this run."""
    evidence: tuple[Quote, ...]
    remedy: str
    """Commands or steps, one a line."""
    position: int = 0
    """Line of the log where it first shows; 0 if only a probe shows it (no order known)."""
    extent: int = 0
    """Last line of the exception that it speaks of: its message may go on for a screen."""
    rank: int | None = None
    recovered: bool = False
    """The run went on after it, so it did not end the run."""
    consequences: tuple[Finding, ...] = ()
    wanted: bool = False
    """Somebody asked for it: it explains what followed, and none of that is a fault."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "severity": self.severity,
            "confidence": round(self.confidence, 2),
            "title": self.title,
            "evidence": [
                {"source": q.source, "line": q.line, "text": q.text} for q in self.evidence
            ],
            "remedy": self.remedy,
            "consequences": [c.as_dict() for c in self.consequences],
        }


@dataclass(frozen=True)
class Report:
    """Findings, root cause first."""

    findings: tuple[Finding, ...] = ()
    context: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines round the root cause's evidence, for a person."""

    @property
    def healthy(self) -> bool:
        return not any(f.severity in ("fatal", "warning") for f in self.findings)

    @property
    def exit_code(self) -> int:
        """1 when something fatal was found."""
        return int(any(f.severity == "fatal" for f in self.findings))

    def as_dict(self) -> dict[str, Any]:
        return {"findings": [f.as_dict() for f in self.findings], "healthy": self.healthy}
