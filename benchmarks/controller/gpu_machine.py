"""The agent's view of real GPUs: processes, preflight, probes, leases. Prints one JSON object.

Needs a machine with an NVIDIA driver and Python 3.10, nothing else; the agent's program is built
where libtmux is installed and handed over as a file:

    python -m orchestrator.agent_bundle build/agent.pyz
    python benchmarks/controller/gpu_machine.py build/agent.pyz
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from orchestrator.agent.frames import Decoder, encode
from orchestrator.agent.loader import argv, header
from orchestrator.agent.protocol import MAGIC

HELD_BYTES = 2 << 30


def hold() -> None:
    """A process that has ``HELD_BYTES`` on GPU 0, through the driver itself, until killed."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    steps = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
        lambda: driver.cuCtxCreate_v2(ctypes.byref(context), 0, device),
        lambda: driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(HELD_BYTES)),
    )
    codes = [step() for step in steps]
    print("held" if not any(codes) else f"driver errors {codes}", flush=True)
    time.sleep(600)


class Channel:
    """One request after the other."""

    def __init__(self, program: bytes, workdir: str) -> None:
        self.process = subprocess.Popen(
            argv(sys.executable), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout.fileno()
        digest = hashlib.sha256(program).hexdigest()
        self.input.write(header(digest, len(program), workdir) + program)
        self.input.flush()
        preamble = b""
        while MAGIC not in preamble:
            preamble += os.read(self.output, 1)
        self.decoder = Decoder()
        self.number = 0

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        self.number += 1
        self.input.write(encode({"id": self.number, "op": op, **fields}))
        self.input.flush()
        while True:
            for head, _ in self.decoder.feed(os.read(self.output, 1 << 16)):
                if head["id"] == self.number and not head.get("more"):
                    return dict(head["result"] if head["ok"] else {"error": head["error"]})


def look(channel: Channel) -> dict[str, Any]:
    report: dict[str, Any] = {}
    began = time.perf_counter()
    before = channel.call("gpu.processes")
    report["gpu.processes seconds"] = round(time.perf_counter() - began, 3)
    report["idle"] = before
    card = before["gpus"][0]["uuid"]
    with subprocess.Popen([sys.executable, __file__, "--hold"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        report["holder"] = [holder.pid, holder.stdout.readline().decode().strip()]
        busy = channel.call("gpu.processes")
        holder.kill()
    report["busy"] = {"gpu": busy["gpus"][0], "processes": busy["processes"]}
    for wanted in ([card], ["0"], ["99"]):
        check = channel.call("preflight", gpus=wanted, python=sys.executable)["checks"]["gpu"]
        report[f"preflight gpus={wanted}"] = {key: check.get(key) for key in ("ok", "error")}
    owner = {"user": "ann"}
    fields = {"gpus": [card], "ct": 200, "owner": owner}
    report["lease"] = channel.call("lease.acquire", run_id="first-run", **fields)
    report["second lease"] = channel.call("lease.acquire", run_id="second-run", **fields)
    report["release"] = channel.call("lease.release", run_id="first-run")
    names = ["nvidia_smi", "nvidia_smi_L", "nvidia_smi_q", "nvidia_smi_topo", "ls_dev"]
    probes = channel.call("probe", names=[*names, "proc_driver"], timeout_s=10)["probes"]
    host = ["host_compute_apps", "host_cgroup", "host_proc_devices", "host_proc_driver"]
    probes |= channel.call("probe", side="host", names=host, timeout_s=10)["probes"]
    for name, found in probes.items():
        text = (found["text"] or "").splitlines()[:3]
        report[f"probe {name}"] = {"ok": found["ok"], "seconds": found["seconds"], "text": text}
    return report


def main() -> None:
    if sys.argv[1:] == ["--hold"]:
        hold()
        return
    program = Path(sys.argv[1]).read_bytes()
    with tempfile.TemporaryDirectory() as workdir:
        channel = Channel(program, workdir)
        print(json.dumps(look(channel), indent=1))
        channel.input.close()
        channel.process.wait()


if __name__ == "__main__":
    main()
