"""The whole of it, pure: from evidence to a report."""

from __future__ import annotations

from orchestrator.diag.evidence import Evidence
from orchestrator.diag.finding import Finding, Report
from orchestrator.diag.ranking import ranked
from orchestrator.diag.rules import RULES
from orchestrator.diag.rules.library import raised
from orchestrator.diag.rules.python import lone, refused, unknown


def diagnose(evidence: Evidence) -> Report:
    """Findings with the root cause first; ``Report.healthy`` if none is fatal or a warning."""
    found: list[Finding] = [finding for rule in RULES for finding in rule(evidence)]
    if {f.code for f in found if f.severity != "info"} == {"code.error"}:
        found += raised(evidence)
    # An interruption in good order is no fault, but it is how the run ended.
    named = any(
        f.severity == "fatal" or (f.code == "run.interrupted" and f.severity != "info")
        for f in found
    )
    if not named and evidence.outcome.state == "failed":
        found += [*refused(evidence)] or [*lone(evidence)] or unknown(evidence)
    findings = ranked(found)
    context = {f"{f.code}:{f.position}": _context(evidence, f) for f in findings[:3] if f.position}
    return Report(findings, context)


def _context(evidence: Evidence, finding: Finding) -> list[str]:
    """Two lines before the first evidence in the log and two after, as they stood there."""
    numbers = [q.line for q in finding.evidence if q.source == "log" and q.line is not None]
    if not numbers:
        return []
    first = min(numbers)
    return [
        f"{li.number:>7}  {(li.raw or li.text)[:400]}"
        for li in evidence.lines
        if first - 2 <= li.number <= first + 2
    ]
