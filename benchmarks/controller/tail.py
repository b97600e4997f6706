"""From a line's writing to the screen, and 100,000 lines a second, against `ssh … tail -F`.

    python benchmarks/controller/tail.py [--rtt-ms 0] [--lines 400]

A run prints the machine's monotonic clock, every 20 ms; who reads it, looks at the same clock. The
lab's containers share it with the laptop, so nothing has to be set.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bed import CT, HEADER, TARGET, Bed, Row, bed, circumstances

PAUSE_S = 0.02
RATE = 100_000
SECONDS = 5
STAMPS = f"""
import sys, time
time.sleep(float(sys.argv[2]))
for number in range(int(sys.argv[1])):
    print(f"stamp {{number}} {{time.monotonic():.6f}}", flush=True)
    time.sleep({PAUSE_S})
"""
FLOOD = f"""
import sys, time
time.sleep(float(sys.argv[1]))
begun = time.monotonic()
for turn in range({SECONDS * 100}):
    numbers = range(turn * {RATE // 100}, (turn + 1) * {RATE // 100})
    lines = (f"flood {{n}} of a usual length for a line of a log\\n" for n in numbers)
    sys.stdout.write("".join(lines))
    sys.stdout.flush()
    time.sleep(max(0.0, begun + (turn + 1) / 100 - time.monotonic()))
print(f"written {{time.monotonic():.6f}}", flush=True)
"""


@dataclass(frozen=True)
class Delays:
    """Of all lines, in milliseconds."""

    sorted_ms: Sequence[float]

    def at(self, share: float) -> float:
        return self.sorted_ms[min(len(self.sorted_ms) - 1, int(share * len(self.sorted_ms)))]


def reading(
    argv: Sequence[str], environment: dict[str, str] | None, last: str
) -> list[tuple[float, str]]:
    """Each line with when it was there, up to the one that begins with ``last``."""
    found: list[tuple[float, str]] = []
    with subprocess.Popen(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout
        rest = b""
        while data := os.read(process.stdout.fileno(), 1 << 20):
            now = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            found += [(now, line.decode(errors="replace")) for line in lines]
            if found and any(line.startswith(last) for _, line in found[-len(lines) :]):
                break
        process.kill()
    return found


def delays(lines: Sequence[tuple[float, str]], count: int) -> Delays:
    stamps = [(now, line.split()) for now, line in lines if line.startswith("stamp ")]
    numbers = [int(words[1]) for _, words in stamps]
    assert numbers == list(range(numbers[0], count)), "lines are lost, doubled or out of order"
    # The first ones come with the connection.
    return Delays(sorted((now - float(words[2])) * 1000 for now, words in stamps[20:]))


def latency(made: Bed, count: int) -> tuple[Delays, Delays]:
    found = []
    for ours in (True, False):
        (made.code / "stamps.py").write_text(STAMPS)
        command = ("--", "python3", "stamps.py", str(count), "8")
        run_id = made.said("launch", TARGET, "--force", *command).splitlines()[0]
        log = f"/workspace/dflashctl/runs/{run_id}/train.log"
        argv = made.argv("tail", run_id) if ours else made.ssh(f"pct exec {CT} -- tail -F {log}")
        lines = reading(argv, made.environment if ours else None, f"stamp {count - 1} ")
        found.append(delays(lines, count))
    return found[0], found[1]


def flood(made: Bed) -> tuple[float, float]:
    """How long after it was written the last of 500,000 lines was there: ours, theirs. Seconds."""
    found = []
    for ours in (True, False):
        (made.code / "flood.py").write_text(FLOOD)
        command = ("--", "python3", "flood.py", "8")
        run_id = made.said("launch", TARGET, "--force", *command).splitlines()[0]
        log = f"/workspace/dflashctl/runs/{run_id}/train.log"
        argv = made.argv("tail", run_id, "-n", "1000000")
        if not ours:
            argv = made.ssh(f"pct exec {CT} -- tail -n +1 -F {log}")
        lines = reading(argv, made.environment if ours else None, "written ")
        numbers = [int(line.split()[1]) for _, line in lines if line.startswith("flood ")]
        if ours:
            assert numbers == list(range(RATE * SECONDS)), "lines are lost, doubled or out of order"
        now, end = next((now, line) for now, line in lines if line.startswith("written "))
        found.append(now - float(end.split()[1]))
    return found[0], found[1]


def rows(made: Bed, rtt_ms: float, count: int) -> list[Row]:
    ours, theirs = latency(made, count)
    lag, their_lag = flood(made)
    half = rtt_ms / 2
    beside = "ssh 'pct exec … tail -F'"

    def row(what: str, share: float, goal: str = "") -> Row:
        return Row(what, rtt_ms, ours.at(share), theirs.at(share), "ms", beside, goal)

    return [
        row("line to screen, median", 0.5, f"≤ {half + 2:g} ms"),
        row("line to screen, p99", 0.99),
        row("line to screen, worst", 1.0, f"≤ {half + 20:g} ms"),
        Row(
            f"{RATE:,} lines/s for {SECONDS} s: the last is there after",
            rtt_ms,
            lag * 1000,
            their_lag * 1000,
            "ms",
            beside,
            "none lost or twice",
        ),
    ]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rtt-ms", type=float, default=0.0)
    options.add_argument("--lines", type=int, default=400)
    given = options.parse_args()
    with bed(given.rtt_ms) as made:
        found = rows(made, given.rtt_ms, given.lines)
        print(circumstances())
    print(HEADER, *(row.markdown() for row in found), sep="\n")


if __name__ == "__main__":
    main()
