"""The agent through the real way: ssh, pct exec, a container of its own kernel view."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_peer import Peer
from laptop import new_name, until

from orchestrator.agent.loader import argv
from orchestrator.lab import Lab
from orchestrator.paths import HOST_WORKDIR

pytestmark = pytest.mark.lab

Open = Callable[..., Peer]


@pytest.fixture
def channel(lab: Lab) -> Iterator[Open]:
    """``channel(200)`` is an agent in that container, ``channel(None)`` one on the host."""
    peers: list[Peer] = []

    def start(ct: int | None, workdir: str = "/workspace", python: str = "python3") -> Peer:
        words = argv(python) if ct is None else ["pct", "exec", str(ct), "--", *argv(python)]
        command = lab.ssh_argv(shlex.join(words))
        place = Path(workdir if ct is not None else HOST_WORKDIR)
        peers.append(Peer(place, command=command, send_program=True))
        return peers[-1]

    yield start
    for peer in peers:
        if peer.process.poll() is None:
            for run in peer.call("run.list", live=True)["runs"]:
                peer.call("run.stop", run_id=run["run_id"], grace_s=0)
            peer.close()


def start(agent: Peer, *command: str, **fields: Any) -> dict[str, Any]:
    run_id = new_name("lab")
    return agent.call("run.start", run_id=run_id, name=run_id, command=list(command), **fields)


def test_a_run_lives_on_when_its_channel_is_cut(channel: Open) -> None:
    first = channel(200)
    hello = first.hello()
    assert hello["workdir"] == "/workspace" and hello["tmux"]
    run = start(first, "bash", "-c", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.2; done; exit 3")
    first.process.kill()
    first.process.wait()
    second = channel(200)
    head, frames = second.finish(second.send("tail", run_id=run["run_id"]))
    assert b"".join(payload for _, payload in frames).startswith(b"1\n2\n3\n4\n5\n6\n")
    assert second.call("run.status", run_id=run["run_id"])["exit_code"] == 3
    assert head["result"]["reason"] == "ended"


def test_the_short_path_and_the_leaked_environment_do_not_reach_the_run(channel: Open) -> None:
    agent = channel(200)
    run = start(agent, "sh", "-c", 'echo "$PATH"; env | grep -c ^SSH_; echo $HOME')
    head, frames = agent.finish(agent.send("tail", run_id=run["run_id"]))
    path, leaked, home = b"".join(payload for _, payload in frames).decode().split()[:3]
    assert head["ok"] and "/usr/local/bin" in path.split(":")
    assert (leaked, home) == ("0", "/root")


LISTENING = r"""
import glob, os, re
for folder in glob.glob("/proc/[0-9]*"):
    try:
        command = open(f"{folder}/cmdline", "rb").read().split(b"\0")
        agent, supervisor = command[1:4] == [b"-I", b"-S", b"-c"], b"supervise" in command
        if not agent and not supervisor:
            continue
        links = [os.readlink(link) for link in glob.glob(f"{folder}/fd/*")]
        print("seen", supervisor)
        for kind, states in (("tcp", "0A"), ("tcp6", "0A"), ("udp", ""), ("udp6", "")):
            for line in open(f"{folder}/net/{kind}").readlines()[1:]:
                words = line.split()
                if f"socket:[{words[9]}]" in links and words[3] in (states or words[3]):
                    print("listens", command, line)
    except OSError:
        pass
"""


def test_neither_agents_nor_supervisors_listen_on_a_port(channel: Open) -> None:
    inside, outside = channel(200), channel(None)
    start(inside, "sleep", "60")
    # The host sees every container's processes.
    _, frames = outside.finish(outside.send("exec", command=["python3", "-c", LISTENING]))
    lines = b"".join(payload for _, payload in frames).decode().splitlines()
    assert {"seen True", "seen False"} == set(lines)


def test_containers_do_not_see_each_other(channel: Open) -> None:
    one, other = channel(200), channel(201)
    assert one.hello()["boot_id"] != other.hello()["boot_id"]
    run = start(one, "sleep", "60")
    assert run["run_id"] not in [found["run_id"] for found in other.call("run.list")["runs"]]


def test_the_tmux_server_of_the_container_may_die(channel: Open) -> None:
    agent = channel(201)
    run = start(agent, "sh", "-c", "sleep 1.5; echo survived; exit 4")
    agent.call("exec", command=["tmux", "kill-server"])
    agent.finish(agent.send("tail", run_id=run["run_id"]))
    found = agent.call("run.status", run_id=run["run_id"])
    assert (found["exit_code"], found["last_lines"][0]) == (4, "survived")


def test_the_host_sees_its_containers_as_pct_does(channel: Open, lab: Lab) -> None:
    agent = channel(None)
    found = {one["ct"]: one for one in agent.call("ct.list")["containers"]}
    assert {ct: one["status"] for ct, one in found.items()} == {
        200: "running",
        201: "running",
        202: "stopped",
    }
    probes = agent.call("probe", side="host", ct=200)["probes"]
    assert probes["pct_status"]["text"] == lab.pct("status", 200).strip()
    assert probes["pct_config"]["text"] == lab.pct("config", 200).strip()
    assert probes["pct_list"]["text"].split() == lab.pct("list").split()


def test_a_lease_follows_a_run_inside_a_container(channel: Open) -> None:
    container, host = channel(200), channel(None)
    run = start(container, "sleep", "60")
    gpu = new_name("GPU")
    fields = {"gpus": [gpu], "run_id": run["run_id"], "ct": 200, "owner": {"user": "ann"}}
    host.call("lease.acquire", **fields)
    # Older than any start could be: only the living process keeps it.
    edit = f'sed -i \'s/"created": [0-9.]*/"created": 1.0/\' /var/lib/dflashctl/leases/{gpu}.json'
    host.call("exec", command=["sh", "-c", edit])

    def stale() -> bool:
        leases = host.call("lease.list")["leases"]
        return bool(next(one["stale"] for one in leases if one["gpu"] == gpu))

    assert not stale()
    container.call("run.stop", run_id=run["run_id"], grace_s=1)
    until(stale)
    assert host.call("lease.release", run_id=run["run_id"])["released"] == [gpu]


@pytest.mark.slow
def test_a_reboot_under_a_run_is_told_from_a_crash(channel: Open, lab: Lab) -> None:
    run = start(channel(201), "sleep", "600")
    lab.pct("stop", 201)
    lab.pct("start", 201)
    found = channel(201).call("run.list")["runs"]
    # The lab keeps a container's work folder over a start, as a disk does.
    (mine,) = [one for one in found if one["run_id"] == run["run_id"]]
    assert (mine["state"], mine["rebooted"]) == ("failed", True)
    assert "rebooted under the run" in mine["reason"]
