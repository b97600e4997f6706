"""The agent on every Python that a container may have."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from agent_peer import interpreters

from orchestrator.agent.manifest import Entry, dump

pytestmark = pytest.mark.slow

PYTHONS = interpreters("3.10", "3.12", "3.13")
if Path("/usr/bin/python3").exists():
    PYTHONS.append(Path("/usr/bin/python3"))


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parts[-3])
def test_push_start_tail_look_and_stop(runs: Any, python: Path) -> None:
    # Twice: from sources, and from what the first one compiled.
    for turn in range(2):
        agent = runs.new_agent(python=str(python), send_program=not turn)
        data = f"echo from turn {turn}; sleep 600\n".encode()
        entry = Entry("f", "go.sh", hashlib.sha256(data).hexdigest(), len(data))
        begun = agent.stream("release.begin", dump([entry]))
        blobs = agent.stream("release.blobs", data, blobs=[[entry.digest, len(data)]])
        commit = agent.send("release.commit", begin=begun, after=[begun, blobs])
        run_id = runs.new_id()
        start = agent.send(
            "run.start", run_id=run_id, command=["bash", "go.sh"], release_from=commit, name=run_id
        )
        run = agent.result(start)
        tail = agent.send("tail", run_id=run_id)
        while b"from turn" not in agent.receive(tail)[1]:
            pass
        assert agent.call("run.status")["state"] == "training"
        assert agent.call("preflight", python=str(python))["checks"]["python"]["ok"]
        assert agent.call("probe", names=["ps", "df"], run_id=run_id)["probes"]["ps"]["ok"]
        assert len(agent.call("stacks", run_id=run_id)["stacks"]) >= 2
        assert agent.call("run.stop", run_id=run_id, grace_s=5)["state"] == "stopped"
        assert agent.result(tail)["reason"] == "ended"
        assert runs.ending(run)["signal"] == 2
        assert agent.close() == 0
        assert agent.errors == b""
