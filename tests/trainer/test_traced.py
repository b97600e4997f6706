"""Any script, with a record of who traces: nothing in it is edited."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from trainer.__main__ import main  # noqa: E402
from trainer.telemetry import read_events  # noqa: E402

pytestmark = pytest.mark.torch

SCRIPT = """
import sys, threading
import torch
from beside import NAME

def culprit():
    torch.fx.symbolic_trace(torch.nn.Linear(2, 2))

if __name__ == "__main__":
    one = threading.Thread(target=culprit, name=NAME)
    one.start()
    one.join()
    print(sys.argv[1:])
    sys.exit(3)
"""


def test_a_foreign_scripts_traces_are_events_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("NAME = 'drafter-7'\n")
    monkeypatch.setenv("DFLASH_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = torch.fx.Tracer.trace

    with pytest.raises(SystemExit) as end:
        main(["trace", str(script), "--steps", "4"])

    assert end.value.code == 3
    assert capfd.readouterr().out == "['--steps', '4']\n"
    (event,) = read_events((tmp_path / "run" / "events.jsonl").read_text())
    assert (event.event, event.detail["thread"]) == ("fx_trace", "drafter-7")
    assert event.detail["stack"][-1].endswith("culprit")
    assert torch.fx.Tracer.trace is before


def test_a_script_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path / "no.py")]) == 2
    assert "there is no script" in capsys.readouterr().err
