"""The way through a host's agent: real agents, started by a real one; pipes in place of ssh."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_peer import ProcessLink, furnish

from orchestrator import agent_bundle, channel
from orchestrator.agent import loader, protocol
from orchestrator.agent import relay as relaying
from orchestrator.channel import AgentChannel
from orchestrator.errors import ConnectionLost, ContainerNotRunning, ExecFailed
from orchestrator.relay import RelayLink

pytestmark = pytest.mark.slow

AGENT = loader.argv(sys.executable)
MEMORY_KB = 45_000
"""Twice what a host's agent has at most; 40 MB more and it has kept what nobody reads."""


class Host(ProcessLink):
    """The agent of a host, and ways through it to agents beside it."""

    def __init__(self, folder: Path, program: Path) -> None:
        """``program`` is the compiled one, for the folders of all that are not ``cold``."""
        self.folder = folder
        self.program = program
        super().__init__(AGENT)
        self.channel = self.open(self, "host", None)
        self.relays: list[AgentChannel] = []
        self.links: list[RelayLink] = []

    def open(
        self, link: channel.Link, name: str, ct: int | None, *, cold: bool = False
    ) -> AgentChannel:
        if not cold:
            furnish(self.folder / name, self.program)
        return AgentChannel(
            link,
            agent_bundle.bundle(),
            str(self.folder / name),
            trusted=False,
            host="pve1",
            ct=ct,
            queued=(lambda: link.waiting) if isinstance(link, RelayLink) else None,
        )

    def relay(
        self, argv: list[str] | None = None, ct: int = 200, *, cold: bool = False
    ) -> AgentChannel:
        link = RelayLink(self.channel, ct, argv or AGENT, agent_bundle.bundle().data)
        self.links.append(link)
        self.relays.append(self.open(link, str(ct), ct, cold=cold))
        return self.relays[-1]

    def close(self) -> None:
        pass


@pytest.fixture
def host(tmp_path: Path, warm_program: Path) -> Iterator[Host]:
    made = Host(tmp_path, warm_program)
    yield made
    for one in [*made.relays, made.channel]:
        one.close()
    made.process.kill()
    made.process.wait()


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def command_lines() -> set[bytes]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.add(path.read_bytes())
    return found


def gone(pid: int) -> bool:
    try:
        return b") Z" in Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return True


def test_many_agents_answer_beside_each_other_on_one_channel(host: Host) -> None:
    ways = [host.relay(ct=200 + number) for number in range(12)]
    asked = [way.request("exec", command=["true"]) for way in ways]
    assert [request.result()["exit_code"] for request in asked] == [0] * 12
    assert len({way.hello()["pid"] for way in ways}) == 12


def test_the_program_travels_to_the_host_once(host: Host) -> None:
    host.channel.hello()
    before = host.sent
    for number in range(3):
        assert host.relay(ct=200 + number, cold=True).hello()["stored"] == "workdir"
    assert host.sent - before < len(agent_bundle.bundle().data) / 2


def test_a_program_that_was_believed_to_be_there_comes_from_the_host_too(host: Host) -> None:
    host.channel.hello()
    before = host.sent
    program = agent_bundle.bundle()
    link = RelayLink(host.channel, 200, AGENT, program.data)
    folder = str(host.folder / "empty")
    with AgentChannel(link, program, folder, trusted=True, host="pve1", ct=200) as way:
        assert way.call("ping")["time"] > 0
    assert host.sent - before < len(program.data) / 2


def test_ten_megabytes_on_both_outputs_at_once_arrive_whole(host: Host) -> None:
    script = "head -c 10000000 /dev/zero & head -c 10000000 /dev/zero | tr '\\0' x >&2; wait"
    heard = {"stdout": 0, "stderr": 0}
    for head, payload in host.relay().request("exec", command=["sh", "-c", script]).frames():
        heard[head["stream"]] += len(payload)
    assert heard == {"stdout": 10_000_000, "stderr": 10_000_000}


def test_error_output_of_the_command_itself_stops_nothing(host: Host) -> None:
    noisy = "head -c 10000000 /dev/zero | tr '\\0' x >&2; exec \"$@\""
    assert host.relay(["sh", "-c", noisy, "sh", *AGENT]).call("ping")


def test_large_input_arrives_whole(host: Host) -> None:
    data = os.urandom(3 * protocol.WINDOW)
    request = host.relay().request("exec", command=["sha256sum"], more=True)
    request.feed(data[start : start + 700_000] for start in range(0, len(data), 700_000))
    out = b"".join(payload for head, payload in request.frames())
    assert out.split()[0].decode() == hashlib.sha256(data).hexdigest()


