"""A launch from end to end: what arrives, what starts, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from agent_peer import seeds
from laptop import Cli

from orchestrator.lab import Lab
from orchestrator.lab.proxy import Proxy

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

SCRIPT = "echo hello from $(cat data/name)\nexit ${CODE:-0}\n"


@pytest.fixture
def code(code: Path) -> Path:
    (code / "start_training.sh").write_text(SCRIPT)
    (code / "data").mkdir()
    (code / "data/name").write_text("the lab")
    return code


def until_over(cli: Cli, run_id: str) -> dict[str, Any]:
    """Wait for the run's end; its status."""
    for _ in range(100):
        found: dict[str, Any] = json.loads(cli("status", run_id, "--json").stdout)
        if found["state"] in {"finished", "failed", "stopped"}:
            return found
        time.sleep(0.1)
    raise AssertionError(f"still {found['state']}")


def files_in(lab: Lab, ct: int, path: str) -> str:
    return lab.pct("exec", ct, "--", "sh", "-c", f"cat {path}")


def test_the_start_script_of_the_pushed_folder_runs_there(cli: Cli, lab: Lab, code: Path) -> None:
    done = cli("launch", "--host", "lab", "--ct", "200", "--wait", cwd=code, code=0)
    run_id = done.stdout.splitlines()[0]
    assert f"dflashctl tail {run_id}" in done.stdout
    assert f"dflashctl diag {run_id}" in done.stdout
    assert "finished" in done.stderr
    run = f"/workspace/dflashctl/runs/{run_id}"
    assert "hello from the lab\n" in files_in(lab, 200, f"{run}/train.log")
    assert json.loads(files_in(lab, 200, f"{run}/exit.json"))["exit_code"] == 0


def test_json_has_the_stable_keys(cli: Cli, code: Path) -> None:
    started = cli.json("launch", "lab-200", cwd=code)
    assert (started["host"], started["ct"]) == ("lab", 200)
    found = until_over(cli, started["run_id"])
    for key in ("run_id", "host", "ct", "state", "exit_code", "signal", "step", "tokens_per_s"):
        assert key in found
    assert (found["state"], found["exit_code"]) == ("finished", 0)


def test_the_runs_own_exit_code_is_known(cli: Cli, code: Path) -> None:
    done = cli("launch", "lab-201", "--env", "CODE=7", "--wait", cwd=code, code=1)
    run_id = done.stdout.splitlines()[0]
    found = json.loads(cli("status", "--json", code=1).stdout)
    assert (found["run_id"], found["state"], found["exit_code"]) == (run_id, "failed", 7)
    assert cli("tail", "--no-follow", code=0).stdout.startswith("hello")


def test_a_command_gets_its_words_untouched(cli: Cli, lab: Lab, code: Path) -> None:
    words = ["it's", "$HOME", "a\nb", "", "*", "-x", "ü"]
    done = cli("launch", "lab-201", "--wait", "--", "printf", "<%s>", *words, cwd=code, code=0)
    run_id = done.stdout.splitlines()[0]
    log = files_in(lab, 201, f"/workspace/dflashctl/runs/{run_id}/train.log")
    assert log.startswith("".join(f"<{word}>" for word in words))


