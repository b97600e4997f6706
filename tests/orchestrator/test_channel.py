"""The channel against the real agent, over pipes in place of ssh and pct."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_peer import ProcessLink, furnish

from orchestrator import agent_bundle, channel, request
from orchestrator.agent import loader
from orchestrator.agent_failure import kind_of
from orchestrator.channel import AgentChannel
from orchestrator.errors import (
    ConnectionLost,
    ContainerNotRunning,
    ExecFailed,
    NotFoundError,
    RefusedError,
    RunNotFound,
    TransferError,
)

PYTHON = sys.executable


class Pipes(ProcessLink):
    """``deaf`` makes it a dead one."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__(argv)
        self.deaf = threading.Event()

    def receive(self) -> bytes:
        data = super().receive()
        if self.deaf.is_set():
            threading.Event().wait(30)
        return data


Open = Callable[..., AgentChannel]


@pytest.fixture
def open_channel(tmp_path: Path, warm_program: Path) -> Iterator[Open]:
    """Where the program lies already, unless it is the first time: ``cold``."""
    opened: list[tuple[AgentChannel, Pipes]] = []
    warm = furnish(tmp_path / "warm", warm_program)

    def make(
        argv: list[str] | None = None, *, trusted: bool = False, cold: bool = False
    ) -> AgentChannel:
        link = Pipes(argv or loader.argv(PYTHON))
        workdir = tmp_path / "cold" if cold else warm
        found = AgentChannel(
            link, agent_bundle.bundle(), str(workdir), trusted=trusted, host="pve1", ct=200
        )
        opened.append((found, link))
        return found

    yield make
    for one, link in opened:
        one.close()
        link.process.kill()
        link.process.wait()


def link_of(one: AgentChannel) -> Pipes:
    assert isinstance(one._link, Pipes)
    return one._link


def test_requests_go_out_before_the_agent_has_spoken(open_channel: Open) -> None:
    one = open_channel()
    asked = [one.request("ping") for _ in range(20)]
    assert all(request.result()["time"] > 0 for request in asked)
    assert one.hello()["stored"] == "workdir"


def test_the_program_travels_only_when_it_is_absent(open_channel: Open) -> None:
    size = len(agent_bundle.bundle().data)
    first = open_channel(trusted=True, cold=True)
    assert first.call("ping")
    assert link_of(first).sent > size
    second = open_channel(trusted=True, cold=True)
    assert second.call("ping")
    assert link_of(second).sent < 2000


def test_what_a_login_shell_prints_first_is_passed_over(open_channel: Open) -> None:
    noisy = "head -c 300000 /dev/zero; printf 'Welcome\\n\\0DFLA'; exec \"$@\""
    one = open_channel(["sh", "-c", noisy, "sh", *loader.argv(PYTHON)])
    assert one.call("ping")


def test_errors_of_a_request_leave_the_others_alone(open_channel: Open) -> None:
    one = open_channel()
    bad, good = one.request("run.status", run_id="nobody-20260101-000000-aaaa"), one.request("ping")
    with pytest.raises(RunNotFound) as caught:
        bad.result()
    assert kind_of(caught.value) == "run.not_found"
    assert (caught.value.host, caught.value.ct) == ("pve1", 200)
    assert good.result()
    with pytest.raises(ExecFailed, match=r"op\.unknown"):
        one.call("no.such.op")


