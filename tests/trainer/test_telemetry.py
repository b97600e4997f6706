"""What a run writes is what its readers read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.telemetry import (
    EVENTS_FILE,
    METRICS_FILE,
    RunWriter,
    StepLine,
    read_events,
    read_steps,
)

ODD = "one\u2028two\x85three\nfour"
"""Characters at which Python's ``splitlines`` cuts; JSON escapes the last alone."""


def test_lines_survive_whatever_their_strings_hold_and_torn_ones_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = RunWriter(tmp_path)
    writer.event("failed", error=ODD)
    writer.step(StepLine(step=1, steps=2, loss=float("nan")))
    writer.close()
    (event,) = read_events((tmp_path / EVENTS_FILE).read_text(encoding="utf-8"))
    assert event.detail == {"error": ODD}
    text = (tmp_path / METRICS_FILE).read_text(encoding="utf-8")
    assert [line.loss for line in read_steps(text + text[:20])] == [None]
    assert "loss nan" in capsys.readouterr().out


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from trainer.telemetry import RunWriter;"
        f"writer = RunWriter(Path({str(tmp_path)!r})); writer.claim(); print(flush=True); input()"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        first.stdout.readline()
        second = RunWriter(tmp_path)
        with pytest.raises(ConfigError, match="another run is writing into"):
            second.claim()
        first.kill()
    second.claim()
    second.close()
