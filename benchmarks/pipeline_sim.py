"""The pipeline on paper: from measured stage times to tokens a second on 2 to 512 GPUs.

    python benchmarks/pipeline_sim.py                                  # Qwen3-8B's shape on H200s
    python benchmarks/pipeline_sim.py --target-ms 430 --drafter-ms 360 # another target
    python benchmarks/pipeline_sim.py --network 12.5 --microbatches 64 # slow network, fixed batch

Simulates every microbatch of some steps under the executors' own rules (any free target takes the
next microbatch; slot i mod depth; two staging buffers; drafters wait for each other once a step,
and sum gradients beside their last backward pass), with a random spread of each stage's time. Needs
no torch.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

BESIDE = 0.4
"""Of a drafter's microbatch: from the last layer's gradient to the first layer's, in which the sum
goes on. Counted at Qwen3-8B's shape: 63 of 140 TFLOP are the layers' backward pass; and a little
less, for the first bucket is not there at once."""
TAIL = 0.12
"""Of a gradient: what is there only when backward ends (``fc`` and the context's keys and values:
126 M of 1,049 M)."""


@dataclass(frozen=True)
class Times:
    """Seconds, measured on the machine in question."""

    target: float
    """A microbatch through one target."""
    drafter: float
    """A microbatch forward and backward through one drafter."""
    update: float
    """The optimizer's step."""
    copy: float
    """One feature slot from device to device."""
    batch: float
    """Making one microbatch on the host; one at a time in a node."""
    spread: float = 0.02
    """Relative standard deviation of target and drafter times."""


@dataclass(frozen=True)
class Fabric:
    gradient_bytes: float
    inside: float
    """Bytes a second between devices of a node, each direction."""
    network: float
    """Bytes a second in and out of a node, all its cards together."""

    def exposed_s(self, drafters: int, nodes: int, drafter_s: float) -> float:
        """What of the sum comes after the last backward pass, of microbatches that take so long."""
        whole = self.sum_s(drafters, nodes)
        return max(TAIL * whole, whole - BESIDE * drafter_s)

    def sum_s(self, drafters: int, nodes: int) -> float:
        """Sum of the gradients: within the node, then a ring over the nodes."""
        within = 2 * self.gradient_bytes * (drafters - 1) / drafters / self.inside
        across = 2 * self.gradient_bytes * (nodes - 1) / nodes / self.network
        return within + across


@dataclass(frozen=True)
class Layout:
    nodes: int
    targets: int
    """A node."""
    drafters: int
    """A node."""
    share: int
    """Microbatches of a step for each drafter."""
    depth: int = 2

    @property
    def devices(self) -> int:
        return self.nodes * (self.targets + self.drafters)

    @property
    def microbatches(self) -> int:
        return self.nodes * self.drafters * self.share


@dataclass(frozen=True)
class Outcome:
    step_s: float
    target_busy: float
    """Share of the time, 0..1, mean over targets."""
    drafter_busy: float
    """Without the gradient sum and the update."""
    sum_share: float
    """Of a step: the drafters wait for the sum of gradients, after their backward pass."""
    starved: float
    """Of a step: drafters wait for features (mean)."""

    def bottleneck(self, times: Times, layout: Layout) -> str:
        """What the drafters lose most time to; they themselves if that is little."""
        host = times.batch * layout.drafters * layout.share / self.step_s
        if self.starved > 0.02:
            if host > 0.9:
                return "host batches"
            return "targets" if self.target_busy > 0.9 else "queue depth"
        return "gradient sum" if self.sum_share > 0.1 else "drafters"


class Node:
    """Devices of one node; times are when each is free again."""

    def __init__(self, layout: Layout, times: Times, seed: int) -> None:
        self.layout, self.times = layout, times
        self.random = random.Random(seed)
        self.target_free = [0.0] * layout.targets
        self.copied = [[0.0, 0.0] for _ in range(layout.targets)]
        self.drafter_free = [0.0] * layout.drafters
        self.slot_free = [[0.0] * layout.depth for _ in range(layout.drafters)]
        self.host_free = 0.0
        self.number = 0
        self.target_busy = self.drafter_busy = self.starved = 0.0

    def spread(self, seconds: float) -> float:
        return seconds * max(0.5, self.random.gauss(1.0, self.times.spread))

    def step(self) -> float:
        """Until the last drafter has done its share; the time of that."""
        for _ in range(self.layout.share * self.layout.drafters):
            self._microbatch()
        return max(self.drafter_free)

    def _microbatch(self) -> None:
        t = self.times
        target = min(range(self.layout.targets), key=lambda i: self.target_free[i])
        drafter = self.number % self.layout.drafters
        index = self.number // self.layout.drafters
        self.number += 1
        self.host_free = max(self.host_free, self.target_free[target] - t.target) + t.batch
        # The buffer of two forwards ago must have been copied out.
        began = max(self.target_free[target], self.copied[target][0], self.host_free)
        work = self.spread(t.target)
        made = began + work
        slot = index % self.layout.depth
        ready = max(made, self.slot_free[drafter][slot]) + t.copy
        self.copied[target] = [self.copied[target][1], ready]
        self.target_free[target] = made
        self.target_busy += work
        free = self.drafter_free[drafter]
        start, work = max(free, ready), self.spread(t.drafter)
        self.starved += start - free
        self.drafter_free[drafter] = self.slot_free[drafter][slot] = start + work
        self.drafter_busy += work

    def resume(self, at: float) -> None:
        self.drafter_free = [at] * self.layout.drafters


