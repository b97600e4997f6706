"""Launch against the bare one-liner that dflashctl grew out of, in turns, on one loopback lab.

    python benchmarks/controller/launch.py [--rounds 10] [--pct-delay 0.55] [--rtt-ms 0]

Prints medians and minima in seconds, their ratios, and processor seconds on the laptop. Cold is a
laptop and a container that never met: the agent's program travels too.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence

from bed import CT, PCT_DELAY_S, TARGET, Bed, Row, Sample, bed, circumstances, median, timed


def bare(made: Bed, number: int) -> Sample:
    """ssh HOST 'pct exec N -- tmux new-session -d …', as it was typed by hand."""
    inner = f"tmux new-session -d -s bare{number} 'true 2>&1 | tee /workspace/bare.log'"
    return timed(made.ssh(f"pct exec {CT} -- {inner}"))


def cold(made: Bed) -> Sample:
    """The first launch of a new laptop into a new container."""
    made.inside("rm -rf /workspace/dflashctl; tmux kill-server; true")
    made.lab.host(["rm", "-rf", "/var/lib/dflashctl"])
    for name in (".local", ".cache"):
        shutil.rmtree(made.folder / name, ignore_errors=True)
    return made.dflashctl("launch", TARGET, "--force")


def run(made: Bed, rounds: int) -> dict[str, list[Sample]]:
    made.dflashctl("launch", TARGET, "--name", "first")
    found: dict[str, list[Sample]] = {"bare": [], "warm": [], "cold": [], "help": []}
    for number in range(rounds):
        found["bare"].append(bare(made, number))
        found["warm"].append(made.dflashctl("launch", TARGET, "--force"))
        found["help"].append(made.dflashctl("--help"))
    for _ in range(max(3, rounds // 2)):
        found["cold"].append(cold(made))
    return found


def rows(made: Bed, rtt_ms: float, rounds: int) -> list[Row]:
    found = run(made, rounds)
    theirs = median(found["bare"])
    beside = "ssh 'pct exec … tmux …'"
    return [
        Row("launch, warm", rtt_ms, median(found["warm"]), theirs, "s", beside, "≤ 1.3 ×"),
        Row("launch, never met", rtt_ms, median(found["cold"]), theirs, "s", beside),
        *(
            [Row("`--help`", 0, median(found["help"]), None, "s", "", "≤ 0.15 s")]
            if not rtt_ms
            else []
        ),
    ]


def line(name: str, samples: Sequence[Sample], base: Sequence[Sample] | None = None) -> None:
    walls = sorted(sample.wall for sample in samples)
    cpu = sorted(sample.cpu for sample in samples)[len(samples) // 2]
    ratio = ""
    if base:
        least = walls[0] / min(sample.wall for sample in base)
        ratio = f"{median(samples) / median(base):>7.2f} {least:>7.2f}"
    print(f"{name:<34} {median(samples):>7.2f} {walls[0]:>7.2f} {cpu:>7.2f} {ratio}")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--pct-delay", type=float, default=PCT_DELAY_S)
    options.add_argument("--rtt-ms", type=float, default=0.0)
    given = options.parse_args()
    with bed(given.rtt_ms, given.pct_delay) as made:
        found = run(made, given.rounds)
        print(
            f"{circumstances()}, rounds {given.rounds}, pct {given.pct_delay} s, "
            f"RTT {given.rtt_ms:g} ms"
        )
    print(f"{'':<34} {'median':>7} {'least':>7} {'cpu':>7} {'ratio':>7} {'ratio':>7}")
    line("bare ssh one-liner", found["bare"])
    line("dflashctl launch, warm", found["warm"], found["bare"])
    line("dflashctl launch, never met", found["cold"], found["bare"])
    line("dflashctl --help", found["help"])


if __name__ == "__main__":
    main()
