"""Push and pull against tar and rsync over the same link, into the same container.

    python benchmarks/controller/transfer.py [--rounds 3] [--rtt-ms 0]

100 MB in 2,000 files that do not compress; then one of them changed; then a checkpoint of 256 MB
back. `tar` goes through `pct exec` as we do, `rsync` (apt install rsync) by ssh from the host into
the container's root folder: it pays for no `pct`. Neither syncs to disk nor checks what is there.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from bed import CT, HEADER, TARGET, Bed, Row, Sample, bed, circumstances, median, timed

from orchestrator import inventory as inventories
from orchestrator import release as releases
from orchestrator import snapshot
from orchestrator.fleet import Fleet
from orchestrator.paths import LaptopPaths
from orchestrator.push import Arrivals, Push
from orchestrator.state import LaptopState
from orchestrator.target import resolve

FILES, SIZE = 2_000, 50_000
MB = FILES * SIZE / 1e6
CHECKPOINT_MB = 256
CHECKPOINT = "/workspace/checkpoint"


def fill(folder: Path, seed: int) -> None:
    """New contents each time, in 40 folders."""
    dice = random.Random(seed)
    for number in range(FILES):
        path = folder / f"package{number % 40}" / f"module{number}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(dice.randbytes(SIZE))


def shell(line: str, cwd: Path) -> Sample:
    return timed(["sh", "-c", line], cwd=cwd)


def tar(made: Bed, folder: Path, to: str) -> Sample:
    far = shlex.join(made.ssh(f"pct exec {CT} -- tar x -C {to}"))
    return shell(f"tar c . | {far}", folder)


def rsync(made: Bed, source: str, target: str, folder: Path, *, back: bool = False) -> Sample:
    """``target`` (or with ``back`` the source) is a path inside the container."""
    *way, host = made.ssh("")[:-1]
    words = [f"{host}:{source}", target] if back else [source, f"{host}:{target}"]
    # The way into the container's root folder: recent versions refuse to go through /proc/N/root.
    far = f"nsenter -t {made.lab.init_pid(CT)} -m -- rsync"
    argv = ["rsync", "-a", "--delete", "--rsync-path", far, "-e", shlex.join(way), *words]
    return timed(argv, cwd=folder)


def pushes(made: Bed, rounds: int) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {
        name: [] for name in ("push", "tar", "rsync", "one", "one rsync")
    }
    folder = made.folder / "tree"
    folder.mkdir()
    made.dflashctl("push", TARGET)
    for number in range(rounds):
        fill(folder, number)
        # Nothing is deleted between the turns: see `own_disk`.
        far = f"/workspace/{number}"
        made.inside(f"mkdir -p {far}/tar {far}/rsync; sync")
        found["tar"].append(tar(made, folder, f"{far}/tar"))
        made.inside("sync")
        found["push"].append(made.dflashctl("push", TARGET, cwd=folder))
        made.inside("sync")
        found["rsync"].append(rsync(made, "./", f"{far}/rsync/", folder))
        (folder / "package1/module1.bin").write_bytes(random.Random(-number).randbytes(SIZE))
        found["one"].append(made.dflashctl("push", TARGET, cwd=folder))
        found["one rsync"].append(rsync(made, "./", f"{far}/rsync/", folder))
    return found


def beyond(made: Bed, rounds: int) -> list[Sample]:
    """One changed file of few, on a channel whose agent has answered: without the connection."""
    laptop = LaptopPaths(made.environment)
    (target,) = resolve(inventories.load(made.inventory, laptop), [TARGET])
    folder = made.folder / "small"
    folder.mkdir()
    found = []
    with Fleet(LaptopState(laptop)) as fleet:
        channel = fleet.container(target)
        channel.hello()
        for number in range(-1, 5 * rounds):
            (folder / "module.bin").write_bytes(random.Random(number).randbytes(SIZE))
            release = releases.build(snapshot.find_root(folder, folder), laptop)
            begun, cpu = time.perf_counter(), time.process_time()
            blobs, commit = Push(channel, release, Arrivals(None)).send()
            for request in [*blobs, commit]:
                request.result()
            found.append(Sample(time.perf_counter() - begun, time.process_time() - cpu))
    # With the first one the agent imports what it needs.
    return found[1:]


def pulls(made: Bed, rounds: int) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {name: [] for name in ("pull", "cat", "rsync")}
    run_id = made.said("launch", TARGET, "--force", "--wait").splitlines()[0]
    made.inside(
        f"mkdir -p {CHECKPOINT}; "
        f"head -c {CHECKPOINT_MB}000000 /dev/urandom > {CHECKPOINT}/weights.safetensors"
    )
    out = made.folder / "out"
    for _ in range(rounds):
        for name in found:
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            if name == "pull":
                words = ("pull", run_id, "--path", CHECKPOINT, "--to", out)
                found[name].append(made.dflashctl(*words))
            elif name == "cat":
                far = shlex.join(made.ssh(f"pct exec {CT} -- cat {CHECKPOINT}/weights.safetensors"))
                found[name].append(shell(f"{far} > weights.safetensors", out))
            else:
                found[name].append(rsync(made, f"{CHECKPOINT}/", "./", out, back=True))
            size = (out / "weights.safetensors").stat().st_size
            assert size == CHECKPOINT_MB * 1_000_000, size
    return found


def rows(made: Bed, rtt_ms: float, rounds: int) -> list[Row]:
    pushed, pulled = pushes(made, rounds), pulls(made, rounds)

    def speed(megabytes: float, samples: list[Sample]) -> float:
        return megabytes / median(samples)

    def row(
        what: str, ours: float, theirs: float | None, unit: str, beside: str, goal: str = ""
    ) -> Row:
        return Row(what, rtt_ms, ours, theirs, unit, beside, goal)

    push, pull = speed(MB, pushed["push"]), speed(CHECKPOINT_MB, pulled["pull"])
    whole, back = f"push {MB:.0f} MB, {FILES:,} files", f"pull a checkpoint of {CHECKPOINT_MB} MB"
    floor = "≥ 1 ×; ≥ 60 MB/s at 20 ms"
    cat = speed(CHECKPOINT_MB, pulled["cat"])
    one, other = median(pushed["one"]), median(pushed["one rsync"])
    return [
        row(whole, push, speed(MB, pushed["tar"]), "MB/s", "tar through pct exec", floor),
        row(whole, push, speed(MB, pushed["rsync"]), "MB/s", "rsync, without pct"),
        row("push, one file changed", one, other, "s", "rsync, without pct"),
        row(
            "the same of a small tree, beyond the connection",
            1000 * median(beyond(made, rounds)),
            2 * rtt_ms or None,
            "ms",
            "two round trips",
            "≤ 2 round trips",
        ),
        row(back, pull, cat, "MB/s", "cat through pct exec"),
        row(back, pull, speed(CHECKPOINT_MB, pulled["rsync"]), "MB/s", "rsync, without pct"),
    ]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--rtt-ms", type=float, default=0.0)
    given = options.parse_args()
    if shutil.which("rsync") is None:
        raise SystemExit("rsync is missing: apt install rsync")
    subprocess.run(["sync"], check=True)
    with bed(given.rtt_ms) as made:
        found = rows(made, given.rtt_ms, given.rounds)
        print(circumstances())
    print(HEADER, *(row.markdown() for row in found), sep="\n")


if __name__ == "__main__":
    main()
