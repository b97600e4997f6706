"""Runs in the lab whose containers are ill (``conftest.py``), and what ``diag`` says of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from laptop import Cli

from orchestrator.lab import Lab
from orchestrator.run import ENDED

STEPS = 'for i in 1 2 3 4 5 6 7 8; do echo "step $i/400 | loss 8.$i | 15.${i}k tok/s"; done\n'


def launch(cli: Cli, code: Path, script: str, ct: int = 300, **files: str) -> str:
    (code / "start_training.sh").write_text(script)
    for name, text in files.items():
        (code / f"{name}.py").write_text(text)
    started = cli.json("launch", f"lab-{ct}", "--force", cwd=code)
    return str(started["run_id"])


def over(cli: Cli, run_id: str, seconds: float = 15) -> dict[str, Any]:
    for _ in range(int(seconds * 10)):
        found: dict[str, Any] = json.loads(cli("status", run_id, "--json").stdout)
        if found["state"] in ENDED:
            return found
        time.sleep(0.1)
    raise AssertionError(f"still {found['state']}")


def speaks(ill: Lab, run_id: str, words: str, ct: int = 300) -> None:
    log = ill.files(ct) / f"workspace/dflashctl/runs/{run_id}/train.log"
    for _ in range(100):
        if log.exists() and words in log.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{words!r} never came")


def findings(cli: Cli, run_id: str) -> list[dict[str, Any]]:
    report = json.loads(cli("diag", run_id, "--json").stdout)
    print(json.dumps(report, indent=1))
    return [f for f in report["findings"] if f["severity"] != "info"]


def named(cli: Cli, run_id: str) -> list[str]:
    return [f["code"] for f in findings(cli, run_id)]