def memory_kb(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM"))


def test_a_reader_that_stops_makes_its_own_container_wait_and_no_other(host: Host) -> None:
    slow, quick = host.relay(ct=200), host.relay(ct=201)
    flood = slow.request("exec", command=["head", "-c", "100000000", "/dev/zero"])
    frames = flood.frames()
    next(frames)
    for _ in range(20):
        assert quick.call("exec", command=["true"])["exit_code"] == 0
        time.sleep(0.05)
    assert memory_kb(host.process.pid) < MEMORY_KB
    assert sum(len(payload) for _, payload in frames) > 90_000_000


def test_a_container_that_reads_nothing_holds_up_no_other(host: Host) -> None:
    # Its agent stands still, as in a frozen container.
    deaf, quick = host.relay(ct=200), host.relay(ct=201)
    pid = deaf.hello()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        request = deaf.request("exec", command=["cat"], more=True)
        sender = threading.Thread(target=request.feed, args=([bytes(1 << 20)] * 40,), daemon=True)
        sender.start()
        for _ in range(20):
            assert quick.call("exec", command=["true"])["exit_code"] == 0
        assert sender.is_alive()
        assert memory_kb(host.process.pid) < MEMORY_KB
    finally:
        os.kill(pid, signal.SIGCONT)


def test_what_hangs_at_its_start_keeps_no_other_from_starting(host: Host) -> None:
    frozen = [host.relay(["sleep", "60"], ct=300 + n) for n in range(relaying.AT_ONCE)]
    until(lambda: not any(link.waiting for link in host.links))
    assert host.relay(ct=200).call("ping")
    assert not any(way.is_over for way in frozen)


def test_waiting_for_a_turn_is_no_failure_to_start(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "START_S", 2.0)
    slow = ["sh", "-c", 'sleep 1; exec "$@"', "sh", *AGENT]
    ways = [host.relay(slow, ct=200 + n) for n in range(3 * relaying.AT_ONCE)]
    assert all(way.call("ping") for way in ways)


def test_only_so_many_start_at_a_time(host: Host, tmp_path: Path) -> None:
    mark = f'echo + >> {tmp_path}/log; sleep 0.3; echo - >> {tmp_path}/log; exec "$@"'
    ways = [
        host.relay(["sh", "-c", mark, "sh", *AGENT], ct=200 + n)
        for n in range(2 * relaying.AT_ONCE + 1)
    ]
    assert all(way.call("ping") for way in ways)
    starting = most = 0
    for sign in (tmp_path / "log").read_text().split():
        starting += 1 if sign == "+" else -1
        most = max(most, starting)
    assert most <= relaying.AT_ONCE


def test_a_relayed_command_that_is_killed_is_a_lost_connection_of_that_container_alone(
    host: Host,
) -> None:
    one, other = host.relay(ct=200), host.relay(ct=201)
    waiting = one.request("exec", command=["sleep", "60"])
    os.kill(one.hello()["pid"], signal.SIGKILL)
    with pytest.raises(ConnectionLost, match="the agent ended") as caught:
        waiting.result()
    assert (caught.value.host, caught.value.ct) == ("pve1", 200)
    assert other.call("ping") and host.channel.call("ping")


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_no_relayed_agent_outlives_the_hosts(host: Host, how: str) -> None:
    ways = [host.relay(ct=200 + number) for number in range(3)]
    pids = [way.hello()["pid"] for way in ways]
    waiting = ways[0].request("exec", command=["sleep", "600"])
    if how == "killed":
        host.process.kill()
    else:
        host.channel.close()
    with pytest.raises(ConnectionLost):
        waiting.result()
    until(lambda: all(gone(pid) for pid in pids))


def test_a_closed_way_ends_its_agent_and_no_other(host: Host) -> None:
    one, other = host.relay(ct=200), host.relay(ct=201)
    pid = one.hello()["pid"]
    one.close()
    until(lambda: gone(pid))
    assert other.call("ping")


def test_what_never_spoke_is_killed_when_nobody_wants_it_any_more(host: Host) -> None:
    link = RelayLink(host.channel, 200, ["sleep", "601"], b"")
    way = host.open(link, "200", 200)
    until(lambda: not link.waiting)
    way.close()
    until(lambda: b"sleep\0601\0" not in command_lines())


def test_pcts_own_words_tell_why_nothing_started(host: Host) -> None:
    words = "echo \"container '200' not running!\" >&2; exit 255"
    with pytest.raises(ContainerNotRunning):
        host.relay(["sh", "-c", words]).call("ping")


def test_a_host_without_pct_is_told_as_over_ssh(host: Host) -> None:
    with pytest.raises(ExecFailed, match="the host has no pct"):
        host.relay(["/no/such/pct", "exec", "200"]).hello()
