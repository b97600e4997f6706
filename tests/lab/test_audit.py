"""The host keeps who did what, and how it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from laptop import Cli

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

LOG = "/var/lib/dflashctl/audit.log"


def audited(lab: Lab) -> list[dict[str, Any]]:
    done = lab.host(["sh", "-c", f"cat {LOG} 2>/dev/null || true"], capture_output=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_changing_action_leaves_a_line_refused_ones_too(
    cli: Cli, lab: Lab, code: Path
) -> None:
    before = len(audited(lab))
    words = ("launch", "lab-201", "--name", "noted", "--env", "TOKEN=s3cr3t", "--", "sleep", "99")
    run_id = cli.json(*words, cwd=code)["run_id"]
    cli(*words, cwd=code, code=4)
    cli("stop", run_id, "--grace", "1s", code=0)
    cli("push", "lab-201", cwd=code, code=0)
    cli("exec", "lab-201", "--", "sh", "-c", "exit 3", "s3cr3t", code=3)
    cli("ps", code=0)
    found = audited(lab)[before:]
    assert [(line["action"], line["result"].partition(":")[0]) for line in found] == [
        ("launch", "ok"),
        ("launch", "RefusedError"),
        ("stop", "ok"),
        ("push", "ok"),
        ("exec", "ok"),
    ]
    assert found[0]["run_id"] == run_id
    assert found[4]["exit_code"] == 3
    assert all("@" in line["who"] and line["ct"] == 201 for line in found)
    assert "s3cr3t" not in json.dumps(found)
    mode = lab.host(["stat", "-c", "%a", LOG], capture_output=True).stdout
    assert mode.strip() == "600"
