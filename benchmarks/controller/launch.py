"""Launch against the bare one-liner that dflashctl grew out of, in turns, on one loopback lab.

    python benchmarks/controller/launch.py [--rounds 10] [--pct-delay 0.55] [--rtt-ms 0]

Prints medians and minima in seconds, their ratios, and processor seconds on the laptop.
`--pct-delay` is what the real pct computes for before it does anything (0.5 to 1 s).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from orchestrator.lab import Container, Lab, LabSpec
from orchestrator.lab.faults import PCT_DELAY
from orchestrator.lab.proxy import Proxy

ROOT = Path(__file__).parents[2]
CT = 201


@dataclass
class Sample:
    """Seconds by the wall and by the laptop's processors."""

    wall: float
    cpu: float


def timed(argv: list[str], **options: object) -> Sample:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Sample(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


class Laptop:
    """A home, an inventory through the proxy, and a folder to push."""

    def __init__(self, folder: Path, lab: Lab, port: int) -> None:
        config = folder / "ssh_config"
        config.write_text(f"HostKeyAlias [127.0.0.1]:{lab.spec.port}\n")
        known = yaml.safe_load(lab.inventory.read_text())
        known["hosts"]["lab"] |= {"port": port, "ssh_config": str(config)}
        inventory = folder / "inventory.yaml"
        inventory.write_text(yaml.safe_dump(known))
        self.code = folder / "code"
        self.code.mkdir()
        (self.code / "start_training.sh").write_text("exec true\n")
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "DFLASHCTL_INVENTORY": str(inventory),
        }

    def dflashctl(self, *words: str) -> Sample:
        argv = [sys.executable, "-m", "orchestrator.cli", *words]
        return timed(argv, cwd=self.code, env=self.environment)


def bare(lab: Lab, port: int, number: int) -> Sample:
    """ssh HOST 'pct exec N -- tmux new-session -d …', as it was typed by hand."""
    inner = f"tmux new-session -d -s bare{number} 'true 2>&1 | tee /workspace/bare.log'"
    return timed(lab.ssh_argv(f"pct exec {CT} -- {inner}", port=port))


def row(name: str, samples: list[Sample], base: list[Sample] | None = None) -> None:
    walls = [sample.wall for sample in samples]
    cpu = statistics.median(sample.cpu for sample in samples)
    ratio = ""
    if base:
        median = statistics.median(walls) / statistics.median(sample.wall for sample in base)
        least = min(walls) / min(sample.wall for sample in base)
        ratio = f"{median:>7.2f} {least:>7.2f}"
    print(f"{name:<34} {statistics.median(walls):>7.2f} {min(walls):>7.2f} {cpu:>7.2f} {ratio}")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--pct-delay", type=float, default=0.55)
    options.add_argument("--rtt-ms", type=float, default=0.0)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="dfl-", dir="/var/tmp") as name:
        folder = Path(name)
        lab = Lab(LabSpec(root=folder / "lab", port=20922, containers=(Container(CT),)))
        lab.up()
        try:
            with (
                Proxy(lab.spec.port, rtt_ms=given.rtt_ms) as proxy,
                lab.fault(PCT_DELAY, str(given.pct_delay)),
            ):
                measure(Laptop(folder, lab, proxy.port), lab, proxy.port, given)
        finally:
            lab.down()


def measure(laptop: Laptop, lab: Lab, port: int, given: argparse.Namespace) -> None:
    laptop.dflashctl("launch", "lab-201", "--name", "first")
    by_hand: list[Sample] = []
    launched: list[Sample] = []
    helped: list[Sample] = []
    for number in range(given.rounds):
        by_hand.append(bare(lab, port, number))
        launched.append(laptop.dflashctl("launch", "lab-201", "--force"))
        helped.append(laptop.dflashctl("--help"))
    load = os.getloadavg()[0]
    print(f"{time.strftime('%Y-%m-%d')}  rounds {given.rounds}  pct {given.pct_delay} s", end="  ")
    print(f"rtt {given.rtt_ms:g} ms  load {load:.1f} on {os.cpu_count()} cores")
    print(f"{'':<34} {'median':>7} {'least':>7} {'cpu':>7} {'ratio':>7} {'ratio':>7}")
    row("bare ssh one-liner", by_hand)
    row("dflashctl launch, nothing to push", launched, by_hand)
    row("dflashctl --help", helped)


if __name__ == "__main__":
    main()
