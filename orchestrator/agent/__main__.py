"""Where the loader and the tmux pane enter the agent.

Imports stay inside the functions that need them: of ``launch``'s 1.2 s some 0.25 s may be ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

OPERATIONS = {
    "release.begin": "release:begin",
    "release.blobs": "release:blobs",
    "release.commit": "release:commit",
    "release.prune": "release_store:prune",
    "run.start": "start:start",
    "run.list": "status:listing",
    "run.status": "status:status",
    "run.stop": "stop:stop",
    "run.attach": "attach:attach",
    "tail": "tail:tail",
    "exec": "execute:execute",
    "pull.list": "pull:listing",
    "pull.read": "pull:read",
    "pull.last_checkpoint": "pull:last_checkpoint",
    "preflight": "preflight:preflight",
    "probe": "probe:probe",
    "gpu.processes": "gpu:processes",
    "stacks": "stacks:stacks",
    "ct.list": "host:containers",
    "lease.acquire": "lease:acquire",
    "lease.release": "lease:release",
    "lease.list": "lease:listing",
    "audit": "host:audit",
    "relay": "relay:relay",
}
"""Operation → module and function; a module is imported when first asked for."""


def find(name: str) -> Callable[[Any], dict[str, Any]]:
    from orchestrator.agent.protocol import AgentError

    place = OPERATIONS.get(name)
    if place is None:
        raise AgentError("op.unknown", f"this agent has no operation {name!r}")
    module, function = place.split(":")
    full = f"orchestrator.agent.{module}"
    __import__(full)
    operation: Callable[[Any], dict[str, Any]] = getattr(sys.modules[full], function)
    return operation


def serve(digest: str, workdir: str, program: str, lock: BinaryIO) -> None:
    """The loader's last step. ``lock`` is ``program``, open: held shared, it cannot be pruned."""
    from orchestrator.agent import program as own
    from orchestrator.agent.serve import Server, take_standard_streams

    own.hold(lock)
    own.set_environment()
    source, sink = take_standard_streams()
    server = Server(source, sink, workdir, program, find)
    server.run(own.hello(digest, workdir, program))
    # A commit in flight may end by itself, streams and commands have been told to: a command that
    # ignores TERM is killed after 2 s.
    server.wait_idle(5.0)
    own.tidy(program)
    # Not sys.exit: a thread may hang in the kernel on a dead mount, and pct waits for our end.
    os._exit(0)


def main() -> None:
    """``<program>.pyz supervise <run folder>``: the command of a run's tmux pane."""
    if sys.argv[1:2] != ["supervise"] or len(sys.argv) != 3:
        sys.exit("usage: agent.pyz supervise RUN_FOLDER")
    from orchestrator.agent.pane import main as attend

    sys.exit(attend(sys.argv[2]))


if __name__ == "__main__":
    main()