def simulate(layout: Layout, times: Times, fabric: Fabric, steps: int = 40) -> Outcome:
    """After a tenth of the steps as a running start."""
    nodes = [Node(layout, times, seed) for seed in range(layout.nodes)]
    summed = fabric.exposed_s(layout.drafters, layout.nodes, times.drafter)
    warm, began = max(1, steps // 10), 0.0
    end = 0.0
    for index in range(warm + steps):
        if index == warm:
            began = end
            for node in nodes:
                node.target_busy = node.drafter_busy = node.starved = 0.0
        end = max(node.step() for node in nodes) + summed + times.update
        for node in nodes:
            node.resume(end)
    total = end - began
    step = total / steps
    return Outcome(
        step_s=step,
        target_busy=sum(n.target_busy for n in nodes) / (layout.nodes * layout.targets) / total,
        drafter_busy=sum(n.drafter_busy for n in nodes) / (layout.nodes * layout.drafters) / total,
        sum_share=summed / step,
        starved=sum(n.starved for n in nodes) / (layout.nodes * layout.drafters) / total,
    )


def layouts(devices: int, per_node: int, microbatches: int | None, share: int) -> Iterator[Layout]:
    """Every split of so many devices; with a fixed batch only those that divide it."""
    nodes, size = max(1, devices // per_node), min(devices, per_node)
    for targets in range(1, size):
        drafters = size - targets
        if microbatches is None:
            yield Layout(nodes, targets, drafters, share)
        elif microbatches % (nodes * drafters) == 0:
            yield Layout(nodes, targets, drafters, microbatches // (nodes * drafters))


def best(
    devices: int, times: Times, fabric: Fabric, tokens: float, options: argparse.Namespace
) -> tuple[Layout, Outcome, float] | None:
    """(layout, outcome, context tokens a second) of the fastest split."""
    found = []
    for layout in layouts(devices, options.per_node, options.microbatches, options.share):
        outcome = simulate(layout, times, fabric, options.steps)
        found.append((layout, outcome, layout.microbatches * tokens / outcome.step_s))
    return max(found, key=lambda item: item[2]) if found else None


def main() -> None:
    options = parse()
    times = Times(
        options.target_ms / 1e3,
        options.drafter_ms / 1e3,
        options.update_ms / 1e3,
        options.copy_ms / 1e3,
        options.batch_ms / 1e3,
        options.spread,
    )
    fabric = Fabric(options.gradient_gb * 1e9, options.inside * 1e9, options.network * 1e9)
    tokens = options.rows * options.length
    print("GPUs  nodes x split   share  step ms  context tok/s   a GPU  of 8-GPU  "
          "target  drafter  sum  starved  bottleneck")  # fmt: skip
    reference = best(8, times, fabric, tokens, options)
    for devices in (2, 4, 8, 16, 32, 64, 128, 256, 512):
        found = best(devices, times, fabric, tokens, options)
        if found is None:
            print(f"{devices:>4}  no split divides {options.microbatches} microbatches")
            continue
        layout, o, rate = found
        each = rate / devices
        whole = each / (reference[2] / 8) if reference else 1.0
        print(
            f"{devices:>4}  {layout.nodes:>3} x {layout.targets}+{layout.drafters:<5} "
            f"{layout.share:>6} {o.step_s * 1e3:>8.0f} {rate:>14,.0f} {each:>7,.0f} {whole:>8.0%} "
            f"{o.target_busy:>8.0%} {o.drafter_busy:>7.0%} {o.sum_share:>4.0%} {o.starved:>7.0%}"
            f"   {o.bottleneck(times, layout)}"
        )
    if options.depths and reference:
        print("\nslots a drafter, on 8 GPUs:")
        for depth in (1, 2, 3, 4, 8):
            o = simulate(replace(reference[0], depth=depth), times, fabric, options.steps)
            print(f"  {depth}: step {o.step_s * 1e3:.0f} ms, drafters starved {o.starved:.1%}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target-ms", type=float, default=192.0, help="one microbatch (192)")
    parser.add_argument("--drafter-ms", type=float, default=241.0, help="one microbatch (241)")
    parser.add_argument("--update-ms", type=float, default=8.4)
    parser.add_argument("--copy-ms", type=float, default=0.65, help="one feature slot (0.65)")
    parser.add_argument("--batch-ms", type=float, default=2.0, help="a microbatch on the host (2)")
    parser.add_argument("--spread", type=float, default=0.02)
    parser.add_argument("--gradient-gb", type=float, default=2.1)
    parser.add_argument("--inside", type=float, default=200.0, help="GB/s between GPUs (200)")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s a node (50)")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=3072)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--share", type=int, default=2, help="microbatches a drafter and step (2)")
    parser.add_argument("--microbatches", type=int, help="of a step, fixed: strong scaling")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--depths", action="store_true", help="also vary the slots")
    return parser.parse_args()


if __name__ == "__main__":
    main()
