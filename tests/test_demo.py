"""The demo's last word about a run that was pulled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

VERDICT = Path(__file__).parents[1] / "playbooks" / "demo" / "verdict.py"
GOOD = {
    "prompts": 20,
    "tokens": 2000,
    "tau": 1.4,
    "tau_low": 1.35,
    "tau_high": 1.45,
    "untrained_tau": 1.0,
    "tokens_per_s_plain": 20.0,
    "tokens_per_s_drafted": 18.0,
    "identical": 20,
}


def verdict(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(VERDICT), str(folder), "1.25"]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("worse", "missed"),
    [
        ({}, None),
        ({"tau": 1.2}, "acceptance length at least 1.25"),
        ({"identical": 19}, "text identical to greedy decoding"),
        ({"untrained_tau": 1.38}, "better than untrained beyond the interval"),
    ],
)
def test_a_drafter_that_is_no_better_than_it_should_be_fails(
    tmp_path: Path, worse: dict[str, float], missed: str | None
) -> None:
    (tmp_path / "evaluation.json").write_text(json.dumps(GOOD | worse))
    done = verdict(tmp_path)
    assert done.returncode == (1 if missed else 0)
    misses = [li.removeprefix("MISS ") for li in done.stdout.splitlines() if li.startswith("MISS")]
    assert misses == ([missed] if missed else [])


def test_a_run_that_was_not_evaluated_is_told_with_the_next_step(tmp_path: Path) -> None:
    done = verdict(tmp_path)
    assert done.returncode == 2
    assert f"no {tmp_path}/evaluation.json" in done.stderr
    assert f"dflashctl pull --to {tmp_path}" in done.stderr and "Traceback" not in done.stderr
