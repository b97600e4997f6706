"""What `stop` prints of a run that has ended."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.cli.runs import _tell_stopped


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        ({"signal": 2, "exit_code": None}, "signal 2"),
        ({"exit_code": 0}, "exit code 0"),
        ({"exit_code": None}, "its exit code is not known"),
    ],
)
def test_how_it_ended(answer: dict[str, Any], how: str, capsys: pytest.CaptureFixture[str]) -> None:
    _tell_stopped({"run_id": "r", "state": "stopped", **answer})
    assert capsys.readouterr().out == f"r stopped ({how})\n"
