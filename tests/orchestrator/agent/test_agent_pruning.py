"""Old releases go, and nothing that anybody still needs; nobody waits for their files."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from test_agent_releases import content, leftovers, push

from orchestrator.agent.release_store import prune
from orchestrator.agent.serve import Request, Server
from orchestrator.paths import ContainerPaths


def test_the_answer_does_not_wait_for_the_files(agents: Any, workdir: Path) -> None:
    for number in range(2):
        agent = agents()
        push(agent, {b"a": b"%d" % number})
        agent.close()
    server = Server(-1, -1, str(workdir), "", lambda name: prune)
    request = Request(server, {"id": 1, "keep": 1}, b"")

    assert len(prune(request)["removed"]) == 1

    (hidden,) = (workdir / "dflashctl/releases").glob(".removed-*")
    assert (hidden / "a").read_bytes() == b"0"
    request.afterwards()
    assert leftovers(workdir) == []


def test_pruning_keeps_the_newest_and_what_a_job_wrote_into(agents: Any, workdir: Path) -> None:
    agent = agents()
    made = [push(agent, {b"a": b"%d" % number, b"same": b"s"}) for number in range(4)]
    Path(made[1]["path"], "checkpoint.pt").write_bytes(b"precious")
    old = time.time() - 7200
    for blob in (workdir / "dflashctl/blobs").glob("*/*"):
        os.utime(blob, (old, old))
    gone = agent.call("release.prune", keep=1)
    assert sorted(gone["removed"]) == sorted([made[0]["release"], made[2]["release"]])
    assert gone["kept"] == [
        {"release": made[1]["release"], "why": "holds files of a job", "files": ["checkpoint.pt"]}
    ]
    assert content(made[3]["path"]) == {b"a": b"3", b"same": b"s"}

    # The laptop may go with the answer: the agent ends when all is removed.
    agent.close()
    blobs = {blob.name for blob in (workdir / "dflashctl/blobs").glob("*/*")}
    assert blobs == {hashlib.sha256(data).hexdigest() for data in (b"1", b"3", b"s")}
    assert leftovers(workdir) == []
    assert content(push(agents(), {b"a": b"0", b"same": b"s"})["path"])[b"a"] == b"0"


def test_what_a_prune_left_when_it_was_killed_goes_with_the_next(agent: Any, workdir: Path) -> None:
    push(agent, {b"a": b"0"})
    hidden = workdir / "dflashctl/releases/.removed-before"
    hidden.mkdir()
    (hidden / "a").write_bytes(b"0")
    assert agent.call("release.prune", keep=1)["failed"] == []
    assert not hidden.exists()


def test_what_was_pushed_stays_until_its_channel_ends_whoever_prunes(agents: Any) -> None:
    """A launch has its config checked with it, for which torch is loaded, before a run starts."""
    launching, other = agents(), agents()
    waits = push(launching, {b"a": b"0"})
    push(other, {b"a": b"1"})
    gone = other.call("release.prune", keep=1)
    assert (gone["removed"], [one["release"] for one in gone["kept"]]) == ([], [waits["release"]])
    assert content(waits["path"]) == {b"a": b"0"}
    launching.close()
    assert other.call("release.prune", keep=1)["removed"] == [waits["release"]]


def test_pruning_keeps_a_release_whose_files_a_job_changed(agent: Any) -> None:
    old, new = (push(agent, {b"notes.json": b"%d" % number}) for number in range(2))
    Path(old["path"], "notes.json").write_bytes(b"{results}")
    assert agent.call("release.prune", keep=1)["removed"] == []
    assert content(old["path"]) == {b"notes.json": b"{results}"}
    assert content(new["path"]) == {b"notes.json": b"1"}


def test_a_release_that_is_pushed_again_is_the_newest_when_old_ones_are_pruned(agent: Any) -> None:
    first, second = (push(agent, {b"a": b"%d" % number}) for number in range(2))
    again = push(agent, {b"a": b"0"})
    assert (again["release"], again["existing"]) == (first["release"], True)
    assert agent.call("release.prune", keep=1)["removed"] == [second["release"]]
    assert content(again["path"]) == {b"a": b"0"}


@pytest.mark.parametrize("again", [False, True])
def test_what_was_just_pushed_is_never_the_oldest_though_the_clock_was_set_back(
    agent: Any, workdir: Path, again: bool
) -> None:
    first, second = (push(agent, {b"a": b"%d" % number}) for number in range(2))
    ahead = time.time() + 7200
    os.utime(ContainerPaths(str(workdir)).release_record(second["release"]), (ahead, ahead))
    last = push(agent, {b"a": b"0" if again else b"new"})
    assert last["existing"] == again
    removed = {first["release"], second["release"]} - {last["release"]}
    assert set(agent.call("release.prune", keep=1)["removed"]) == removed
