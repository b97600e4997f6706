"""Every labelled case is named rightly: its code first, nothing of ``not`` as root, no false
alarm, and by lines that are there.

A case is a folder with ``log.txt``, perhaps ``probes.json``, and ``expect.json``: ``code`` (null
for a healthy run), and where it needs them ``also`` (acceptable further codes), ``not`` (must not
be the root cause), ``near`` (of a healthy run: the codes whose words it has); each of the three
is a list of codes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.diag import Evidence, Finding, Report, diagnose
from orchestrator.diag.codes import CODES
from orchestrator.terminal_text import shown

OWN = Path(__file__).parent / "cases"
SHARED = Path(__file__).resolve().parents[4] / "shared" / "cases" / "diag"


def folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if (p / "expect.json").is_file())


def label(case: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((case / "expect.json").read_text(encoding="utf-8"))
    assert "code" in loaded, f"{case.name}: expect.json has no `code` (null for a healthy run)"
    for key in ("also", "not", "near"):
        assert isinstance(loaded.get(key, []), list), f"{case.name}: `{key}` is a list of codes"
    return {"also": [], "not": [], **loaded}


def report_of(case: Path) -> Report:
    probes = case / "probes.json"
    values = json.loads(probes.read_text(encoding="utf-8")) if probes.is_file() else None
    return diagnose(Evidence.from_log(case / "log.txt", values))


def everything(findings: tuple[Finding, ...]) -> Iterator[Finding]:
    for finding in findings:
        yield finding
        yield from everything(finding.consequences)


def check(case: Path) -> None:
    expected, report = label(case), report_of(case)
    check_evidence(case, report)
    named = [f.code for f in everything(report.findings) if f.severity != "info"]
    if expected["code"] is None:
        assert report.healthy, f"a healthy run was called {named}"
        assert report.exit_code == 0
        return
    assert named, "nothing was named"
    assert report.findings[0].code == expected["code"]
    assert report.findings[0].code not in expected["not"]
    further = set(named) - {expected["code"], *expected["also"]}
    assert not further, f"further alarms: {further}"
    assert not report.healthy


def check_evidence(case: Path, report: Report) -> None:
    """It points to lines that are there."""
    # As bytes: reading as text would make a line of every carriage return.
    log = (case / "log.txt").read_bytes().decode("utf-8", "replace").split("\n")
    for finding in everything(report.findings):
        assert finding.evidence
        assert finding.remedy.strip()
        assert finding.code in CODES
        for quote in finding.evidence:
            if quote.source == "log":
                assert quote.line is not None
                assert quote.text[:20].strip() in shown(log[quote.line - 1], colour=False)


@pytest.mark.parametrize("case", folders(OWN), ids=lambda p: p.name)
def test_own_case(case: Path) -> None:
    check(case)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared cases are not beside this checkout")
@pytest.mark.parametrize("case", folders(SHARED) if SHARED.is_dir() else [], ids=lambda p: p.name)
def test_shared_case(case: Path) -> None:
    check(case)


def test_every_code_has_a_positive_a_near_miss_and_a_healthy_neighbour() -> None:
    labels = [label(case) for case in folders(OWN)]
    sick = [one for one in labels if one["code"] is not None]
    positive = {one["code"] for one in sick}
    near_miss = {code for one in sick for code in one["not"]}
    neighbour = {code for one in labels if one["code"] is None for code in one.get("near", ())}

    assert positive - set(CODES) == set(), "orchestrator/diag/codes.py does not have it"
    assert set(CODES) - positive == set(), "no case has it as its `code`"
    assert set(CODES) - near_miss == set(), "no case of another cause has it in `not`"
    assert set(CODES) - neighbour == set(), "no healthy case has it in `near`"
    assert {code for one in labels for code in (*one["also"], *one["not"])} <= set(CODES)
    assert neighbour <= set(CODES)
