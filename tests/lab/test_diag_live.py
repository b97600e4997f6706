"""``diag`` on live runs of a lab whose containers are really ill."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from laptop import Cli

from orchestrator.lab import Container, Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]

MIB = 1024 * 1024
STEPS = 'for i in 1 2 3 4 5 6 7 8; do echo "step $i/400 | loss 8.$i | 15.${i}k tok/s"; done\n'


@pytest.fixture(scope="module")
def sick(make_lab: Any) -> Lab:
    """Container 300 has little of everything, 301 no usable Python."""
    lab: Lab = make_lab(
        containers=(
            Container(300, memory=3072 * MIB, shm=64 * MIB, workdir_size=1300 * MIB),
            Container(301, python="minimal"),
        )
    )
    lab.up()
    return lab


@pytest.fixture
def here(sick: Lab, tmp_path: Path) -> Cli:
    home = tmp_path / "home"
    home.mkdir()
    return Cli(home, sick.inventory)


@pytest.fixture(autouse=True)
def tidy(sick: Lab, here: Cli) -> Iterator[None]:
    yield
    sick.pct("exec", 300, "--", "sh", "-c", "rm -f /workspace/fill /dev/shm/fill")
    for run in here.json("ps")["runs"]:
        if run["ct"] == 300 and run["state"] not in ("finished", "failed", "stopped"):
            here("stop", run["run_id"], "--grace", "1s")


def launch(cli: Cli, code: Path, script: str, **files: str) -> str:
    (code / "start_training.sh").write_text(script)
    for name, text in files.items():
        (code / f"{name}.py").write_text(text)
    started = cli.json("launch", "lab-300", "--force", cwd=code)
    return str(started["run_id"])


def over(cli: Cli, run_id: str) -> dict[str, Any]:
    for _ in range(150):
        found: dict[str, Any] = json.loads(cli("status", run_id, "--json").stdout)
        if found["state"] in ("finished", "failed", "stopped"):
            return found
        time.sleep(0.1)
    raise AssertionError(f"still {found['state']}")


def speaks(sick: Lab, run_id: str, words: str) -> None:
    log = sick.files(300) / f"workspace/dflashctl/runs/{run_id}/train.log"
    for _ in range(100):
        if log.exists() and words in log.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{words!r} never came")


def named(cli: Cli, run_id: str) -> list[str]:
    report = json.loads(cli("diag", run_id, "--json").stdout)
    print(json.dumps(report, indent=1))
    return [f["code"] for f in report["findings"] if f["severity"] != "info"]


def test_a_healthy_run_raises_nothing(here: Cli, sick: Lab, code: Path) -> None:
    run_id = launch(here, code, STEPS + "sleep 60\n")
    speaks(sick, run_id, "step 8/")

    assert named(here, run_id) == []


def test_a_finished_run_raises_nothing(here: Cli, code: Path) -> None:
    run_id = launch(here, code, STEPS + "echo training complete\n")
    over(here, run_id)

    assert named(here, run_id) == []


def test_the_containers_memory_limit(here: Cli, code: Path) -> None:
    eat = "import time\nheap = []\nwhile True:\n    heap.append(b'x' * 64_000_000)\n"
    run_id = launch(here, code, STEPS + "exec python3 eat.py\n", eat=eat)
    over(here, run_id)

    assert named(here, run_id)[0] == "mem.oom_killed"


def test_a_full_disk(here: Cli, code: Path) -> None:
    save = (
        "import os\n"
        "fill = open('/workspace/fill', 'wb')\n"
        "while True:\n    fill.write(b'x' * 16_000_000)\n    fill.flush()\n"
    )
    run_id = launch(here, code, STEPS + "exec python3 save.py\n", save=save)
    over(here, run_id)

    assert named(here, run_id)[0] == "disk.full"


def test_a_full_shm_kills_by_bus_error(here: Cli, code: Path) -> None:
    share = (
        "import mmap, os\n"
        "fill = os.open('/dev/shm/fill', os.O_RDWR | os.O_CREAT)\n"
        "os.ftruncate(fill, 96 << 20)\n"
        "seen = mmap.mmap(fill, 96 << 20)\n"
        "for at in range(0, 96 << 20, 4096):\n    seen[at] = 1\n"
    )
    run_id = launch(here, code, STEPS + "exec python3 share.py\n", share=share)
    over(here, run_id)

    assert named(here, run_id)[0] == "shm.full"


def test_a_stopped_container(here: Cli, sick: Lab, code: Path) -> None:
    run_id = launch(here, code, STEPS + "sleep 60\n")
    speaks(sick, run_id, "step 8/")
    sick.stop(300)
    try:
        assert named(here, run_id)[0] == "ct.stopped"
    finally:
        sick.start(300)


def test_a_frozen_container(here: Cli, sick: Lab, code: Path) -> None:
    run_id = launch(here, code, STEPS + "sleep 60\n")
    speaks(sick, run_id, "step 8/")
    sick.freeze(300)
    try:
        assert named(here, run_id)[0] == "ct.frozen"
    finally:
        sick.thaw(300)


def test_a_killed_tmux(here: Cli, sick: Lab, code: Path) -> None:
    run_id = launch(here, code, STEPS + "sleep 60\n")
    speaks(sick, run_id, "step 8/")
    sick.pct("exec", 300, "--", "tmux", "kill-server")

    assert named(here, run_id)[0] == "tmux.died"


def test_a_lost_tmux_socket(here: Cli, sick: Lab, code: Path) -> None:
    run_id = launch(here, code, STEPS + "sleep 60\n")
    speaks(sick, run_id, "step 8/")
    sick.pct("exec", 300, "--", "sh", "-c", "rm -rf /tmp/tmux-0")

    assert named(here, run_id)[0] == "tmux.socket_lost"
    sick.pct("exec", 300, "--", "sh", "-c", "kill -USR1 $(pgrep -o tmux)")


def test_a_hang(here: Cli, sick: Lab, code: Path) -> None:
    wait = (
        "import threading, time\n"
        "for i in range(9):\n    print(f'step {i}/400 | loss 8.{i} | 15.1k tok/s', flush=True)\n"
        "lock = threading.Lock()\nlock.acquire()\n"
        "threading.Thread(target=lock.acquire, name='drafter-1').start()\n"
        "lock.acquire()\n"
    )
    run_id = launch(here, code, "exec python3 wait.py\n", wait=wait)
    speaks(sick, run_id, "step 8/")
    log = f"/workspace/dflashctl/runs/{run_id}/train.log"
    sick.pct("exec", 300, "--", "touch", "-d", "-2 hours", log)

    assert named(here, run_id)[0] == "run.hang"


def test_nan(here: Cli, sick: Lab, code: Path) -> None:
    nan = 'for i in 9 10 11 12; do echo "step $i/400 | loss nan | 15.1k tok/s"; done\nsleep 60\n'
    run_id = launch(here, code, STEPS + nan)
    speaks(sick, run_id, "step 12/")

    assert named(here, run_id)[0] == "loss.nan"


def test_the_storys_collapse(here: Cli, sick: Lab, code: Path) -> None:
    fake = (Path(__file__).parent / "fake_run.py").read_text()
    run_id = launch(here, code, "python3 fake.py 40 0.01 20\nsleep 60\n", fake=fake)
    speaks(sick, run_id, '"step": 40')

    assert named(here, run_id)[0] == "throughput.collapse"


def test_a_masked_exit_code(here: Cli, code: Path) -> None:
    fail = "print('step 1/9 | loss 8.0 | 15.1k tok/s')\nraise KeyError('warmup')\n"
    run_id = launch(here, code, "python3 fail.py 2>&1 | tee copy.log\n", fail=fail)

    assert over(here, run_id)["exit_code"] == 0
    report = json.loads(here("diag", run_id, "--json", code=1).stdout)
    root = report["findings"][0]
    assert root["code"] == "code.error"
    assert [c["code"] for c in root["consequences"]] == ["exit.masked"]


def test_a_command_that_is_not_there(here: Cli, code: Path) -> None:
    run_id = launch(here, code, "torchrun --nproc-per-node 8 train.py\n")
    over(here, run_id)

    assert named(here, run_id)[0] == "env.path"


def test_no_usable_python_is_named(here: Cli) -> None:
    report = json.loads(here("diag", "--host", "lab", "--ct", "301", "--json").stdout or "{}")

    assert [f["code"] for f in report.get("findings", [])][:1] == ["env.import"]
