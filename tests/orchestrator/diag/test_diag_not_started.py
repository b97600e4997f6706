"""The commonest slips of a launch, each with the remedy that mends it."""

from __future__ import annotations

import pytest

from orchestrator.diag import Evidence, Finding, diagnose

ABSENT = "No such file or directory"


def first(log: str, code: int) -> Finding:
    record = {"exit_code": code, "signal": None, "reason": "failed"}
    probes = {"run_state": "failed", "exit_record": record}
    return diagnose(Evidence.from_text(log, probes)).findings[0]


@pytest.mark.parametrize(
    ("log", "code", "expected"),
    [
        (f"[dflashctl] cannot start 'pyhton3' in /w: {ABSENT}", 127, "did you mean python3?"),
        (f"[dflashctl] cannot start 'torchun' in /w: {ABSENT}", 127, "did you mean torchrun?"),
        ("[dflashctl] cannot start './a.sh' in /w: Permission denied", 126, "chmod +x ./a.sh"),
        (
            f"[dflashctl] cannot start './a.sh' in /w: {ABSENT}; its lines end in CRLF, so that …",
            127,
            r"sed -i 's/\r$//' ./a.sh",
        ),
        (f"[dflashctl] cannot start './a.sh' in /w: {ABSENT}", 127, "head -1 ./a.sh | cat -A"),
        (
            r"start_training.sh: line 2: $'\r': command not found",
            127,
            r"sed -i 's/\r$//' start_training.sh",
        ),
        (
            "start_training.sh: line 2: set: pipefail\r: invalid option name",
            2,
            r"sed -i 's/\r$//' start_training.sh",
        ),
    ],
)
def test_the_slip_is_named_with_what_mends_it(log: str, code: int, expected: str) -> None:
    found = first(log + "\n", code)
    assert found.code in ("env.path", "run.not_started")
    assert expected in f"{found.title}\n{found.remedy}"


def test_a_program_unlike_any_usual_one_is_not_guessed_at() -> None:
    found = first(f"[dflashctl] cannot start 'frobnicate' in /w: {ABSENT}\n", 127)
    assert found.code == "env.path"
    assert "did you mean" not in found.title


def test_a_run_without_a_word_is_shown_by_how_it_ended() -> None:
    record = {"exit_code": 0, "signal": None, "reason": "finished"}
    probes = {"ct": 200, "run_started": 1.0, "run_state": "finished", "exit_record": record}
    (finding,) = diagnose(Evidence.from_text("", probes)).findings
    assert (finding.code, finding.severity) == ("run.not_started", "warning")
    assert [quote.source for quote in finding.evidence] == ["probe:run_state", "probe:exit_record"]
