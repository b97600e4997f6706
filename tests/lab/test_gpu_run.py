"""Runs on this machine's own GPUs, from launch to stop: no stand-in for the driver or for torch."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ill import named, over
from laptop import Cli
from test_lab_up_down import remains

from orchestrator.lab import Container, Lab
from orchestrator.paths import HOST_WORKDIR, HostPaths

pytestmark = [
    pytest.mark.lab,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs a GPU"),
]

PYTHON = "/opt/dflash/python/bin/python"
TRAIN = '''
"""Learns a linear map until it is told to stop, then saves."""
import json, os, pathlib, signal, time

import torch

folder = pathlib.Path(os.environ["DFLASH_RUN_DIR"])
(folder / "trainer.pid").write_text(str(os.getpid()))
told = []
signal.signal(signal.SIGINT, lambda number, frame: told.append(number))


def line(file, **values):
    with (folder / file).open("a") as stream:
        stream.write(json.dumps({"time": time.time(), **values}) + "\\n")


size, steps = 1024, 1_000_000
x, teacher = (torch.randn(size, size, device="cuda") for _ in range(2))
student = torch.zeros(size, size, device="cuda", requires_grad=True)
line("events.jsonl", event="training", detail={})
began = time.monotonic()
for step in range(1, steps):
    loss = (x @ student - x @ teacher).square().mean()
    loss.backward()
    with torch.no_grad():
        student -= 0.05 * student.grad * size
        student.grad = None
    time.sleep(0.2)
    value, rate = loss.item(), step * size / (time.monotonic() - began)
    line("metrics.jsonl", step=step, steps=steps, loss=value, tokens_per_s=rate)
    print(f"step {step}/{steps} | loss {value:.3f} | {rate / 1e3:.1f}k tok/s", flush=True)
    if told:
        torch.save(student, folder / "student.pt")
        print("saved", flush=True)
        raise SystemExit(128 + told[0])
'''
HOLD = """
import os, time
import torch
held = torch.zeros(2 << 30, dtype=torch.uint8, device="cuda")
print("holding", os.getpid(), flush=True)
time.sleep(600)
"""


def nvidia_smi(query: str) -> list[str]:
    """Of the machine itself; a line a GPU or a process."""
    argv = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture(scope="module")
def machine(make_lab: Callable[..., Lab]) -> Iterator[Lab]:
    """Two containers with torch and all GPUs; nothing of them stays behind."""
    lab = make_lab((Container(200, python="shared"), Container(201, python="shared")))
    python = lab.spec.shared_python / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no training interpreter: make lab-python")
    asking = "import torch; raise SystemExit(not torch.cuda.is_available())"
    if subprocess.run([python, "-c", asking]).returncode:
        pytest.skip(f"{python} has no torch that finds a GPU")
    if nvidia_smi("compute-apps=pid"):
        pytest.skip("somebody works on this machine's GPUs")
    lab.up()
    yield lab
    lab.down()
    assert remains(lab.layout) == []


@pytest.fixture
def user(machine: Lab, tmp_path: Path, code: Path) -> Iterator[Cli]:
    """Of a laptop with a training script in ``code``."""
    (code / "train.py").write_text(TRAIN)
    cli = Cli.at_home(tmp_path / "home", machine.inventory)
    yield cli
    cli.end_runs()


def launched(user: Cli, machine: Lab, code: Path) -> tuple[str, Path]:
    """A run in container 200 that has made steps, and its folder."""
    run_id = user.json("launch", "lab-200", "--", PYTHON, "train.py", cwd=code)["run_id"]
    folder = machine.files(200) / f"workspace/dflashctl/runs/{run_id}"
    metrics = folder / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5)
    return run_id, folder


def leases(machine: Lab) -> list[str]:
    folder = HostPaths(HOST_WORKDIR).leases
    return machine.host(["sh", "-c", f"ls {folder}/*.json 2>/dev/null"]).stdout.split()


def test_a_run_is_followed_looked_at_and_stopped(
    user: Cli, machine: Lab, code: Path, tmp_path: Path
) -> None:
    run_id, folder = launched(user, machine, code)
    assert len(leases(machine)) == len(machine.spec.gpus)

    refused = user("launch", "lab-201", "--", "true", cwd=code, code=4).stderr
    assert "error: lab-201 run " in refused
    assert re.search(rf"GPU 0 by \S+ for {run_id} in container 200", refused)

    assert re.search(r"step \d+/1000000 \| loss ", user("tail", "-F", code=0).stdout)
    metrics = user("tail", "-F", "-n", "3", "--metrics", code=0).stdout.splitlines()
    assert all(re.search(r"/1000000 \| loss \d+\.\d{4} \| ", line) for line in metrics)
    assert len(metrics) == 3
    assert named(user, run_id) == []

    lock = tmp_path / "lock.json"
    user("env", "freeze", "lab-200", "-o", lock, code=0)
    assert [gpu["name"] for gpu in json.loads(lock.read_text())["gpus"]] == nvidia_smi("gpu=name")
    (row,) = [row for row in user.json("top")["runs"] if row["run_id"] == run_id]
    assert row["gpu"] is not None

    told = user("stop", "--grace", "30s", code=0).stdout
    assert "| saved" in told and "stopped (exit code 130)" in told
    assert (folder / "student.pt").stat().st_size > 1 << 20
    assert leases(machine) == []


def test_a_strangers_process_on_the_gpu_is_named_with_its_container(
    user: Cli, machine: Lab, code: Path
) -> None:
    (machine.files(201) / "root/hold.py").write_text(HOLD)
    log = machine.files(201) / "root/log"
    by_hand = f"setsid {PYTHON} /root/hold.py >/root/log 2>&1 </dev/null &"
    machine.pct("exec", 201, "--", "sh", "-c", by_hand)
    until(lambda: log.exists() and "holding" in log.read_text())
    try:
        if not nvidia_smi("compute-apps=pid"):
            pytest.skip("this machine's driver tells of no processes")
        refused = user("launch", "lab-200", "--", "true", cwd=code, code=4).stderr
        assert "error: lab-200 run " in refused
        found = re.search(r"GPU 0 by PID (\d+) \(.*hold\.py.* MiB\) in container 201", refused)
        assert found, refused
        assert b"hold.py" in Path(f"/proc/{found[1]}/cmdline").read_bytes()
        assert leases(machine) == []
    finally:
        machine.pct("exec", 201, "--", "kill", log.read_text().split()[-1])
        # A process that has gone may still be giving its memory back.
        until(lambda: not nvidia_smi("compute-apps=pid"))


def test_a_killed_trainer_is_named_by_status_and_diag(user: Cli, machine: Lab, code: Path) -> None:
    run_id, folder = launched(user, machine, code)
    machine.pct("exec", 200, "--", "kill", "-9", (folder / "trainer.pid").read_text())
    assert over(user, run_id)["signal"] == 9
    assert "failed: signal 9" in user("status", run_id, code=1).stdout
    assert named(user, run_id) == ["run.killed"]
