"""The agent alone, on this machine: what its start costs and what the supervisor carries.

    python benchmarks/controller/agent.py [INTERPRETER]

Prints medians beside what they are compared with: a bare interpreter, the tmux one-liner, ``tee``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "tests")]

from agent_peer import Peer  # noqa: E402 - found by the line above

TURNS = 15
LINES = 3_000_000


def median_ms(action: Callable[[int], object]) -> float:
    found = []
    for turn in range(TURNS):
        began = time.perf_counter()
        action(turn)
        found.append(time.perf_counter() - began)
    return statistics.median(found) * 1000


class Bench:
    def __init__(self, python: str, folder: Path) -> None:
        self.python = python
        self.folder = folder
        self.environment = {**os.environ, "TMUX_TMPDIR": str(folder)}
        self.agent().close()

    def agent(self) -> Peer:
        return Peer(self.folder, python=self.python, environment=self.environment)

    def shell(self, *command: str) -> None:
        subprocess.run(command, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def once(self, op: str, **fields: Any) -> None:
        agent = self.agent()
        agent.call(op, **fields)
        agent.close()

    def starts(self) -> None:
        bare = median_ms(lambda turn: self.shell(self.python, "-I", "-S", "-c", "pass"))
        print(f"interpreter alone          {bare:7.1f} ms")
        listing = median_ms(lambda turn: self.once("run.list"))
        print(f"agent, run.list, end       {listing:7.1f} ms")
        pipe = "sleep 9 2>&1 | tee /dev/null"
        plain = median_ms(
            lambda turn: self.shell("tmux", "new-session", "-d", "-s", f"b{turn}", pipe)
        )
        print(f"tmux new-session, with tee {plain:7.1f} ms")
        start = median_ms(
            lambda turn: self.once(
                # The one before may just be ending.
                "run.start",
                run_id=f"r-{turn}",
                name=f"{turn}",
                command=["true"],
                force=True,
            )
        )
        print(f"agent, run.start, end      {start:7.1f} ms")

    def carries(self) -> None:
        log = self.folder / "tee.log"
        began = time.perf_counter()
        self.shell("bash", "-c", f"seq -f 'line %.0f of the log of a run' {LINES} | tee {log}")
        tee = LINES / (time.perf_counter() - began)
        agent = self.agent()
        command = ["seq", "-f", "line %.0f of the log of a run", str(LINES)]
        began = time.perf_counter()
        agent.call("run.start", run_id="flood", name="flood", command=command, force=True)
        _, frames = agent.finish(agent.send("tail", run_id="flood"))
        ours = LINES / (time.perf_counter() - began)
        got = sum(payload.count(b"\n") for _, payload in frames)
        agent.close()
        print(f"tee                        {tee:10,.0f} lines/s")
        print(f"supervisor and tail        {ours:10,.0f} lines/s, {got:,} of {LINES:,} lines")

    def close(self) -> None:
        subprocess.run(["tmux", "kill-server"], env=self.environment, check=False)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="dfl") as folder:
        bench = Bench(sys.argv[1] if len(sys.argv) > 1 else "/usr/bin/python3", Path(folder))
        bench.starts()
        bench.carries()
        bench.close()


if __name__ == "__main__":
    main()
