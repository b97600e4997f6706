"""Probes, preflight and leases: nothing that is ill keeps the rest from being seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import host
from orchestrator.agent.host import configuration
from orchestrator.agent.lease import STARTING_S
from orchestrator.agent.looking import Limit
from orchestrator.agent.probe import CHECK, Scene, compile_caches, looks

SCENE = Scene(None, "python3", 200, "/etc/pve", Limit(1.0))
FAKE_FREE = ("now", "date", "boot_id", "df", "mounts", "ps", "loadavg", "ulimits", "which", "env")


@pytest.mark.parametrize("side", ["container", "host"])
@pytest.mark.slow
def test_every_probe_answers_and_none_fails_the_others(agent: Any, side: str) -> None:
    head, frames = agent.finish(agent.send("probe", side=side, ct=200))
    probes = head["result"]["probes"]
    assert set(probes) == set(looks(side, SCENE))
    assert [part["probe"] for part, _ in frames].sort() == list(probes).sort()
    for name, found in probes.items():
        assert found["ok"] or found["error"], name
    if side == "container":
        assert all(probes[name]["ok"] for name in FAKE_FREE)


def test_a_probe_that_hangs_is_given_up_alone(agents: Any, tmp_path: Path) -> None:
    """A driver that does not answer: nvidia-smi hangs and must not hold up df."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\ntrap '' TERM\nsleep 600\n")
    tool.chmod(0o755)
    agent = agents(environment={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    names = ["nvidia_smi", "nvidia_smi_L", "df"]
    probes = agent.call("probe", names=names, timeout_s=0.3)["probes"]
    assert probes["nvidia_smi"]["error"] == "timed out after 0.3 s"
    assert probes["df"]["text"].startswith("Filesystem")


def test_a_tool_that_is_not_there_is_named(agent: Any) -> None:
    if Path("/usr/bin/nvidia-smi").exists():
        pytest.skip("there is a driver")
    probes = agent.call("probe", names=["nvidia_smi"])["probes"]
    assert probes["nvidia_smi"]["text"] == "nvidia-smi: not found"


def test_unknown_probes_are_refused(agent: Any) -> None:
    error = agent.error(agent.send("probe", names=["df", "secrets"]))
    assert "secrets" in error["message"]
    error = agent.error(agent.send("probe", without=["secrets"]))
    assert "secrets" in error["message"]


def test_all_probes_but_the_named_are_asked(agent: Any) -> None:
    """What costs a live run something can be left out; a new probe is asked for all the same."""
    most = sorted({*looks("container", SCENE)} - {"loadavg", "nproc"})
    assert set(agent.call("probe", without=most)["probes"]) == {"loadavg", "nproc"}


def test_probes_of_a_run_see_its_command(runs: Any) -> None:
    code = "import time; print('ready', flush=True); time.sleep(60)"
    environment = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hunter2-token"}
    run = runs.python(code, env=environment)
    runs.says(run, "ready")
    names = ["env", "boot_id", "exit_record", "tmux", "ps", "last_log_write", "ulimit_l"]
    probes = runs.agent.call("probe", names=names, run_id=run["run_id"])["probes"]
    assert "NCCL_DEBUG=INFO" in probes["env"]["text"]
    assert "hunter2" not in json.dumps(probes)
    assert probes["boot_id"]["value"]["at_start"] == probes["boot_id"]["value"]["now"]
    assert probes["exit_record"]["value"] is None
    assert "pane: ready" in probes["tmux"]["text"]
    assert "time.sleep(60)" in probes["ps"]["text"]


def test_preflight_measures_the_interpreter_that_was_named(agent: Any) -> None:
    answer = agent.call("preflight", python=sys.executable, modules=["pytest", "no_such_module"])
    checks = answer["checks"]
    assert checks["python"]["value"]["path"] == sys.executable
    assert not checks["modules"]["ok"]
    assert checks["modules"]["value"]["missing"] == ["no_such_module"]
    assert checks["modules"]["value"]["found"]["pytest"] == pytest.__version__
    assert checks["disk"]["value"]["free"] > 0
    assert set(checks) == {
        *("python", "modules", "tmux", "disk", "shm", "limits", "memory", "locale", "clock"),
        *("gpu", "cpu", "workdir", "runs", "tmp"),
    }


def test_preflight_of_an_interpreter_that_is_not_there(agent: Any) -> None:
    checks = agent.call("preflight", python="/no/such/python")["checks"]
    assert not checks["python"]["ok"]
    assert checks["python"]["error"] == "/no/such/python: not found"
    assert checks["disk"]["ok"] in (True, False)


def test_preflight_names_a_gpu_that_is_not_visible(agent: Any) -> None:
    checks = agent.call("preflight", gpus=["GPU-does-not-exist"])["checks"]
    assert not checks["gpu"]["ok"]


def test_preflight_tells_of_runs_that_live_here(runs: Any) -> None:
    run = runs.start("sleep", "60")
    check = runs.agent.call("preflight")["checks"]["runs"]
    assert (check["ok"], check["value"]) == (False, {"live": [run["run_id"]]})


def test_a_locale_without_utf8_is_seen(agents: Any) -> None:
    agent = agents(environment={"PATH": os.environ["PATH"], "LANG": "C"})
    check = agent.call("preflight")["checks"]["locale"]
    assert (check["ok"], check["value"]) == (False, {"effective": "C"})


# Stacks


def test_stacks_of_all_of_a_runs_processes(runs: Any) -> None:
    code = """
import subprocess, sys
child = subprocess.Popen(["sleep", "60"])
print("ready", flush=True)
child.wait()
"""
    run = runs.python(code)
    runs.says(run, "ready")
    answer = runs.agent.call("stacks", run_id=run["run_id"], python=sys.executable)
    assert len(answer["stacks"]) == 2
    assert all("thread" in one["text"] for one in answer["stacks"])
    assert Path(answer["path"]).read_text().count("== ") == 2


# The host


@pytest.fixture
def pve(tmp_path: Path) -> Path:
    folder = tmp_path / "pve" / "lxc"
    folder.mkdir(parents=True)
    (folder / "900.conf").write_text(
        "arch: amd64\nhostname: trainer\nlock: backup\ndev0: /dev/nvidia0\n"
        "lxc.mount.entry: /a b\nlxc.mount.entry: /c d\n#note\n[snapshot]\nhostname: old\n"
    )
    (folder / "901.conf").write_text("hostname: other\n")
    (folder / "notes.txt").write_text("")
    return folder.parent


def test_containers_as_the_host_has_them(agent: Any, pve: Path) -> None:
    found = agent.call("ct.list", pve_root=str(pve))["containers"]
    first, second = found
    assert (first["ct"], first["name"], first["lock"]) == (900, "trainer", "backup")
    assert (first["status"], first["frozen"]) == ("stopped", False)
    assert second["ct"] == 901


def test_keys_that_repeat_are_kept_and_snapshots_are_not(pve: Path) -> None:
    config = configuration(str(pve), 900)
    assert config["lxc.mount.entry"] == ["/a b", "/c d"]
    assert config["hostname"] == "trainer"


def test_host_probes_read_like_pct(agent: Any, pve: Path) -> None:
    names = ["pct_list", "pct_status", "pct_config"]
    fields = {"side": "host", "ct": 900, "pve_root": str(pve), "names": names}
    probes = agent.call("probe", **fields)["probes"]
    assert probes["pct_status"]["text"] == "status: stopped"
    assert probes["pct_list"]["text"].splitlines()[1].split() == [
        *("900", "stopped", "backup", "trainer")
    ]
    assert probes["pct_config"]["text"].splitlines()[-1] == "lxc.mount.entry: /c d"
    missing = agent.call("probe", **{**fields, "ct": 999})["probes"]
    assert missing["pct_status"]["text"].endswith("/lxc/999.conf' does not exist")


def test_each_changing_action_leaves_a_line(agent: Any, workdir: Path) -> None:
    for result in ("ok", "refused"):
        agent.call("audit", who="ann@laptop", action="launch", result=result, ct=200)
    path = workdir / "dflashctl/audit.log"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["who"], line["result"], line["ct"]) for line in lines] == [
        ("ann@laptop", "ok", 200),
        ("ann@laptop", "refused", 200),
    ]
    assert path.stat().st_mode & 0o777 == 0o600


