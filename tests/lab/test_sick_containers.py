"""Containers stopped, rebooted, frozen, locked, full or late while something is asked of them."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_peer import seeds
from laptop import ROOT, Cli, new_name, own_lines

from orchestrator.lab import Container, Lab

pytestmark = pytest.mark.lab

MIB = 1 << 20
CT = "lab-301"


@pytest.fixture(scope="module")
def sick(make_lab: Any) -> Lab:
    """300 has torch and little room; the others are as they should be, before a test is at them."""
    lab: Lab = make_lab(
        containers=(
            Container(300, python="shared", workdir_size=1200 * MIB),
            Container(301),
            Container(302, running=False),
        )
    )
    lab.up()
    return lab


@pytest.fixture
def here(sick: Lab, tmp_path: Path) -> Iterator[Cli]:
    cli = Cli.at_home(tmp_path / "home", sick.inventory)
    yield cli
    Cli(cli.home, sick.inventory).end_runs()


def counting(code: Path, count: int, pause: float) -> None:
    script = f"for i in $(seq {count}); do echo line $i; sleep {pause}; done\n"
    (code / "start_training.sh").write_text(script)


def log_of(lab: Lab, run_id: str) -> Path:
    return lab.files(301) / f"workspace/dflashctl/runs/{run_id}/train.log"


def runs_named(cli: Cli, name: str) -> list[dict[str, Any]]:
    return [run for run in cli.json("ps", CT, "--all")["runs"] if run["name"] == name]


# Frozen


@pytest.mark.parametrize("seed", seeds(1, 10))
def test_frozen_at_any_moment_of_a_launch_and_thawed_it_starts_once(
    here: Cli, sick: Lab, code: Path, seed: int
) -> None:
    dice = random.Random(seed)
    (code / "blob").write_bytes(dice.randbytes(2_000_000))
    name = new_name("cold")
    process = here.start("launch", CT, "--name", name, "--", "sleep", "3333", cwd=code)
    time.sleep(dice.uniform(0.0, 1.5))
    sick.freeze(301)
    # Short enough to go unnoticed, or longer than a silent link is believed in.
    time.sleep(dice.choice([2.0, 11.0]))
    sick.thaw(301)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [run["run_id"] for run in runs_named(here, name)] == [out.splitlines()[0]]
    sleeping = sick.pct("exec", 301, "--", "sh", "-c", "ps axww | grep -c '[s]leep 3333' || true")
    assert int(sleeping) == 1


def test_frozen_for_good_is_told_by_its_host_and_nothing_is_called_failed(
    here: Cli, sick: Lab, code: Path
) -> None:
    """What only looks or ends is not kept waiting; what starts something waits for a thaw, and
    says so."""
    run_id = here.json("launch", CT, "--", "sleep", "3333", cwd=code)["run_id"]
    sick.freeze(301)
    try:
        for words in (("status", run_id), ("stop", run_id), ("doctor", CT), ("stop", CT)):
            said = here(*words, code=3).stderr
            assert "container 301 is frozen" in said and "lxc-unfreeze -n 301" in said, words
            assert "did not start within" not in said, words
        waiting = here.start("exec", CT, "--", "echo", "thawed")
        assert waiting.stderr is not None
        told = waiting.stderr.readline()
    finally:
        sick.thaw(301)
    assert "lab-301 is frozen: waiting up to" in told
    assert waiting.communicate(timeout=60)[0] == "thawed\n"
    assert here.json("status", run_id)["state"] in ("starting", "training")


@pytest.mark.slow
def test_a_tail_outlasts_a_freeze(here: Cli, sick: Lab, code: Path) -> None:
    counting(code, 100, 0.1)
    here("launch", CT, cwd=code, code=0)
    process = here.start("tail", "-n", "1000")
    assert process.stdout and process.stderr
    out = process.stdout.readline()
    sick.freeze(301)
    time.sleep(12)
    sick.thaw(301)
    out, err = out + process.stdout.read(), process.stderr.read()
    assert process.wait() == 0, err
    assert own_lines(out) == [f"line {i}" for i in range(1, 101)]
    assert "no answer for" in err and "reading on after" in err


# Stopped and rebooted


def test_stopped_under_a_run_it_is_not_running_and_then_failed_with_its_log(
    here: Cli, sick: Lab, code: Path
) -> None:
    counting(code, 1000, 0.1)
    run_id = here.json("launch", CT, cwd=code)["run_id"]
    while "line 3" not in log_of(sick, run_id).read_text():
        time.sleep(0.05)
    sick.stop(301)
    try:
        done = here("status", run_id, code=4)
        assert "the container is not running" in done.stderr and "pct start 301" in done.stderr
        gone = [one for one in here.json("ps")["unreachable"] if one["ct"] == 301]
        assert [(one["state"], one["remembered_run"]) for one in gone] == [("not running", run_id)]
        told = here("ps", "lab-301", code=4)
        assert "lab-301 " in told.stdout and "not running" in told.stdout
        assert f"last run that this laptop remembers there is {run_id}" in told.stderr
    finally:
        sick.start(301)
    found = here.json("status", run_id, code=1)
    assert (found["state"], found["rebooted"]) == ("failed", True)
    assert "rebooted under the run" in found["reason"]
    assert own_lines(here("tail", run_id, "-F", "-n", "1000", code=0).stdout)[:3] == [
        "line 1",
        "line 2",
        "line 3",
    ]
    # What a reboot ended is not in the way of the next.
    here("launch", CT, "--wait", "--", "true", cwd=code, code=0)


def test_rebooted_under_a_launch_there_is_one_run_that_failed_or_one_that_lives(
    here: Cli, sick: Lab, code: Path
) -> None:
    (code / "blob").write_bytes(random.Random(2).randbytes(3_000_000))
    name = new_name("reboot")
    process = here.start("launch", CT, "--name", name, "--", "sleep", "60", cwd=code)
    time.sleep(1.0)
    sick.reboot(301)
    _, err = process.communicate(timeout=90)
    found = runs_named(here, name)
    assert process.returncode == 0, err
    assert len(found) == 1 and found[0]["state"] in {"training", "starting", "failed"}


# Locked


@contextlib.contextmanager
def locked(lab: Lab, ct: int) -> Iterator[None]:
    """As a backup holds it: the line in the configuration, and the flock of ``pct``'s own file."""
    conf = lab.layout.pve_conf(ct)
    before = conf.read_text()
    conf.write_text(f"{before}lock: backup\n")
    lock = f"/run/lock/lxc/pve-config-{ct}.lock"
    hold = f"mkdir -p /run/lock/lxc; exec flock {lock} sh -c 'echo held; exec sleep 600'"
    argv = lab.host_argv(["sh", "-c", hold])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        try:
            yield
        finally:
            holder.kill()
            conf.write_text(before)


