"""A run that ended badly is never called healthy, whatever its log says."""

from __future__ import annotations

from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.diag import Evidence, diagnose

SHELL = (
    "start_training.sh: line 14: [: too many arguments",
    './go.sh: 12: Syntax error: "fi" unexpected',
    "bash: line 1: OUT: unbound variable",
    "rm: cannot remove 'x': No such file or directory",
    "make: *** [Makefile:3: train] Error 1 (ignored)",
    "sed: -e expression #1, char 3: unterminated `s' command",
    "mkdir: missing operand",
)
CALM = (
    "step     10/9400 | loss 8.6000 | 15.4k tok/s",
    "step     20/9400 | loss 8.5000 | 15.5k tok/s",
    "training finished",
    "resumed from step 400, continuing",
    "retrying, attempt 2 of 3",
)
EXITS: tuple[dict[str, Any], ...] = (
    {"exit_record": {"exit_code": 2, "signal": None}},
    {"exit_record": {"exit_code": None, "signal": 11}},
    {"exit_record": {"exit_code": 1, "signal": None, "reason": "failed"}, "run_state": "failed"},
    {"exit": "exited with code 7"},
)


@given(
    lines=st.lists(st.sampled_from((*SHELL, *CALM)) | st.text(max_size=60), max_size=12),
    ending=st.sampled_from(EXITS),
)
@examples(120)
def test_no_words_make_a_failed_run_healthy(lines: list[str], ending: dict[str, Any]) -> None:
    assert not diagnose(Evidence.from_text("\n".join(lines), ending)).healthy


@pytest.mark.parametrize("line", SHELL[:3])
def test_a_shells_complaint_as_the_last_word_is_no_health(line: str) -> None:
    """Without an exit code: nobody wrote one down."""
    assert not diagnose(Evidence.from_text(f"+ cd /workspace\n{line}\n")).healthy


def test_an_error_as_the_last_word_is_no_health() -> None:
    assert not diagnose(Evidence.from_text(f"{CALM[0]}\nRuntimeError: something odd\n")).healthy


def test_a_complaint_that_the_run_outlived_is() -> None:
    log = "\n".join(
        [SHELL[0], *(f"step {i}/90 | loss {9 - i / 50} | 15.1k tok/s" for i in range(9))]
    )

    assert diagnose(Evidence.from_text(log)).healthy
