"""GPUs are claimed on the host. The lab has none: a stand-in for nvidia-smi names two."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from laptop import Cli

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

NVIDIA_SMI = """#!/bin/sh
case "$*" in
*query-gpu*) for n in 0 1; do echo "$n, GPU-$n$n$n$n, NVIDIA H200, 3, 143771, 0"; done;;
*compute-apps*) cat "$(dirname "$0")/processes" 2>/dev/null;;
esac
exit 0
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def processes(cli: Cli, lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """Two GPUs, seen by the host and both containers; the file lists the host's GPU processes."""
    folder = lab.layout.root / "gpus"
    folder.mkdir()
    executable(folder / "nvidia-smi", NVIDIA_SMI)
    python = executable(
        folder / "python3", f'#!/bin/sh\nPATH={folder}:$PATH exec /usr/bin/python3 "$@"\n'
    )
    known = yaml.safe_load(lab.inventory.read_text())
    known["hosts"]["lab"]["python"] = str(python)
    known["containers"]["lab-200"]["gpus"] = [0]
    known["containers"]["lab-201"]["gpus"] = [0, 1]
    cli.inventory = tmp_path / "gpus.yaml"
    cli.inventory.write_text(yaml.safe_dump(known))
    tools = [lab.files(ct) / "usr/local/bin/nvidia-smi" for ct in (200, 201)]
    for tool in tools:
        executable(tool, NVIDIA_SMI)
    yield folder / "processes"
    for path in (*tools, *folder.iterdir()):
        path.unlink()
    folder.rmdir()


def doctor(cli: Cli, container: str, code: int) -> str:
    return cli("doctor", container, "--no-trainer", code=code).stdout


def test_a_leased_gpu_is_refused_to_another_container_until_the_run_ends(
    cli: Cli, code: Path, processes: Path
) -> None:
    first = cli.json("launch", "lab-200", "--", "sleep", "60", cwd=code)["run_id"]
    refused = cli("launch", "lab-201", "--", "true", cwd=code, code=4)
    assert "error: lab-201 run " in refused.stderr
    words = rf"GPU 0 by \S+ for {first} in container 200"
    assert re.search(rf"GPUs are leased: {words}", refused.stderr)
    assert re.search(rf"warning leases   {words}", doctor(cli, "lab-201", 4))
    cli("stop", first, code=0)
    assert "ok      leases   nobody has its GPUs" in doctor(cli, "lab-201", 0)
    cli("launch", "lab-201", "--wait", "--", "true", cwd=code, code=0)


def test_the_lease_of_a_run_that_was_killed_is_taken_over_and_told(
    cli: Cli, lab: Lab, code: Path, processes: Path
) -> None:
    nap = f"4711.{os.getpid()}"
    first = cli.json("launch", "lab-200", "--", "sleep", nap, cwd=code)["run_id"]
    for words in (f"supervise .*/{first}$", f"^sleep {nap}$"):
        lab.host(["pkill", "-KILL", "-f", words])
    assert "ok      leases   nobody has its GPUs" in doctor(cli, "lab-201", 0)
    done = cli("launch", "lab-201", "--wait", "--", "true", cwd=code, code=0)
    took = rf"took over the lease of GPU 0 by \S+ for {first} in container 200"
    assert re.search(took, done.stderr), done.stderr
    assert "no process of its run is left" in done.stderr


def test_a_refused_launch_claims_nothing(cli: Cli, code: Path, processes: Path) -> None:
    cli("launch", "lab-200", "--", "sleep", "60", cwd=code, code=0)
    cli("launch", "lab-200", "--", "sleep", "60", cwd=code, code=4)
    cli("stop", "lab-200", code=0)
    cli("launch", "lab-201", "--wait", "--", "true", cwd=code, code=0)


def test_a_gpu_that_a_process_uses_is_refused_with_its_pid_and_container(
    cli: Cli, lab: Lab, code: Path, processes: Path
) -> None:
    pid = lab.init_pid(201)
    processes.write_text(f"{pid}, GPU-0000, 31190, python3\n")
    refused = cli("launch", "lab-200", "--", "true", cwd=code, code=4)
    assert "error: lab-200 run " in refused.stderr
    assert f"GPU 0 by PID {pid}" in refused.stderr
    assert "31190 MiB" in refused.stderr and "container 201" in refused.stderr
    assert f"warning leases   GPU 0 by PID {pid}" in doctor(cli, "lab-200", 4)
    cli("launch", "lab-200", "--force", "--wait", "--", "true", cwd=code, code=0)
    processes.write_text(f"{os.getpid()}, GPU-1111, 5, other\n")
    cli("launch", "lab-200", "--wait", "--", "true", cwd=code, code=0)


def test_a_gpu_that_is_not_there_is_refused(
    cli: Cli, code: Path, processes: Path, tmp_path: Path
) -> None:
    known = yaml.safe_load(cli.inventory.read_text())
    known["containers"]["lab-200"]["gpus"] = [7]
    cli.inventory.write_text(yaml.safe_dump(known))
    refused = cli("launch", "lab-200", "--", "true", cwd=code, code=4)
    assert "GPU 7 is not visible here (2 are)" in refused.stderr


def test_ps_shows_what_a_run_holds_by_the_host_or_by_its_container(
    cli: Cli, code: Path, processes: Path
) -> None:
    run_id = cli.json("launch", "lab-201", "--", "sleep", "60", cwd=code)["run_id"]
    # Of several containers the host is asked, of one that container itself.
    for words in (("lab-200", "lab-201"), ("lab-201",)):
        run = next(run for run in cli.json("ps", *words)["runs"] if run["run_id"] == run_id)
        assert [card["uuid"] for card in run["gpu_use"]] == ["GPU-0000", "GPU-1111"]
        lines = cli("ps", *words, code=0).stdout.splitlines()
        assert next(line for line in lines if run_id in line).endswith(" 2 0%")
    cli("stop", run_id, code=0)
    assert cli.json("ps", "lab-201")["runs"][0]["gpu_use"] == []