def test_a_lock_on_the_configuration_holds_up_nothing(here: Cli, sick: Lab, code: Path) -> None:
    with locked(sick, 301):
        run_id = here.json("launch", CT, "--", "sh", "-c", "echo on; sleep 60", cwd=code)["run_id"]
        assert here.json("status", run_id)["state"] in {"training", "starting"}
        report = json.loads(here("diag", run_id, "--json").stdout)
        assert [f for f in report["findings"] if f["severity"] != "info"] == []
        here("stop", run_id, code=0)


def test_a_stopped_container_that_is_locked_is_told_with_its_lock(
    here: Cli, sick: Lab, code: Path
) -> None:
    with locked(sick, 302):
        report = json.loads(here("diag", "--host", "lab", "--ct", "302", "--json").stdout)
    assert report["findings"][0]["code"] in {"ct.stopped", "ct.locked"}
    assert "backup" in json.dumps(report)


# A full disk

SAVE = """
import os, sys
from pathlib import Path
import torch
from trainer.checkpoint import CheckpointStore
from trainer.config import CheckpointConfig

run = Path(os.environ["DFLASH_RUN_DIR"])
filler = run.parents[2] / "filler"

def export(folder, master):
    folder.mkdir()
    (folder / "config.json").write_text("{}")

def state(value):
    tensors = {"weight": torch.full((1 << 20,), value)}
    return {"master": tensors, "average": tensors, "square": tensors, "skipped": 0}

store = CheckpointStore(run / "checkpoints", CheckpointConfig(), {"seed": 1}, export)
attempt = int(os.environ["DFLASH_ATTEMPT"])
print("attempt", attempt, "from", os.environ.get("DFLASH_RESUME", "the start"), flush=True)
if attempt == 1:
    store.save(1, state(1.0))
    print("step 1/2 | loss 8.0 | 15.1k tok/s", flush=True)
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            file.truncate(file.tell() - (6 << 20))
    store.save(2, state(2.0))
filler.unlink()
newest = store.newest()
print("whole:", newest.name, float(store.load(newest).state["master"]["weight"][0]), flush=True)
store.save(2, state(2.0))
print("saved", sorted(path.name for path in (run / "checkpoints").iterdir()), flush=True)
"""


@pytest.mark.slow
@pytest.mark.torch
def test_a_disk_that_fills_during_a_checkpoint_costs_that_checkpoint_and_no_other(
    here: Cli, sick: Lab, code: Path
) -> None:
    if not sick.spec.shared_python.is_dir():
        pytest.skip("there is no training interpreter: make lab-python")
    shutil.copytree(ROOT / "trainer", code / "trainer", ignore=shutil.ignore_patterns("__pyc*"))
    (code / "save.py").write_text(SAVE)
    known = yaml.safe_load(sick.inventory.read_text())
    words = ("--restarts", "1", "--wait", "--", known["containers"]["lab-300"]["python"], "save.py")
    done = here("launch", "lab-300", *words, cwd=code, code=0)
    run_id = done.stdout.splitlines()[0]
    log = here("tail", run_id, "-F", "-n", "1000", code=0).stdout
    resumed = f"/workspace/dflashctl/runs/{run_id}/checkpoints/step-00000001"
    assert "No space left on device" in log
    assert f"attempt 2 from {resumed}" in log
    assert "whole: step-00000001 1.0" in log
    kept = log.split("saved ")[1].splitlines()[0]
    assert "step-00000002" in kept and ".part" not in kept
    found = here.json("status", run_id)
    assert [one["exit_code"] for one in found["attempts"]] == [1, 0]
    assert found["lost_bytes"] == 0