def test_variables_reach_the_run_and_secrets_no_record(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets.env"
    secrets.write_text("# a comment\nTOKEN='s3cr3t value'\n")
    (code / "start_training.sh").write_text('echo "$PLAIN/${#TOKEN}"; ps axww; sleep 60\n')
    words = ("launch", "lab-201", "--env", "PLAIN=$(id) it's", "--env-file", secrets)
    run_id = cli.json(*words, cwd=code)["run_id"]
    run = f"/workspace/dflashctl/runs/{run_id}"
    for _ in range(50):
        if "sleep 60" in (log := files_in(lab, 201, f"{run}/train.log")):
            break
        time.sleep(0.1)
    assert log.startswith("$(id) it's/12\n")
    assert "s3cr3t" not in log
    everything = lab.pct("exec", 201, "--", "sh", "-c", f"cat {run}/*.json {run}/*.log; ps axww")
    assert "s3cr3t" not in everything
    shown = cli(*words, "--dry-run", cwd=code, code=0).stdout
    assert "s3cr3t" not in shown and "TOKEN" in shown


def test_a_secret_of_ones_shell_is_handed_on_by_its_name_and_seen_nowhere(
    cli: Cli, lab: Lab, code: Path
) -> None:
    cli.extra["TOKEN"] = "s3cr3t value"
    (code / "start_training.sh").write_text('echo "${#TOKEN}"; ps axww\n')
    run_id = cli.json("launch", "lab-201", "--secret", "TOKEN", cwd=code)["run_id"]
    until_over(cli, run_id)
    folder = f"/workspace/dflashctl/runs/{run_id}"
    assert files_in(lab, 201, f"{folder}/train.log").startswith("12\n")
    records = lab.pct("exec", 201, "--", "sh", "-c", f"cat {folder}/*.json")
    assert "TOKEN" in records and "s3cr3t" not in records
    for wrong in ("TOKEN=s3cr3t", "NOT_SET"):
        refused = cli("launch", "lab-201", "--secret", wrong, cwd=code, code=2).stderr
        assert wrong.partition("=")[0] in refused and "s3cr3t" not in refused


def test_a_second_launch_is_refused_while_the_first_lives(cli: Cli, code: Path) -> None:
    first = cli.json("launch", "lab-201", "--", "sleep", "60", cwd=code)["run_id"]
    refused = cli("launch", "lab-201", "--", "sleep", "60", cwd=code, code=4)
    assert first in refused.stderr and "--force" in refused.stderr
    assert "lab-201" in refused.stderr
    second = cli.json("launch", "lab-201", "--force", "--", "sleep", "60", cwd=code)["run_id"]
    assert cli.json("status")["run_id"] == second
    stopped = cli("stop", first, second, code=0)
    assert first in stopped.stdout and second in stopped.stdout


def test_a_refused_launch_leaves_the_newest_run_as_it_was(cli: Cli, code: Path) -> None:
    first = cli.json("launch", "lab-201", "--", "sleep", "60", cwd=code)["run_id"]
    cli("launch", "lab-201", cwd=code, code=4)
    assert cli.json("status")["run_id"] == first


def test_the_log_is_also_where_the_user_wants_it(cli: Cli, lab: Lab, code: Path) -> None:
    path = "/workspace/train_stdout_diag.log"
    cli("launch", "lab-201", "--log", path, "--wait", cwd=code, code=0)
    assert files_in(lab, 201, path).startswith("hello")


def test_nothing_is_pushed_when_nothing_should_be(cli: Cli, lab: Lab) -> None:
    lab.pct("exec", 201, "--", "sh", "-c", "echo 'echo I was here' > /root/start_training.sh")
    done = cli(
        *("launch", "lab-201", "--no-push", "--wait"),
        *("--", "bash", "/root/start_training.sh"),
        code=0,
    )
    log = f"/workspace/dflashctl/runs/{done.stdout.splitlines()[0]}/train.log"
    assert "I was here" in files_in(lab, 201, log)
    lab.pct("exec", 201, "--", "rm", "/root/start_training.sh")


def test_what_is_deleted_here_is_gone_there(cli: Cli, code: Path) -> None:
    (code / "start_training.sh").write_text("ls; cat data/* | wc -l\n")
    (code / "old.py").write_text("x")
    assert "old.py" in cli("launch", "lab-201", "--follow", cwd=code, code=0).stdout
    (code / "old.py").unlink()
    assert "old.py" not in cli("launch", "lab-201", "--follow", cwd=code, code=0).stdout


def test_a_running_job_keeps_its_own_release(cli: Cli, lab: Lab, code: Path) -> None:
    (code / "start_training.sh").write_text("sleep 4; cat data/name\n")
    first = cli.json("launch", "lab-201", cwd=code)["run_id"]
    (code / "data/name").write_text("another")
    cli("push", "lab-201", cwd=code, code=0)
    assert "the lab" in cli("tail", first, code=0).stdout


def test_doctor_warns_where_nobody_could_see_the_stacks_of_a_run(cli: Cli) -> None:
    """py-spy beside the container's interpreter is enough, and so is the host's own."""
    spy = "/srv/python/bin/py-spy"

    def stacks() -> dict[str, Any]:
        checks = cli.json("doctor", "lab-201", "--no-trainer")["checks"]
        return next(check for check in checks if check["name"] == "stacks")

    if not shutil.which("py-spy", path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"):
        assert not stacks()["ok"] and "py-spy" in stacks()["next"]
    cli("exec", "lab-201", "--", "ln", "-s", "/bin/true", spy, code=0)
    try:
        assert stacks()["ok"]
    finally:
        cli("exec", "lab-201", "--", "rm", spy, code=0)


def test_what_one_starts_by_name_is_the_inventorys_interpreter(cli: Cli, code: Path) -> None:
    ask = "import os, sys; print(sys.executable, os.environ['VIRTUAL_ENV'])"
    own = "/srv/python/bin/python3 /srv/python\n"
    assert cli("exec", "lab-201", "--", "python3", "-c", ask, code=0).stdout == own
    (code / "start_training.sh").write_text(f'python3 -c "{ask}"; exec python -c "{ask}"\n')
    run_id = cli.json("launch", "lab-201", cwd=code)["run_id"]
    said = cli("tail", run_id, code=0).stdout
    assert said == f"{own}{own.replace('python3 ', 'python ')}"


def test_dry_run_shows_what_would_be_sent_and_reaches_nothing(
    cli: Cli, proxied: Proxy, code: Path
) -> None:
    shown = cli("launch", "lab-200", "--dry-run", "--name", "demo", cwd=code, code=0).stdout
    assert "pct exec 200 --keep-env 0 -- /opt/dflash/python/bin/python -I -S -c LOADER" in shown
    assert '"command": ["bash", "start_training.sh"]' in shown
    start, last = shown.splitlines()[-2:]
    assert last.endswith('release.prune {"keep": 10}')
    assert "run.start" in start and '"python": "/opt/dflash/python/bin/python"' in start
    assert proxied.traffic()["connections"] == 0


def test_one_connection_carries_a_launch(cli: Cli, proxied: Proxy, code: Path) -> None:
    cli("launch", "lab-201", cwd=code, code=0)
    assert proxied.traffic()["connections"] == 1


# Faults


def test_ctrl_c_ends_with_130(cli: Cli, code: Path) -> None:
    process = cli.start("launch", "lab-201", "-f", "--", "sh", "-c", "echo on; sleep 30", cwd=code)
    assert process.stdout is not None
    for line in process.stdout:
        if line == "on\n":
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert cli.json("status")["state"] == "training"


@pytest.mark.parametrize("seed", seeds(1, 50))
def test_two_people_at_once_start_one_run(cli: Cli, lab: Lab, code: Path, seed: int) -> None:
    dice = random.Random(seed)
    words = ("launch", "lab-201", "--name", f"both{seed}", "--", "sleep", "3232")
    both: list[subprocess.Popen[str]] = []
    for _ in range(2):
        both.append(cli.start(*words, cwd=code))
        # Up to one being done before the other begins.
        time.sleep(dice.choice([0.0, dice.uniform(0.0, 0.1), dice.uniform(0.0, 1.5)]))
    said = [process.communicate(timeout=60) for process in both]
    assert sorted(process.returncode for process in both) == [0, 4], said
    winner = next(out for process, (out, _) in zip(both, said, strict=True) if out)
    loser = next(err for process, (out, err) in zip(both, said, strict=True) if not out)
    assert winner.splitlines()[0] in loser
    line = "ps axww | grep -c '[s]leep 3232'"
    assert int(lab.pct("exec", 201, "--", "sh", "-c", line)) == 1