@pytest.mark.parametrize("trusted", [True, False])
def test_large_input_is_sent_in_pieces_and_acknowledged(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    import hashlib

    data = bytes(range(256)) * (1 << 14) * 10
    one = open_channel(trusted=trusted)
    digest = hashlib.sha256(data).hexdigest()
    sending = one.request("release.blobs", blobs=[[digest, len(data)]], encoding="raw", more=True)
    sending.feed(data[start : start + 700_000] for start in range(0, len(data), 700_000))
    assert sending.result()["bytes"] == len(data)


def test_input_of_a_request_that_failed_stops_early(open_channel: Open) -> None:
    one = open_channel()
    sending = one.request("release.blobs", blobs=[["0" * 64, 3]], encoding="raw", more=True)
    sending.feed(b"xyz" for _ in range(1))
    with pytest.raises(TransferError):
        sending.result()
    assert one.call("ping")


@pytest.mark.slow
def test_a_reader_that_is_far_behind_makes_the_far_side_wait(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(request, "BACKLOG", 1 << 20)
    monkeypatch.setattr(channel, "DEAD_S", 0.5)
    monkeypatch.setattr(channel, "QUIET_S", 0.1)
    big = tmp_path / "big"
    big.write_bytes(b"x" * (8 << 20))
    one = open_channel()
    reading = one.request("pull.read", path=str(big), offset=0)
    threading.Event().wait(1.5)
    assert sum(len(payload) for _, payload in reading.frames()) == 8 << 20


# Ends


def test_the_end_of_input_ends_the_agent(open_channel: Open) -> None:
    one = open_channel()
    one.hello()
    one.close()
    assert link_of(one).process.wait(10) is not None
    with pytest.raises(ConnectionLost):
        one.call("ping")


def test_a_dead_link_is_noticed_by_pings(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "DEAD_S", 1.0)
    monkeypatch.setattr(channel, "QUIET_S", 0.3)
    one = open_channel()
    one.hello()
    link_of(one).deaf.set()
    with pytest.raises(ConnectionLost, match="no answer for"):
        one.request("exec", command=["sleep", "60"]).result()
    assert not one.link_alive


@pytest.mark.slow
def test_a_quiet_link_that_answers_pings_is_not_dead(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "DEAD_S", 1.0)
    monkeypatch.setattr(channel, "QUIET_S", 0.3)
    one = open_channel()
    one.hello()
    assert one.call("exec", command=["sleep", "2.5"])["exit_code"] == 0


def test_an_agent_that_is_killed_is_a_lost_connection_and_no_failed_run(open_channel: Open) -> None:
    one = open_channel()
    waiting = one.request("exec", command=["sleep", "60"])
    one.hello()
    link_of(one).process.kill()
    with pytest.raises(ConnectionLost, match="the agent ended"):
        waiting.result()
    assert one.link_alive


def test_pcts_own_words_tell_why_nothing_started(open_channel: Open) -> None:
    one = open_channel(["sh", "-c", "echo \"container '200' not running!\" >&2; exit 255"])
    with pytest.raises(ContainerNotRunning):
        one.call("ping")
    with pytest.raises(ContainerNotRunning):
        one.hello()


def test_a_container_that_never_answers_is_told_as_maybe_frozen(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "START_S", 0.5)
    with pytest.raises(ExecFailed, match="frozen"):
        open_channel(["sleep", "60"]).hello()


@pytest.mark.parametrize(
    "words,step", [("json 3.11.2 /usr/bin/python3", "apt install"), ("python 3.8.1 /p", "3.10")]
)
def test_a_python_that_will_not_do_is_refused(open_channel: Open, words: str, step: str) -> None:
    with pytest.raises(RefusedError) as caught:
        open_channel(["printf", f"\\000DFLASH0 {words}\\n"]).hello()
    assert step in caught.value.next_step
    assert words.split()[1] in caught.value.what


def test_noise_without_an_agent_is_shown(open_channel: Open) -> None:
    with pytest.raises(ExecFailed, match="This account is locked"):
        open_channel(["sh", "-c", "echo This account is locked; exit 1"]).hello()


def test_an_agent_that_is_killed_after_its_first_word_printed_nothing(open_channel: Open) -> None:
    with pytest.raises(ExecFailed) as caught:
        open_channel(["printf", "\\000DFLASH1\\n"]).hello()
    assert caught.value.what == "the agent did not start (exit code 0); nothing was printed"


@pytest.mark.parametrize("is_known", [True, False])
def test_what_ended_before_the_agent_spoke_and_left_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """By a signal, or with the link. Who can ask is asked before the link is blamed."""
    monkeypatch.setattr(Pipes, "status", lambda self, timeout: None)
    reason = ExecFailed("the login shell does not run it")
    with (
        AgentChannel(
            Pipes(["sh", "-c", "echo Welcome"]),
            agent_bundle.bundle(),
            str(tmp_path),
            trusted=True,
            host="pve1",
            ct=200,
            on_no_word=lambda heard, status: reason if is_known else None,
        ) as one,
        pytest.raises(ExecFailed if is_known else ConnectionLost) as caught,
    ):
        one.call("ping")
    assert caught.value is reason or "ended while the agent was starting" in caught.value.what


def test_a_missing_file_is_told_as_such(open_channel: Open) -> None:
    with pytest.raises(NotFoundError):
        open_channel().call("pull.read", path="/no/such/file")