# The clock

LATE = "/usr/local/bin/python-late"


@pytest.fixture
def skewed(sick: Lab, here: Cli, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[float]:
    """Everything that the agent starts in 301 has a clock that is off by so many seconds."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a clock of its own needs a C compiler")
    offset = float(request.param)
    local = sick.files(301) / "usr/local"
    source = Path(__file__).with_name("clock.c")
    made = tmp_path / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True)
    shutil.copy(made, local / "lib")
    python = local / "bin/python-late"
    python.write_text(
        f"#!/bin/sh\nexport LD_PRELOAD=/usr/local/lib/clock.so CLOCK_OFFSET={offset:.0f}\n"
        'exec /usr/bin/python3 "$@"\n'
    )
    python.chmod(0o755)
    sick.pct("exec", 301, "--", "sh", "-c", "tmux kill-server; true")
    known = yaml.safe_load(sick.inventory.read_text())
    known["containers"][CT]["python"] = LATE
    here.inventory = tmp_path / "skewed.yaml"
    here.inventory.write_text(yaml.safe_dump(known))
    yield offset
    sick.pct("exec", 301, "--", "sh", "-c", f"tmux kill-server; rm {LATE}")


@pytest.mark.parametrize("skewed", [3600, -3600], indirect=True)
def test_a_clock_that_is_an_hour_off_confuses_nobody(
    here: Cli, sick: Lab, code: Path, skewed: float
) -> None:
    words = ("launch", CT, "--", "sh", "-c", "seq 50; sleep 9; seq 51 55; sleep 60")
    started = here(*words, cwd=code, code=0)
    run_id = started.stdout.splitlines()[0]
    assert "preflight warns of clock" in started.stderr
    while "55" not in log_of(sick, run_id).read_text():
        time.sleep(0.1)
    recent = own_lines(here("tail", run_id, "--since", "8s", "-F", code=0).stdout)
    assert "55" in recent and "50" not in recent
    found = here.json("status", run_id)
    assert abs(found["created"] - time.time() - skewed) < 60, "the clock was not skewed"
    assert found["state"] == "training"
    assert found["idle_s"] < 30 and found["heartbeat_s"] < 30
    doctor = here("doctor", CT, "--no-trainer").stdout
    assert "ahead of" in doctor if skewed > 0 else "behind" in doctor
    refused = here(*words, cwd=code, code=4)
    assert run_id in refused.stderr
    assert run_id in [
        run["run_id"] for run in here.json("ps")["runs"] if run["state"] == "training"
    ]
    stopped = here("stop", run_id, "--grace", "2s", code=0)
    assert f"{run_id} stopped" in stopped.stdout
    ended = here("tail", run_id, "-n", "1000", code=0)
    assert len(own_lines(ended.stdout)) == 55
    # How long it took is told by one clock.
    assert "after -" not in ended.stderr and "h" not in ended.stderr.split("after")[-1].split()[0]


@pytest.mark.parametrize(
    ("options", "check", "said", "remedy"),
    [
        ("size=64k,mode=1777", "tmp", "/tmp has only 0 MB free", "--env TMPDIR="),
        ("noexec,mode=1777", "tmp", "/tmp is mounted noexec", "remount,exec /tmp"),
        ("ro,mode=1777", "tmux", "its socket in /tmp: Read-only file system", "/proc/mounts"),
        ("nr_inodes=2,mode=1777", "tmux", "its socket in /tmp: No space left", "df -i /tmp"),
    ],
)
def test_a_tmp_that_will_not_do_is_named(
    here: Cli, sick: Lab, options: str, check: str, said: str, remedy: str
) -> None:
    """What is compiled there is warned of; without tmux's socket nothing is started."""

    def inside(line: str) -> None:
        sick.pct("exec", 301, "--", "sh", "-c", line)

    inside("tmux kill-server; true")
    inside(f"mount -t tmpfs -o {options} t /tmp; head -c 65536 /dev/zero > /tmp/fill; true")
    try:
        refused = check == "tmux"
        looked = here.json("doctor", CT, "--no-trainer", code=4 if refused else 0)
        (bad,) = [c for c in looked["checks"] if c["name"] == check and not c["ok"]]
        assert said in bad["text"] and remedy in bad["next"]
        words = ("launch", CT, "--no-push", "--wait", "--", "true")
        done = here(*words, code=4 if refused else 0)
        assert (said if refused else "preflight warns of tmp") in done.stderr
    finally:
        inside("tmux kill-server; umount -l /tmp")
