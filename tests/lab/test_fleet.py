"""Many containers and hosts at once; stopping; diagnosing what is live."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml
from laptop import Cli

from orchestrator.lab import Lab
from orchestrator.lab.proxy import Proxy

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]


def test_a_dead_host_never_holds_up_the_others(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path, proxied: Proxy
) -> None:
    run_id = cli.json("launch", "lab-201", "--", "sleep", "60", cwd=code)["run_id"]
    known = yaml.safe_load(lab.inventory.read_text())
    known["hosts"]["dead"] = {"address": "127.0.0.1", "port": proxied.port}
    known["hosts"]["dead"] |= {k: v for k, v in known["hosts"]["lab"].items() if "file" in k}
    known["hosts"]["dead"]["known_hosts"] = known["hosts"]["lab"]["known_hosts"]
    known["containers"] = {"gone": {"host": "dead", "ct": 1}, **known["containers"]}
    proxied.black_hole()
    cli.inventory = tmp_path / "two-hosts.yaml"
    cli.inventory.write_text(yaml.safe_dump(known))
    process = cli.start("ps")
    assert process.stdout is not None
    began = time.monotonic()
    for line in process.stdout:
        if run_id in line:
            break
    # The dead one takes its 10 s; the others were on the screen before.
    assert process.poll() is None or time.monotonic() - began < 10
    rest, err = process.communicate(timeout=60)
    assert "gone" in rest and "unreachable" in rest
    assert process.returncode == 0
    assert "dead" in err


def test_ps_tells_what_is_not_running_apart_from_what_failed(cli: Cli, code: Path) -> None:
    cli("launch", "lab-201", "--wait", "--", "false", cwd=code, code=1)
    found = cli.json("ps")
    assert [(gone["ct"], gone["state"]) for gone in found["unreachable"]] == [(202, "not running")]
    assert next(run for run in found["runs"] if run["ct"] == 201)["state"] == "failed"


def test_stop_lets_the_run_save_and_keeps_its_last_lines(cli: Cli, lab: Lab, code: Path) -> None:
    (code / "start_training.sh").write_text(
        "trap 'echo saving; sleep 1; echo saved; exit 130' INT\necho on\n"
        "while :; do sleep 0.1; done\n"
    )
    run_id = cli.json("launch", "lab-201", cwd=code)["run_id"]
    done = cli("stop", run_id, code=0)
    assert "saved" in done.stdout and f"{run_id} stopped" in done.stdout
    found = cli.json("status", run_id)
    assert (found["state"], found["exit_code"]) == ("stopped", 130)
    assert "had already ended" in cli("stop", run_id, code=0).stdout


def test_stop_ends_what_will_not_listen(cli: Cli, lab: Lab, code: Path) -> None:
    (code / "start_training.sh").write_text("trap '' INT TERM\necho on\nsleep 1234 & wait\n")
    run_id = cli.json("launch", "lab-201", cwd=code)["run_id"]
    done = cli("stop", run_id, "--grace", "1s", code=0)
    assert "SIGKILL" in done.stderr
    assert "1234" not in lab.pct("exec", 201, "--", "ps", "axww")


# diag, live


def codes(report: dict[str, object]) -> list[str]:
    findings = report["findings"]
    assert isinstance(findings, list)
    return [finding["code"] for finding in findings]


def test_an_exception_is_named_with_its_line(cli: Cli, code: Path) -> None:
    (code / "train.py").write_text("def step():\n    raise ValueError('bad shape')\nstep()\n")
    cli("launch", "lab-201", "--wait", "--", "python3", "train.py", cwd=code, code=1)
    report = cli.json("diag", code=1)
    assert codes(report)[0] == "code.error"
    assert "bad shape" in report["findings"][0]["title"]
    assert report["state"] == "failed"


def test_a_stopped_container_is_named(cli: Cli) -> None:
    report = cli.json("diag", "--host", "lab", "--ct", "202", code=1)
    assert codes(report)[0] == "ct.stopped"


def test_a_host_that_is_not_there_is_named_and_unknown(cli: Cli) -> None:
    done = cli("diag", "--host", "127.0.0.1:1", "--ct", "200", "--json", code=3)
    assert codes(json.loads(done.stdout))[0] == "ssh.unreachable"


def test_a_saved_log_is_read_without_reaching_anything(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "old.log"
    log.write_text(
        "step 1\nTraceback (most recent call last):\n  File \"t.py\", line 3, in f\nKeyError: 'x'\n"
    )
    cli.inventory = tmp_path / "empty.yaml"
    cli.inventory.write_text("{}")
    assert "code.error" in cli("diag", "--log", log, code=1).stdout
    assert "no such file" in cli("diag", "--log", tmp_path / "none", code=5).stderr
