"""What ``diag`` sees inside a live run: stacks, compiles, collectives, and what has changed."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ill import STEPS, findings, launch, over, speaks
from laptop import ROOT, Cli

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]

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
IGNORE = shutil.ignore_patterns("__pycache__")


@pytest.mark.torch
def test_a_compile_race_and_the_thread_that_made_it(ill_cli: Cli, ill: Lab, code: Path) -> None:
    if not ill.spec.shared_python.is_dir():
        pytest.skip("no training interpreter on this machine")
    shutil.copytree(ROOT / "trainer", code / "trainer", ignore=IGNORE)
    script = f"export OMP_NUM_THREADS=1\nexec {TORCH} -m trainer trace race.py\n"
    run_id = launch(ill_cli, code, script, ct=302, race=RACE)
    if over(ill_cli, run_id, 240)["exit_code"] == 77:
        pytest.skip("this torch keeps the flag per thread")

    root = findings(ill_cli, run_id)[0]

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


@pytest.fixture
def spy(ill: Lab) -> Iterator[Path]:
    """py-spy, which the host has too."""
    spy = Path(sys.executable).parent / "py-spy"
    if not spy.is_file():
        pytest.skip("py-spy is not beside this interpreter")
    there = "/usr/local/bin/py-spy"
    with spy.open("rb") as binary:
        put = ill.host(["sh", "-c", f"cat > {there} && chmod 755 {there}"], stdin=binary)
    assert put.returncode == 0
    yield spy
    ill.host(["rm", there])


def hung(ill_cli: Cli, ill: Lab, code: Path) -> dict[str, Any]:
    run_id = launch(ill_cli, code, "exec python3 hang.py\n", ct=303, hang=HANG)
    speaks(ill, run_id, "step 8/", 303)
    log = f"/workspace/dflashctl/runs/{run_id}/train.log"
    ill.pct("exec", 303, "--", "touch", "-d", "-2 hours", log)
    return findings(ill_cli, run_id)[0]


@pytest.mark.usefixtures("spy")
def test_stacks_are_taken_from_the_host_where_the_container_has_no_py_spy(
    ill_cli: Cli, ill: Lab, code: Path
) -> None:
    root = hung(ill_cli, ill, code)

    assert root["code"] == "run.hang"
    assert "drafter-3: open_pipe" in root["title"]
    assert "it did not move" in root["title"]


def test_stacks_are_taken_from_the_host_where_the_container_forbids_ptrace(
    ill_cli: Cli, ill: Lab, code: Path, spy: Path
) -> None:
    if ill.state()["backend"] != "lxc":
        pytest.skip("only LXC has seccomp profiles")
    profile = ill.layout.pve / "no-ptrace.seccomp"
    profile.write_text(NO_PTRACE)
    config = ill.layout.pve_conf(303)
    kept = config.read_text()
    config.write_text(kept + f"lxc.seccomp.profile: {profile}\n")
    try:
        ill.reboot(303)
        inside = ill.files(303) / "usr/local/bin/py-spy"
        shutil.copy(spy, inside)

        root = hung(ill_cli, ill, code)
        dump = "/usr/local/bin/py-spy dump --pid $(pgrep -f '^python3 hang')"
        refused = ill.host(["pct", "exec", "303", "--", "sh", "-c", dump])
        inside.unlink()
    finally:
        config.write_text(kept)
        ill.reboot(303)

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


def test_the_flight_recorder_names_the_collective_and_the_rank(ill_cli: Cli, code: Path) -> None:
    """The dumps in torch 2.13's form, recorded: NCCL itself needs GPUs. Real ones, of gloo, are
    read in tests/orchestrator/agent/test_agent_flight.py."""
    run_id = launch(ill_cli, code, STEPS + "exec python3 flight.py\n", flight=FLIGHT)
    over(ill_cli, run_id)

    root = findings(ill_cli, run_id)[0]

    assert root["code"] == "nccl.timeout"
    assert "collective 42" in root["title"]
    assert "rank 2 called broadcast 4096 at" in root["title"]


def test_a_slow_run_is_told_with_what_changed(ill_cli: Cli, ill: Lab, code: Path) -> None:
    fake = (Path(__file__).parent / "fake_run.py").read_text()
    first = launch(ill_cli, code, "python3 fake.py 40 0.01\n", fake=fake)
    over(ill_cli, first)
    over(ill_cli, launch(ill_cli, code, "exit 3\n"))  # an attempt that died at once is no measure
    second = launch(
        ill_cli, code, "python3 fake.py 40 0.01\nsleep 60\n", fake=fake.replace("20000.0", "9000.0")
    )
    speaks(ill, second, '"step": 40')

    root = findings(ill_cli, second)[0]

    assert root["code"] == "throughput.collapse"
    assert f"since {first} changed: code" in root["title"]
    assert "2 files differ: fake.py, start_training.sh" in json.dumps(root["evidence"])
    bundle = ill_cli.home / "slow.tar.gz"
    ill_cli("diag", second, "--bundle", bundle)
    saved = json.loads(ill_cli("diag", "--from", bundle, "--json").stdout)
    assert saved["findings"][0]["title"] == root["title"]
    with tarfile.open(bundle) as archive:
        assert {"run.json", "environment.json"} <= set(archive.getnames())
