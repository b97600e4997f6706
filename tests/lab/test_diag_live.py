"""``diag`` on live runs of a lab whose containers are really ill."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from laptop import ROOT, Cli

from orchestrator.lab import Container, Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]

MIB = 1024 * 1024
STEPS = 'for i in 1 2 3 4 5 6 7 8; do echo "step $i/400 | loss 8.$i | 15.${i}k tok/s"; done\n'


@pytest.fixture(scope="module")
def sick(make_lab: Any) -> Lab:
    """Container 300 has little of everything, 301 no usable Python, 302 torch; 303 is sound."""
    lab: Lab = make_lab(
        containers=(
            Container(300, memory=3072 * MIB, shm=64 * MIB, workdir_size=1300 * MIB),
            Container(301, python="minimal"),
            Container(302, python="shared"),
            Container(303),
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
        if run["ct"] != 301 and run["state"] not in ("finished", "failed", "stopped"):
            here("stop", run["run_id"], "--grace", "1s")


def launch(cli: Cli, code: Path, script: str, ct: int = 300, **files: str) -> str:
    (code / "start_training.sh").write_text(script)
    for name, text in files.items():
        (code / f"{name}.py").write_text(text)
    started = cli.json("launch", f"lab-{ct}", "--force", cwd=code)
    return str(started["run_id"])


def over(cli: Cli, run_id: str, seconds: float = 15) -> dict[str, Any]:
    for _ in range(int(seconds * 10)):
        found: dict[str, Any] = json.loads(cli("status", run_id, "--json").stdout)
        if found["state"] in ("finished", "failed", "stopped"):
            return found
        time.sleep(0.1)
    raise AssertionError(f"still {found['state']}")


def speaks(sick: Lab, run_id: str, words: str, ct: int = 300) -> None:
    log = sick.files(ct) / f"workspace/dflashctl/runs/{run_id}/train.log"
    for _ in range(100):
        if log.exists() and words in log.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{words!r} never came")


def findings(cli: Cli, run_id: str) -> list[dict[str, Any]]:
    report = json.loads(cli("diag", run_id, "--json").stdout)
    print(json.dumps(report, indent=1))
    return [f for f in report["findings"] if f["severity"] != "info"]


def named(cli: Cli, run_id: str) -> list[str]:
    return [f["code"] for f in findings(cli, run_id)]


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


def test_a_kill_without_a_memory_limit_is_not_the_memorys(here: Cli, code: Path) -> None:
    run_id = launch(here, code, STEPS + "kill -9 $$\n", ct=303)
    over(here, run_id)

    assert named(here, run_id) == ["run.killed"]


def test_a_run_that_a_person_stopped_is_no_fault(here: Cli, sick: Lab, code: Path) -> None:
    run_id = launch(here, code, STEPS + "sleep 60\n", ct=303)
    speaks(sick, run_id, "step 8/", ct=303)
    here("stop", run_id, "--grace", "1s")

    done = here("diag", run_id)

    assert done.returncode == 0
    assert "run.interrupted: stopped by " in done.stdout
    assert "stopped by   " in here("status", run_id).stdout


def test_lines_that_end_in_crlf(here: Cli, code: Path) -> None:
    script = "#!/bin/bash\r\nset -euo pipefail\r\ncd /workspace\r\npython3 train.py\r\n"
    run_id = launch(here, code, script, ct=303)
    over(here, run_id)

    assert named(here, run_id) == ["run.not_started"]


def test_an_interpreter_that_the_container_lacks(sick: Lab, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "inventory.yaml"
    words = yaml.safe_load(Path(sick.inventory).read_text())
    words["containers"]["lab-303"]["python"] = "/opt/venv/bin/python"
    path.write_text(yaml.safe_dump(words))
    told = Cli(tmp_path / "elsewhere", path)("diag", "lab-303").stdout

    assert "an unknown run on lab/303" in told
    assert "the container has no /opt/venv/bin/python" in told
    assert "`python:` of lab-303" in told
    assert not re.search(r"pve-cluster|not_started", told)


def test_a_refused_key_names_the_host_and_its_port(sick: Lab, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    key, path = tmp_path / "other_key", tmp_path / "inventory.yaml"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    words = yaml.safe_load(Path(sick.inventory).read_text())
    host = words["hosts"]["lab"]
    host["identity_file"] = str(key)
    path.write_text(yaml.safe_dump(words))
    told = Cli(tmp_path / "elsewhere", path)("diag", "lab-303", code=3).stdout

    assert "ssh.auth" in told
    assert f"ssh -v -p {host['port']} " in told
    assert "HOST" not in told


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
    # It answers before it has ended.
    gone = "tmux kill-server; while pgrep tmux >/dev/null; do sleep 0.05; done"
    sick.pct("exec", 300, "--", "sh", "-c", gone)

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


# Two drafters without a lock, on real torch. One is held where it stands in the trace of its lazy
# backward compile (the case that 2.13 does not hide), so that the other's warm call meets it.
RACE = """
import sys, threading
import torch
from torch.fx import Tracer

