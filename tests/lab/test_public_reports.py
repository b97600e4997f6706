"""What users of other tools have reported of them, replayed here. Each names the public report.

Numbers of issues: paramiko, kubernetes, dstack, skypilot, stern (GitHub), community.proxmox
(ansible-collections), lxd (canonical).
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from laptop import Cli, own_lines

from orchestrator.lab import Lab
from orchestrator.lab.proxy import Proxy

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

CT = "lab-201"
MIB = 1 << 20


def test_paramiko_1778_both_streams_beyond_their_windows(cli: Cli) -> None:
    """More than 2 MiB on each stream, and reading one of them alone, made a deadlock."""
    flood = f"head -c {10 * MIB} /dev/zero & head -c {10 * MIB} /dev/zero >&2; wait; exit 5"
    done = cli("exec", CT, "--", "sh", "-c", flood, code=5)
    assert len(done.stdout) == len(done.stderr) == 10 * MIB


def test_paramiko_2463_the_link_goes_while_output_is_read(
    cli: Cli, proxied: Proxy, code: Path
) -> None:
    """Reading on after the link had gone waited for ever."""
    (code / "start_training.sh").write_text("echo on; sleep 600\n")
    cli("launch", CT, cwd=code, code=0)
    process = cli.start("exec", CT, "--", "sh", "-c", "echo on; sleep 600")
    assert process.stdout and process.stdout.readline() == "on\n"
    proxied.black_hole()
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "no answer for" in err and time.monotonic() - began < 30


def test_community_proxmox_120_one_large_file_into_a_container(
    cli: Cli, lab: Lab, code: Path
) -> None:
    """It went through `cat` in pieces of the terminal's line: it must arrive whole, by one channel.

    How fast is measured in benchmarks/controller.
    """
    blob = random.Random(120).randbytes(40 * MIB)
    (code / "dump.sql").write_bytes(blob)
    answer = cli.json("push", CT, cwd=code)
    there = lab.files(201) / answer["path"].lstrip("/") / "dump.sql"
    assert there.read_bytes() == blob


def test_kubernetes_115701_the_log_is_rotated_under_the_reader(
    cli: Cli, lab: Lab, code: Path
) -> None:
    """Following ended in silence at the first rotation."""
    (code / "start_training.sh").write_text(
        "for i in $(seq 4000); do echo line $i; [ $((i % 400)) -gt 0 ] || sleep 0.2; done\n"
    )
    run_id = cli.json("launch", CT, cwd=code)["run_id"]
    process = cli.start("tail", run_id, "-n", "100000")
    folder = f"/workspace/dflashctl/runs/{run_id}"
    # As logrotate does it, by rename, under supervisor and reader.
    move = f"cd {folder} && mv train.log train.log.1"
    time.sleep(1.2)
    lab.pct("exec", 201, "--", "sh", "-c", move)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert own_lines(out) == [f"line {i}" for i in range(1, 4001)]


def test_dstack_4285_the_last_lines_of_a_run_that_is_stopped(cli: Cli, code: Path) -> None:
    """What was printed between the request and the end was missing."""
    (code / "start_training.sh").write_text(
        "trap 'for i in 1 2 3 4 5; do echo last $i; sleep 0.1; done; exit 130' INT\n"
        "echo on; while :; do sleep 0.1; done\n"
    )
    run_id = cli.json("launch", CT, cwd=code)["run_id"]
    process = cli.start("tail", run_id, "-n", "1000")
    assert process.stdout and process.stdout.readline() == "on\n"
    stopped = cli("stop", run_id, code=0)
    out, err = process.communicate(timeout=60)
    assert own_lines(out) == [f"last {i}" for i in range(1, 6)]
    assert "last 5" in stopped.stdout
    assert f"{run_id} stopped" in err


def test_dstack_2346_a_host_that_is_slow_to_connect_is_no_failure(
    cli: Cli, proxied: Proxy, code: Path
) -> None:
    """A run was called failed because the connection took longer than expected."""
    proxied.set(rtt_ms=500)
    done = cli("launch", CT, "--wait", "--", "true", cwd=code, code=0)
    assert "finished" in done.stderr


def test_skypilot_8096_a_module_that_was_deleted_here_does_not_import_there(
    cli: Cli, code: Path
) -> None:
    """The copy on the cluster kept what was gone from the folder."""
    package = code / "model"
    package.mkdir()
    for name in ("__init__", "old"):
        (package / f"{name}.py").write_text("")
    (code / "start_training.sh").write_text("python3 -c 'import model.old'\n")
    cli("launch", CT, "--wait", cwd=code, code=0)
    (package / "old.py").unlink()
    cli("launch", CT, "--wait", cwd=code, code=1)
    assert "No module named 'model.old'" in cli("tail", "-F", "-n", "100", code=0).stdout


def test_skypilot_2303_a_branch_with_older_times_and_equal_sizes_is_seen(
    cli: Cli, lab: Lab, code: Path
) -> None:
    """The copy was left alone because its file was newer and as long."""

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", code, *who, *words], check=True, capture_output=True)

    script = code / "start_training.sh"
    git("init", "-q", "-b", "main")
    script.write_text("echo main\n")
    git("add", ".")
    git("commit", "-qm", "one")
    git("checkout", "-qb", "twin")
    script.write_text("echo twin\n")
    git("commit", "-qam", "two")
    said = []
    for branch in ("twin", "main", "twin"):
        git("checkout", "-q", branch)
        # As an archive or a restored disk has it: long ago, and the same on both branches.
        os.utime(script, (1_000_000_000, 1_000_000_000))
        done = cli("launch", CT, "--follow", cwd=code, code=0)
        said += own_lines(done.stdout)[-1:]
    assert said == ["twin", "main", "twin"]


NAP = f"9755.{os.getpid()}"
"""Nobody else's on this machine, all of whose processes a lab's host sees."""
NVIDIA_SMI = """#!/bin/sh
case "$*" in
*query-gpu*) echo "0, GPU-9755, NVIDIA H200, 3, 143771, 0";;
*compute-apps*) for pid in $(pgrep -fx 'sleep NAP'); do echo "$pid, GPU-9755, 512, sleep"; done;;
esac
""".replace("NAP", NAP)


@pytest.fixture
def shared_gpu(cli: Cli, lab: Lab, tmp_path: Path) -> Iterator[None]:
    """One GPU in both containers. The lab has none: nvidia-smi is a stand-in, its PIDs are real."""
    folder = lab.layout.root / "gpu"
    folder.mkdir()
    tools = [folder / "nvidia-smi"]
    tools += [lab.files(ct) / "usr/local/bin/nvidia-smi" for ct in (200, 201)]
    for tool in tools:
        tool.write_text(NVIDIA_SMI)
        tool.chmod(0o755)
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\nPATH={folder}:$PATH exec /usr/bin/python3 "$@"\n')
    python.chmod(0o755)
    known = yaml.safe_load(cli.inventory.read_text())
    known["hosts"]["lab"]["python"] = str(python)
    for name in ("lab-200", "lab-201"):
        known["containers"][name]["gpus"] = [0]
    cli.inventory = tmp_path / "gpu.yaml"
    cli.inventory.write_text(yaml.safe_dump(known))
    yield
    for tool in (*tools, python):
        tool.unlink()
    folder.rmdir()


@pytest.mark.usefixtures("shared_gpu")
def test_lxd_9755_another_container_is_using_the_gpu(cli: Cli, lab: Lab, code: Path) -> None:
    """Both containers saw the card, neither whose processes were on it."""
    argv = lab.host_argv(["pct", "exec", "200", "--", "sleep", NAP])
    with subprocess.Popen(argv) as other:
        while not (pid := lab.host(["pgrep", "-fx", f"sleep {NAP}"]).stdout.split()):
            time.sleep(0.05)
        refused = cli("launch", CT, "--", "true", cwd=code, code=4)
        lab.host(["kill", pid[0]])
        other.wait(30)
    assert f"GPU 0 by PID {pid[0]}" in refused.stderr
    assert "in container 200" in refused.stderr and "lab-201" in refused.stderr


@pytest.mark.usefixtures("shared_gpu")
def test_a_launch_that_is_asked_for_again_is_not_refused_for_its_own_process(
    cli: Cli, lab: Lab, proxied: Proxy, code: Path, tmp_path: Path
) -> None:
    """The same kind: by the second asking the run itself is at work on its GPU."""
    known = yaml.safe_load((tmp_path / "gpu.yaml").read_text())
    known["hosts"]["lab"] |= {"port": proxied.port, "ssh_config": str(tmp_path / "ssh_config")}
    cli.inventory.write_text(yaml.safe_dump(known))
    # The answer is on its way for 0.3 s: time to see the process and cut the link.
    proxied.set(rtt_ms=600)
    process = cli.start("launch", CT, "--json", "--", "sleep", NAP, cwd=code)
    until = time.monotonic() + 30
    while not lab.host(["pgrep", "-fx", f"sleep {NAP}"]).stdout and time.monotonic() < until:
        time.sleep(0.002)
    proxied.cut()
    proxied.set(rtt_ms=0)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "trying again" in err, err
    assert len(lab.host(["pgrep", "-fx", f"sleep {NAP}"]).stdout.split()) == 1, out


def test_stern_229_after_a_lost_link_no_line_is_shown_again(
    cli: Cli, proxied: Proxy, code: Path
) -> None:
    """Every retry began with the first line again."""
    (code / "start_training.sh").write_text(
        "for i in $(seq 30); do echo line $i; sleep 0.1; done\n"
    )
    run_id = cli.json("launch", CT, cwd=code)["run_id"]
    process = cli.start("tail", run_id)
    for _ in range(2):
        time.sleep(1.2)
        proxied.cut()
    out, err = process.communicate(timeout=60)
    lines = own_lines(out)
    assert "trying again" in err
    assert len(lines) == len(set(lines)) and lines[-1] == "line 30"
    first = int(lines[0].split()[1])
    assert lines == [f"line {i}" for i in range(first, 31)]
