"""The process in a run's tmux pane: starts the supervisor, waits for it, ends as the command ended.

Whatever becomes of the pane, the supervisor has a session of its own and goes on.
"""

from __future__ import annotations

import os
import signal

from orchestrator.agent import process
from orchestrator.agent.files import read_record
from orchestrator.agent.records import describe_end
from orchestrator.agent.supervisor import supervise
from orchestrator.paths import RunPaths


def main(folder: str) -> int:
    """Returns the command's exit code, or 128 and the number of the signal that ended it."""
    paths = RunPaths(folder)
    reading, writing = os.pipe()
    tmux = os.getppid()
    first = os.fork()
    if first == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.close(reading)
        # ``writing`` stays open in the supervisor alone: its end is the end of file for the pane.
        os._exit(supervise(paths, tmux))
    os.close(writing)
    os.waitpid(first, 0)

    def pass_on(number: int, frame: object) -> None:
        record = read_record(paths.supervisor)
        if record is not None and process.alive(record["pid"], record["start"]):
            os.kill(record["pid"], signal.SIGINT)

    # Ctrl-C in an attached pane is a person's stop: the trainer shall write its checkpoint.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, pass_on)
    while os.read(reading, 1):
        pass
    record = read_record(paths.exit)
    if record is None:
        print("[dflashctl] the supervisor ended without a record", flush=True)
        return 1
    print(f"[dflashctl] {paths.run_id}: {describe_end(record)}", flush=True)
    if record["exit_code"] is not None:
        return int(record["exit_code"])
    return 128 + int(record["signal"] or 0)
