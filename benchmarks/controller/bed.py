"""What every benchmark of the controller runs on: a lab, a proxy before it, a laptop of its own."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.lab import Container, Lab, LabSpec
from orchestrator.lab.faults import PCT_DELAY
from orchestrator.lab.proxy import Proxy

ROOT = Path(__file__).parents[2]
CT = 201
TARGET = f"lab-{CT}"
PCT_DELAY_S = 0.55
"""What the real pct computes for before it does anything is 0.5 to 1 s."""
RTTS_MS = (0.0, 20.0, 100.0)


@dataclass(frozen=True)
class Row:
    """A line of the table: medians, each in ``unit``; ``ratio`` is ours to theirs."""

    what: str
    rtt_ms: float
    ours: float
    theirs: float | None
    unit: str
    beside: str
    """What ``theirs`` is."""
    goal: str = ""

    def markdown(self) -> str:
        ratio = f"{self.ours / self.theirs:.2f}" if self.theirs else ""
        theirs = f"{self.theirs:.3g} {self.unit}, {self.beside}" if self.theirs else self.beside
        ours = f"{self.ours:.3g} {self.unit}"
        return f"| {self.what} | {self.rtt_ms:g} | {ours} | {theirs} | {ratio} | {self.goal} |"


HEADER = "| what | RTT, ms | dflashctl | beside it | ratio | goal |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Sample:
    """Seconds by the wall and by the laptop's processors."""

    wall: float
    cpu: float


def timed(argv: Sequence[str | Path], **options: Any) -> Sample:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "check": True} | options
    subprocess.run([str(word) for word in argv], **options)
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Sample(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def median(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.wall for sample in samples)


def write_inventory(folder: Path, lab: Lab, proxy: Proxy, **host: str) -> Path:
    """The lab's own, its host behind the proxy; ``host``: more of the host's settings."""
    config = folder / "ssh_config"
    config.write_text(f"HostKeyAlias [127.0.0.1]:{lab.spec.port}\n")
    known = yaml.safe_load(lab.inventory.read_text())
    known["hosts"]["lab"] |= {"port": proxy.port, "ssh_config": str(config), **host}
    inventory = folder / "inventory.yaml"
    inventory.write_text(yaml.safe_dump(known))
    return inventory


class Bed:
    """One lab with container 201; ``ssh`` and ``dflashctl`` reach it through the proxy."""

    def __init__(self, folder: Path, lab: Lab, proxy: Proxy) -> None:
        self.folder = folder
        self.lab = lab
        self.proxy = proxy
        self.inventory = write_inventory(folder, lab, proxy)
        self.code = folder / "code"
        self.code.mkdir()
        (self.code / "start_training.sh").write_text("exec true\n")
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "DFLASHCTL_INVENTORY": str(self.inventory),
        }

    def argv(self, *words: str | Path) -> list[str]:
        return [sys.executable, "-m", "orchestrator.cli", *map(str, words)]

    def dflashctl(self, *words: str | Path, cwd: Path | None = None) -> Sample:
        return timed(self.argv(*words), cwd=cwd or self.code, env=self.environment)

    def said(self, *words: str | Path, cwd: Path | None = None) -> str:
        done = subprocess.run(
            self.argv(*words),
            cwd=cwd or self.code,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def ssh(self, line: str) -> list[str]:
        """OpenSSH's client, through the proxy too."""
        return self.lab.ssh_argv(line, port=self.proxy.port)

    def inside(self, line: str) -> str:
        """A shell line in the container, without a network."""
        return self.lab.pct("exec", CT, "--", "sh", "-c", line)


@contextlib.contextmanager
def bed(rtt_ms: float = 0.0, pct_delay: float = PCT_DELAY_S) -> Iterator[Bed]:
    with tempfile.TemporaryDirectory(prefix="dfl-", dir="/var/tmp") as name:
        folder = Path(name)
        with own_disk(folder) as disk:
            lab = Lab(LabSpec(root=disk / "lab", port=20922, containers=(Container(CT),)))
            lab.up()
            try:
                with (
                    Proxy(lab.spec.port, rtt_ms=rtt_ms) as proxy,
                    lab.fault(PCT_DELAY, str(pct_delay)),
                ):
                    yield Bed(folder, lab, proxy)
            finally:
                lab.down()


@contextlib.contextmanager
def own_disk(folder: Path) -> Iterator[Path]:
    """A new file system, as a container has it, in a file.

    ext4 looks at every inode that was deleted in the last minutes before it makes one: after
    another benchmark's end 2,000 files cost 1.1 s of the processor instead of 0.3 s.
    """
    image, disk = folder / "disk.img", folder / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 30)
    whole = "lazy_itable_init=0,lazy_journal_init=0"
    subprocess.run(["mkfs.ext4", "-q", "-E", whole, image], check=True)
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def circumstances() -> str:
    load = os.getloadavg()[0]
    return f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, load {load:.1f}"
