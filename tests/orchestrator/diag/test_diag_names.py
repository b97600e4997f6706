"""A host name without an address: fatal to a run that failed or stands still by it, no sooner."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.diag import Evidence, diagnose
from orchestrator.diag.cli import read_probes

CASES = Path(__file__).parent / "cases"


@pytest.mark.parametrize(
    ("case", "severity"),
    [
        ("dist-nodename", "fatal"),
        ("dist-nodename-stalls", "fatal"),
        ("dist-nodename-silent", "fatal"),
        ("dist-nodename-starting", "warning"),
        ("dist-nodename-one-kind", None),
    ],
)
def test_how_bad_it_is(case: str, severity: str | None) -> None:
    probes = CASES / case / "probes.json"
    values = read_probes(probes) if probes.is_file() else {}
    log = (CASES / case / "log.txt").read_text()
    found = diagnose(Evidence.from_text(log, values)).findings
    named = [f.severity for f in found if f.code == "dist.rendezvous"]
    assert named == ([severity] if severity else [])
