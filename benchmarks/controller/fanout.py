"""Asking all containers of one host, in a lab: through its agent, as before, and by hand.

    python benchmarks/controller/fanout.py [--containers 50] [--rtt-ms 0 20 100]
        [--pct-delay 0 0.55] [--no-by-hand]

`first` and `last` are the seconds from nothing (no connection, no agent) to the first and the last
answer to `run.list`. `warm` is all of them asked once more: through the agent on channels that are
kept, as `watch` and `top` do; otherwise on the kept connection. By hand it is `true` in place of
`run.list`. `--pct-delay` is what the real pct computes for before it does anything (0.5 to 1 s).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bed import write_inventory

from orchestrator import inventory as inventories
from orchestrator.fleet import Fleet
from orchestrator.lab import Container, Lab, LabSpec
from orchestrator.lab.faults import PCT_DELAY
from orchestrator.lab.proxy import Proxy
from orchestrator.paths import LaptopPaths
from orchestrator.run import ask_all
from orchestrator.state import LaptopState
from orchestrator.target import Target, everything

FIRST = 200
WARM_ROUNDS = 15
GOAL_MS = 50.0
"""Beyond one round trip, warm: the design's."""


class OneByOne(Fleet):
    """As it was before: a session and a `pct exec` a container, eight at a time."""

    def expect(self, targets: Iterable[Target]) -> None:
        return None


@dataclass
class Times:
    """Seconds."""

    first: float
    last: float
    warm: float
    worst: float = 0.0


class Bench:
    """A laptop of its own before the lab and the proxy."""

    def __init__(self, folder: Path, lab: Lab, proxy: Proxy) -> None:
        self.lab = lab
        self.proxy = proxy
        laptop = LaptopPaths({"HOME": str(folder)})
        self.state = LaptopState(laptop)
        known = write_inventory(folder, lab, proxy)
        self.targets = everything(inventories.load(known, laptop))
        known = write_inventory(folder, lab, proxy, enter="lxc-attach")
        self.attached = everything(inventories.load(known, laptop))
        """The same, entered by lxc-attach."""

    def cold(self, fleet: Fleet, targets: Sequence[Target]) -> tuple[float, float]:
        begun = time.perf_counter()
        ends = []
        for asked in ask_all(fleet, targets):
            assert asked.error is None, asked.error
            ends.append(time.perf_counter() - begun)
        assert len(ends) == len(targets)
        return ends[0], ends[-1]

    def through_agent(self, targets: Sequence[Target]) -> Times:
        with Fleet(self.state) as fleet:
            first, last = self.cold(fleet, targets)
            ways = [fleet.container(target) for target in targets]
            for way in ways:
                way.hello()
            rounds = []
            for _ in range(WARM_ROUNDS):
                begun = time.perf_counter()
                asked = [way.request("run.list") for way in ways]
                for request in asked:
                    request.result()
                rounds.append(time.perf_counter() - begun)
            return Times(first, last, statistics.median(rounds), max(rounds))

    def one_by_one(self) -> Times:
        with OneByOne(self.state) as fleet:
            first, last = self.cold(fleet, self.targets)
            _, again = self.cold(fleet, self.targets)
            return Times(first, last, again)

    def ssh(self, ct: int | str) -> list[str]:
        return self.lab.ssh_argv(f"pct exec {ct} -- true", port=self.proxy.port)

    def loop(self) -> float:
        begun = time.perf_counter()
        for target in self.targets:
            subprocess.run(self.ssh(target.ct), check=True, stdin=subprocess.DEVNULL)
        return time.perf_counter() - begun

    def xargs(self) -> float:
        names = "".join(f"{target.ct}\n" for target in self.targets)
        begun = time.perf_counter()
        argv = ["xargs", "-P8", "-I{}", *self.ssh("{}")]
        subprocess.run(argv, check=True, input=names.encode())
        return time.perf_counter() - begun


def measure(bench: Bench, rtt_ms: float, by_hand: bool) -> list[str]:
    """Markdown rows of one round trip time and one cost of pct."""
    before = bench.proxy.traffic()["connections"]
    ours = bench.through_agent(bench.targets)
    connections = bench.proxy.traffic()["connections"] - before
    assert connections == 1, connections
    attached = bench.through_agent(bench.attached)
    former = bench.one_by_one()
    rows = [
        _row("through the host's agent", rtt_ms, ours, ours, _goal(ours, rtt_ms)),
        _row("the same, entered by lxc-attach", rtt_ms, attached, ours, _goal(attached, rtt_ms)),
        _row("as before: a session a container, 8 at a time", rtt_ms, former, ours),
    ]
    if by_hand:
        for name, seconds in (
            ("`xargs -P8 ssh … pct exec`", bench.xargs()),
            ("`for ct in …; do ssh … pct exec`", bench.loop()),
        ):
            rows.append(_row(name, rtt_ms, Times(0, seconds, seconds), ours))
    return rows


def _goal(ours: Times, rtt_ms: float) -> str:
    limit = rtt_ms + GOAL_MS
    met = "met" if ours.warm * 1000 <= limit else "**missed**"
    return f"warm ≤ {limit:.0f} ms: {met} (worst of {WARM_ROUNDS}: {ours.worst * 1000:.0f})"


def _row(name: str, rtt_ms: float, times: Times, ours: Times, goal: str = "") -> str:
    first = f"{times.first:.2f}" if times.first else ""
    ratios = f"{times.last / ours.last:.2f} · {times.warm / ours.warm:.0f}"
    warm = f"{times.warm * 1000:.0f} ms" if times.warm < 1 else f"{times.warm:.1f} s"
    return f"| {name} | {rtt_ms:g} | {first} | {times.last:.2f} | {warm} | {ratios} | {goal} |"


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--containers", type=int, default=50)
    options.add_argument("--rtt-ms", type=float, nargs="*", default=[0.0, 20.0, 100.0])
    options.add_argument("--pct-delay", type=float, nargs="*", default=[0.0, 0.55])
    options.add_argument("--no-by-hand", action="store_true", help="leave out xargs and the loop")
    given = options.parse_args()
    containers = tuple(Container(FIRST + n) for n in range(given.containers))
    with tempfile.TemporaryDirectory(prefix="dfl-", dir="/var/tmp") as name:
        folder = Path(name)
        lab = Lab(LabSpec(root=folder / "lab", port=20924, containers=containers))
        lab.up()
        try:
            with Proxy(lab.spec.port) as proxy:
                bench = Bench(folder, lab, proxy)
                # Every container holds the program then, compiled, as from its second use on.
                bench.through_agent(bench.targets)
                report(bench, given.pct_delay, given.rtt_ms, by_hand=not given.no_by_hand)
        finally:
            lab.down()


def report(bench: Bench, delays: Sequence[float], rtts: Sequence[float], by_hand: bool) -> None:
    count = len(bench.targets)
    print("| pct | way | RTT, ms | first, s | last, s | warm | last · warm, against ours | goal |")
    print("|---|---|---|---|---|---|---|---|")
    for delay in delays:
        for rtt_ms in rtts:
            bench.proxy.set(rtt_ms=rtt_ms)
            with bench.lab.fault(PCT_DELAY, str(delay)):
                for row in measure(bench, rtt_ms, by_hand):
                    print(f"| {delay:g} s {row}", flush=True)
    load = os.getloadavg()[0]
    print(f"\n{count} containers, {time.strftime('%Y-%m-%d %H:%M')}", end=", ")
    print(f"{os.cpu_count()} cores, load {load:.1f} at the end")


if __name__ == "__main__":
    main()