if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14):
    sys.exit(77)  # the flag is per thread from there on
torch.set_num_threads(1)
inside, leave = threading.Event(), threading.Event()
original = Tracer.create_args_for_root


def held(tracer, *args, **kwargs):
    if threading.current_thread().name == "drafter-0" and armed.is_set():
        inside.set()
        leave.wait(120)
    return original(tracer, *args, **kwargs)


Tracer.create_args_for_root = held
armed = threading.Event()


def forward(x, w):
    return torch.addmm(x, x, w)


def inputs(size):
    return [torch.randn(size, size, requires_grad=True) for _ in range(2)]


first = torch.compile(lambda x, w: forward(x, w), backend="inductor")
second = torch.compile(lambda x, w: forward(x, w), backend="inductor")
second(*inputs(8)).sum().backward()
print("step 1/400 | loss 9.0 | 20.0k tok/s", flush=True)


def compile_backward():
    torch._functorch.config.force_non_lazy_backward_lowering = False
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.force_disable_caches = True
    out = first(*inputs(21))
    armed.set()
    out.sum().backward()


def warm_call():
    second(*inputs(8))


one = threading.Thread(target=compile_backward, name="drafter-0")
one.start()
assert inside.wait(120)
two = threading.Thread(target=warm_call, name="drafter-1")
two.start()
two.join()
leave.set()
one.join()
print("a drafter died, stopping", flush=True)
sys.exit(1)
"""
TORCH = "/opt/dflash/python/bin/python"


@pytest.mark.torch
def test_a_compile_race_and_the_thread_that_made_it(here: Cli, sick: Lab, code: Path) -> None:
    if not sick.spec.shared_python.is_dir():
        pytest.skip("no training interpreter on this machine")
    (code / "trainer").mkdir()
    for name in ("__init__", "__main__", "traced", "compile_lock", "torch_internals", "errors"):
        shutil.copy(ROOT / "trainer" / f"{name}.py", code / "trainer")
    shutil.copy(ROOT / "trainer" / "telemetry.py", code / "trainer")
    script = f"export OMP_NUM_THREADS=1\nexec {TORCH} -m trainer trace race.py\n"
    run_id = launch(here, code, script, ct=302, race=RACE)
    if over(here, run_id, 240)["exit_code"] == 77:
        pytest.skip("this torch keeps the flag per thread")

    root = findings(here, run_id)[0]

    assert root["code"] == "compile.fx_race"
    assert "last set by thread drafter-0 at" in root["title"]
    assert "compile_backward" in root["title"]


HANG = (
    "import threading, time\n"
    "for i in range(9):\n    print(f'step {i}/400 | loss 8.{i} | 15.1k tok/s', flush=True)\n"
    "lock = threading.Lock()\nlock.acquire()\n"
    "def drafter():\n    lock.acquire()\n"
    "def reader():\n    open_pipe()\n"
    "def open_pipe():\n    import os; r, w = os.pipe(); os.read(r, 1)\n"
    "for n in range(3):\n    threading.Thread(target=drafter, name=f'drafter-{n}').start()\n"
    "threading.Thread(target=reader, name='drafter-3').start()\n"
)
NO_PTRACE = "2\nblacklist\n[all]\nptrace errno 1\nprocess_vm_readv errno 1\n"


def install_py_spy(lab: Lab, into: str) -> None:
    spy = Path(sys.executable).parent / "py-spy"
    if not spy.is_file():
        pytest.skip("py-spy is not beside this interpreter")
    put = f"cat > {into}/usr/local/bin/py-spy && chmod 755 {into}/usr/local/bin/py-spy"
    with spy.open("rb") as binary:
        assert lab.host(["sh", "-c", put], stdin=binary).returncode == 0


def hung(here: Cli, sick: Lab, code: Path) -> dict[str, Any]:
    run_id = launch(here, code, "exec python3 hang.py\n", ct=303, hang=HANG)
    speaks(sick, run_id, "step 8/", 303)
    log = f"/workspace/dflashctl/runs/{run_id}/train.log"
    sick.pct("exec", 303, "--", "touch", "-d", "-2 hours", log)
    return findings(here, run_id)[0]


def test_stacks_are_taken_from_the_host_where_the_container_has_no_py_spy(
    here: Cli, sick: Lab, code: Path
) -> None:
    install_py_spy(sick, "")

    root = hung(here, sick, code)

    assert root["code"] == "run.hang"
    assert "drafter-3: open_pipe" in root["title"]
    assert "it did not move" in root["title"]


def test_stacks_are_taken_from_the_host_where_the_container_forbids_ptrace(
    here: Cli, sick: Lab, code: Path
) -> None:
    if sick.state()["backend"] != "lxc":
        pytest.skip("only LXC has seccomp profiles")
    install_py_spy(sick, "")
    profile = sick.layout.pve / "no-ptrace.seccomp"
    profile.write_text(NO_PTRACE)
    config = sick.layout.pve_conf(303)
    kept = config.read_text()
    config.write_text(kept + f"lxc.seccomp.profile: {profile}\n")
    try:
        sick.reboot(303)
        inside = sick.files(303) / "usr/local/bin/py-spy"
        shutil.copy(Path(sys.executable).parent / "py-spy", inside)

        root = hung(here, sick, code)
        dump = "/usr/local/bin/py-spy dump --pid $(pgrep -f '^python3 hang')"
        refused = sick.host(["pct", "exec", "303", "--", "sh", "-c", dump])
    finally:
        config.write_text(kept)
        sick.reboot(303)

    assert "ermi" in refused.stderr + refused.stdout, "the container was to forbid it"
    assert root["code"] == "run.hang"
    assert "drafter-3: open_pipe" in root["title"]


FLIGHT = """
import os, pickle