# Leases


def acquire(agent: Any, run_id: str, *gpus: str, **fields: Any) -> int:
    owner = {"user": run_id}
    return int(agent.send("lease.acquire", gpus=gpus, run_id=run_id, ct=200, owner=owner, **fields))


def age(workdir: Path, gpu: str) -> None:
    path = workdir / "dflashctl/leases" / f"{gpu}.json"
    record = json.loads(path.read_text())
    record["created"] -= STARTING_S + 1
    path.write_text(json.dumps(record))


def test_a_gpu_is_leased_once_and_all_or_none(agent: Any) -> None:
    agent.result(acquire(agent, "r-1", "GPU-a", "GPU-b"))
    error = agent.error(acquire(agent, "r-2", "GPU-b", "GPU-c"))
    assert error["kind"] == "lease.held"
    held = error["detail"]["leases"][0]
    assert (held["gpu"], held["run_id"], held["owner"]) == ("GPU-b", "r-1", {"user": "r-1"})
    assert held["ct"] == 200
    assert agent.result(acquire(agent, "r-2", "GPU-c"))["taken_over"] == []
    assert agent.call("lease.release", run_id="r-1")["released"] == ["GPU-a", "GPU-b"]
    assert agent.result(acquire(agent, "r-3", "GPU-a"))["leases"][0]["run_id"] == "r-3"


