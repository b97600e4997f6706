"""``diag`` on live runs of a lab whose containers are really ill."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from ill import STEPS, launch, named, over, speaks
from laptop import Cli

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]


def test_a_healthy_run_raises_nothing(ill_cli: Cli, ill: Lab, code: Path) -> None:
    run_id = launch(ill_cli, code, STEPS + "sleep 60\n")
    speaks(ill, run_id, "step 8/")

    assert named(ill_cli, run_id) == []


def test_a_finished_run_raises_nothing(ill_cli: Cli, code: Path) -> None:
    run_id = launch(ill_cli, code, STEPS + "echo training complete\n")
    over(ill_cli, run_id)

    assert named(ill_cli, run_id) == []


def test_the_containers_memory_limit(ill_cli: Cli, code: Path) -> None:
    eat = "import time\nheap = []\nwhile True:\n    heap.append(b'x' * 64_000_000)\n"
    run_id = launch(ill_cli, code, STEPS + "exec python3 eat.py\n", eat=eat)
    over(ill_cli, run_id)

    assert named(ill_cli, run_id)[0] == "mem.oom_killed"


def test_a_kill_without_a_memory_limit_is_not_the_memorys(ill_cli: Cli, code: Path) -> None:
    run_id = launch(ill_cli, code, STEPS + "kill -9 $$\n", ct=303)
    over(ill_cli, run_id)

    assert named(ill_cli, run_id) == ["run.killed"]


def test_a_run_that_a_person_stopped_is_no_fault(ill_cli: Cli, ill: Lab, code: Path) -> None:
    run_id = launch(ill_cli, code, STEPS + "sleep 60\n", ct=303)
    speaks(ill, run_id, "step 8/", ct=303)
    ill_cli("stop", run_id, "--grace", "1s")

    done = ill_cli("diag", run_id)

    assert done.returncode == 0
    # As `status` calls the container, and everything else.
    assert done.stdout.startswith(f"{run_id} on lab-303: stopped")
    assert "run.interrupted: stopped by " in done.stdout
    assert "stopped by   " in ill_cli("status", run_id).stdout


def test_lines_that_end_in_crlf(ill_cli: Cli, code: Path) -> None:
    script = "#!/bin/bash\r\nset -euo pipefail\r\ncd /workspace\r\npython3 train.py\r\n"
    run_id = launch(ill_cli, code, script, ct=303)
    over(ill_cli, run_id)

    assert named(ill_cli, run_id) == ["run.not_started"]


def test_an_interpreter_that_the_container_lacks(ill: Lab, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "inventory.yaml"
    words = yaml.safe_load(Path(ill.inventory).read_text())
    words["containers"]["lab-303"]["python"] = "/opt/venv/bin/python"
    path.write_text(yaml.safe_dump(words))
    told = Cli(tmp_path / "elsewhere", path)("diag", "lab-303").stdout

    assert "lab-303: its runs are not known" in told
    assert "the container has no /opt/venv/bin/python" in told
    assert "`python:` of lab-303" in told
    assert not re.search(r"pve-cluster|not_started", told)


def test_a_refused_key_names_the_host_and_its_port(ill: Lab, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    key, path = tmp_path / "other_key", tmp_path / "inventory.yaml"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    words = yaml.safe_load(Path(ill.inventory).read_text())
    host = words["hosts"]["lab"]
    host["identity_file"] = str(key)
    path.write_text(yaml.safe_dump(words))
    told = Cli(tmp_path / "elsewhere", path)("diag", "lab-303", code=3).stdout

    assert "ssh.auth" in told
    assert f"ssh -v -p {host['port']} " in told
    assert "HOST" not in told


def test_a_full_disk(ill_cli: Cli, code: Path) -> None:
    save = (
        "import os\n"
        "fill = open('/workspace/fill', 'wb')\n"
        "while True:\n    fill.write(b'x' * 16_000_000)\n    fill.flush()\n"
    )
    run_id = launch(ill_cli, code, STEPS + "exec python3 save.py\n", save=save)
    over(ill_cli, run_id)

    assert named(ill_cli, run_id)[0] == "disk.full"


def test_a_full_shm_kills_by_bus_error(ill_cli: Cli, code: Path) -> None:
    share = (
        "import mmap, os\n"
        "fill = os.open('/dev/shm/fill', os.O_RDWR | os.O_CREAT)\n"
        "os.ftruncate(fill, 96 << 20)\n"
        "seen = mmap.mmap(fill, 96 << 20)\n"
        "for at in range(0, 96 << 20, 4096):\n    seen[at] = 1\n"
    )
    run_id = launch(ill_cli, code, STEPS + "exec python3 share.py\n", share=share)
    over(ill_cli, run_id)

    assert named(ill_cli, run_id)[0] == "shm.full"


def test_a_stopped_container(ill_cli: Cli, ill: Lab, code: Path) -> None:
    run_id = launch(ill_cli, code, STEPS + "sleep 60\n")
    speaks(ill, run_id, "step 8/")
    ill.stop(300)
    try:
        assert named(ill_cli, run_id)[0] == "ct.stopped"
    finally:
        ill.start(300)


def test_a_frozen_container(ill_cli: Cli, ill: Lab, code: Path) -> None:
    run_id = launch(ill_cli, code, STEPS + "sleep 60\n")
    speaks(ill, run_id, "step 8/")
    ill.freeze(300)
    try:
        assert named(ill_cli, run_id)[0] == "ct.frozen"
    finally:
        ill.thaw(300)


def test_a_killed_tmux(ill_cli: Cli, ill: Lab, code: Path) -> None:
    run_id = launch(ill_cli, code, STEPS + "sleep 60\n")
    speaks(ill, run_id, "step 8/")
    # It answers before it has ended.
    gone = "tmux kill-server; while pgrep tmux >/dev/null; do sleep 0.05; done"
    ill.pct("exec", 300, "--", "sh", "-c", gone)

    found = named(ill_cli, run_id)[0]
    # A busy machine may not list its processes within the look's 1.5 s: whether the server or only
    # its socket is gone stays open then.
    for _ in range(2):
        found = named(ill_cli, run_id)[0] if found == "tmux.socket_lost" else found
    assert found == "tmux.died"


def test_a_lost_tmux_socket(ill_cli: Cli, ill: Lab, code: Path) -> None:
    run_id = launch(ill_cli, code, STEPS + "sleep 60\n")
    speaks(ill, run_id, "step 8/")
    ill.pct("exec", 300, "--", "sh", "-c", "rm -rf /tmp/tmux-0")

    assert named(ill_cli, run_id)[0] == "tmux.socket_lost"
    ill.pct("exec", 300, "--", "sh", "-c", "kill -USR1 $(pgrep -o tmux)")


def test_a_hang(ill_cli: Cli, ill: Lab, code: Path) -> None:
    wait = (
        "import threading, time\n"
        "for i in range(9):\n    print(f'step {i}/400 | loss 8.{i} | 15.1k tok/s', flush=True)\n"
        "lock = threading.Lock()\nlock.acquire()\n"
        "threading.Thread(target=lock.acquire, name='drafter-1').start()\n"
        "lock.acquire()\n"
    )
    run_id = launch(ill_cli, code, "exec python3 wait.py\n", wait=wait)
    speaks(ill, run_id, "step 8/")
    log = f"/workspace/dflashctl/runs/{run_id}/train.log"
    ill.pct("exec", 300, "--", "touch", "-d", "-2 hours", log)

    assert named(ill_cli, run_id)[0] == "run.hang"


def test_nan(ill_cli: Cli, ill: Lab, code: Path) -> None:
    nan = 'for i in 9 10 11 12; do echo "step $i/400 | loss nan | 15.1k tok/s"; done\nsleep 60\n'
    run_id = launch(ill_cli, code, STEPS + nan)
    speaks(ill, run_id, "step 12/")

    assert named(ill_cli, run_id)[0] == "loss.nan"


def test_the_storys_collapse(ill_cli: Cli, ill: Lab, code: Path) -> None:
    fake = (Path(__file__).parent / "fake_run.py").read_text()
    run_id = launch(ill_cli, code, "python3 fake.py 40 0.01 20\nsleep 60\n", fake=fake)
    speaks(ill, run_id, '"step": 40')

    assert named(ill_cli, run_id)[0] == "throughput.collapse"


def test_a_masked_exit_code(ill_cli: Cli, code: Path) -> None:
    fail = "print('step 1/9 | loss 8.0 | 15.1k tok/s')\nraise KeyError('warmup')\n"
    run_id = launch(ill_cli, code, "python3 fail.py 2>&1 | tee copy.log\n", fail=fail)

    assert over(ill_cli, run_id)["exit_code"] == 0
    report = json.loads(ill_cli("diag", run_id, "--json", code=1).stdout)
    root = report["findings"][0]
    assert root["code"] == "code.error"
    assert [c["code"] for c in root["consequences"]] == ["exit.masked"]


def test_a_command_that_is_not_there(ill_cli: Cli, code: Path) -> None:
    run_id = launch(ill_cli, code, "torchrun --nproc-per-node 8 train.py\n")
    over(ill_cli, run_id)

    assert named(ill_cli, run_id)[0] == "env.path"


def test_no_usable_python_is_named(ill_cli: Cli) -> None:
    report = json.loads(ill_cli("diag", "--host", "lab", "--ct", "301", "--json").stdout or "{}")

    assert [f["code"] for f in report.get("findings", [])][:1] == ["env.import"]


def test_a_container_without_runs_is_looked_at_as_doctor_does(ill: Lab, ill_cli: Cli) -> None:
    done = ill_cli("diag", "lab-304")
    assert "no run" in done.stderr
    checks = [line for line in ill_cli("doctor", "lab-304").stdout.splitlines() if "  ok " in line]
    assert len(checks) > 3
    assert {line.split()[1] for line in checks} <= set(done.stdout.split())
    answer = json.loads(ill_cli("diag", "lab-304", "--json").stdout)
    assert answer["error"] == "RunNotFound" and answer["findings"] == []
    assert {check["name"] for check in answer["checks"]} >= {"disk", "tmux"}
    assert done.returncode == (5 if answer["ready"] else 4)