def entry(number, name):
    return {"collective_seq_id": number, "profiling_name": name, "input_sizes": ((4096,),),
            "process_group": ("0", "default_pg"), "state": "started",
            "frames": [{"filename": os.path.abspath(__file__), "line": 7, "name": "sync"}]}

for rank in range(3):
    last = "nccl:broadcast" if rank == 2 else "nccl:all_reduce"
    entries = [entry(41, "nccl:all_reduce"), entry(42, last)]
    with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
        pickle.dump({"version": "2.10", "entries": entries}, file, protocol=2)
    print(f"[rank{rank}]:[E1102 09:10:09.1 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught "
          "collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=4096, "
          "NumelOut=4096, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.")
raise SystemExit(1)
"""


def test_the_flight_recorder_names_the_collective_and_the_rank(here: Cli, code: Path) -> None:
    """The dumps in torch 2.13's form, recorded: NCCL itself needs GPUs. Real ones, of gloo, are
    read in tests/orchestrator/agent/test_agent_flight.py."""
    run_id = launch(here, code, STEPS + "exec python3 flight.py\n", flight=FLIGHT)
    over(here, run_id)

    root = findings(here, run_id)[0]

    assert root["code"] == "nccl.timeout"
    assert "collective 42" in root["title"]
    assert "rank 2 called broadcast 4096 at" in root["title"]


def test_a_slow_run_is_told_with_what_changed(here: Cli, sick: Lab, code: Path) -> None:
    fake = (Path(__file__).parent / "fake_run.py").read_text()
    first = launch(here, code, "python3 fake.py 40 0.01\n", fake=fake)
    over(here, first)
    over(here, launch(here, code, "exit 3\n"))  # an attempt that died at once is no measure
    second = launch(
        here, code, "python3 fake.py 40 0.01\nsleep 60\n", fake=fake.replace("20000.0", "9000.0")
    )
    speaks(sick, second, '"step": 40')

    root = findings(here, second)[0]

    assert root["code"] == "throughput.collapse"
    assert f"since {first} changed: code" in root["title"]
    assert "2 files differ: fake.py, start_training.sh" in json.dumps(root["evidence"])
    bundle = here.home / "slow.tar.gz"
    here("diag", second, "--bundle", bundle)
    saved = json.loads(here("diag", "--from", bundle, "--json").stdout)
    assert saved["findings"][0]["title"] == root["title"]
    with tarfile.open(bundle) as archive:
        assert {"run.json", "environment.json"} <= set(archive.getnames())