def test_asking_again_for_ones_own_is_no_conflict(agent: Any) -> None:
    agent.result(acquire(agent, "r-1", "GPU-a"))
    assert agent.result(acquire(agent, "r-1", "GPU-a"))["taken_over"] == []


def test_two_at_once_get_one_lease(agents: Any) -> None:
    peers = [agents() for _ in range(4)]
    numbers = [acquire(peer, f"r-{index}", "GPU-a") for index, peer in enumerate(peers)]
    answers = [peer.finish(number)[0] for peer, number in zip(peers, numbers, strict=True)]
    assert [answer["ok"] for answer in answers].count(True) == 1


def test_a_lease_without_its_run_is_taken_over(agent: Any, workdir: Path) -> None:
    agent.result(acquire(agent, "dead-run", "GPU-a"))
    age(workdir, "GPU-a")
    assert agent.call("lease.list")["leases"][0]["stale"]
    answer = agent.result(acquire(agent, "r-2", "GPU-a"))
    assert [one["run_id"] for one in answer["taken_over"]] == ["dead-run"]


def test_a_lease_of_a_living_run_is_never_stale(runs: Any) -> None:
    """Also between two attempts, when only its supervisor lives."""
    restart = {"max": 3, "backoff_s": 60, "backoff_max_s": 60}
    living = runs.start("sleep", "60")
    waiting = runs.start("false", restart=restart)
    runs.says(waiting, "begins in 60 s")
    agent = runs.agent
    for gpu, run in (("GPU-a", living), ("GPU-b", waiting)):
        agent.result(acquire(agent, run["run_id"], gpu))
        age(runs.workdir, gpu)
        assert agent.error(acquire(agent, "r-2", gpu))["kind"] == "lease.held"
    for run in (living, waiting):
        agent.call("run.stop", run_id=run["run_id"], grace_s=1)
    until = time.monotonic() + 20
    while not all(one["stale"] for one in agent.call("lease.list")["leases"]):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_leases_from_before_a_reboot_are_stale_at_once(agent: Any, workdir: Path) -> None:
    agent.result(acquire(agent, "r-1", "GPU-a"))
    path = workdir / "dflashctl/leases/GPU-a.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))
    assert agent.call("lease.list")["leases"][0]["why"] == "the host was rebooted since"


@pytest.mark.parametrize("gpu", ["../../etc/passwd", "", "a/b", "GPU a"])
def test_a_lease_names_a_gpu_not_a_path(agent: Any, gpu: str) -> None:
    assert agent.error(acquire(agent, "r-1", gpu))["kind"] == "request.invalid"


INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 212
GPU UUID: \t GPU-1f2e
Bus Type: \t PCIe
Bus Location: \t 0000:c1:00.0
Device Minor: \t 3
GPU Firmware: \t 580.65.06
"""


def test_cards_are_listed_by_minor_number_and_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's own text, recorded: a kernel line about a card names only its address."""
    (tmp_path / "0000:c1:00.0").mkdir()
    (tmp_path / "0000:c1:00.0" / "information").write_text(INFORMATION)
    monkeypatch.setattr(host, "_CARDS", str(tmp_path))

    assert host._cards() == "minor 3, GPU-1f2e, 0000:c1:00.0, NVIDIA H200"
    monkeypatch.setattr(host, "_CARDS", str(tmp_path / "none"))
    assert host._cards() == ""


def test_packages_that_do_not_fit_are_named_in_pips_words(tmp_path: Path) -> None:
    """Against pip itself, which takes four times as long."""
    site = tmp_path / "site"
    for name, version, needs in (
        ("alpha", "1.0", "beta>=2; python_version>'3'"),
        ("beta", "1.5", "gamma"),
        ("delta", "1.0", "nothing-here; extra=='x'"),
    ):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: {needs}\n"
        (info / "METADATA").write_text(text)
        (info / "RECORD").write_text("")
    code = f"import sys; sys.path[:] = [{str(site)!r}] + sys.path\n" + CHECK
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "alpha 1.0 has requirement beta>=2, but you have beta 1.5." in said.stdout
    assert "beta 1.5 requires gamma, which is not installed." in said.stdout
    assert "delta" not in said.stdout


def test_compile_caches_are_found_where_the_run_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "inductor" / "ab").mkdir(parents=True)
    (tmp_path / "inductor" / "ab" / "k.so").write_bytes(b"x" * 2_000_000)
    variables = {"TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/inductor", "HOME": str(tmp_path)}

    inductor, triton = compile_caches(variables).splitlines()

    assert inductor.startswith(f"inductor: {tmp_path}/inductor, 1 files, 2.0 MB, newest of ")
    assert triton == f"triton: {tmp_path}/.triton/cache, nothing in it"
