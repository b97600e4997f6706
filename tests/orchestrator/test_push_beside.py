"""A large push to a far container goes over several sessions; what the further ones do not bring,
the first does. Real agents, on pipes whose answers come late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_push import Shown
from test_push_turns import SLOW_S, Far, SlowLink

from orchestrator import push as pushing
from orchestrator.agent_bundle import bundle
from orchestrator.channel import AgentChannel
from orchestrator.errors import ConnectionLost, HostUnreachable
from orchestrator.push import Arrivals, Push
from orchestrator.release import Entry
from orchestrator.request import Request

pytestmark = pytest.mark.slow

FILES = 20
SIZE = 50_000


class Bench:
    """Two agents in one container's work folder."""

    def __init__(self, far: Far) -> None:
        self.far = far
        self.asked: list[AgentChannel] = []

    def channel(self) -> AgentChannel:
        link = SlowLink(self.far.workdir)
        return AgentChannel(link, bundle(), str(self.far.workdir), trusted=False, host="h", ct=1)

    def beside(self) -> AgentChannel:
        channel = self.channel()
        self.asked.append(channel)
        return channel

    def push(self, beside: bool = True) -> dict[str, object]:
        arrived = Shown()
        with self.channel() as channel:
            channel.hello()
            push = Push(
                channel, self.far.release(), Arrivals(arrived), self.beside if beside else None
            )
            blobs, commit = push.send()
            for request in [*blobs, commit]:
                request.result()
            assert arrived.expected == FILES * SIZE >= arrived.done
            return dict(commit.result())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(pushing, "BATCH_BYTES", SIZE)
    monkeypatch.setattr(pushing, "WORTH_ANOTHER", SIZE)
    # An answer may seem a little quicker: the clock is read after the asking.
    monkeypatch.setattr(pushing, "FAR_S", SLOW_S / (pushing.FURTHER + 1))
    far = Far(tmp_path)
    for number in range(FILES):
        (far.code / f"file{number}").write_bytes(number.to_bytes(2, "big") * (SIZE // 2))
    yield Bench(far)


@pytest.fixture
def waits_for_another(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The first takes no batch before this is set."""
    begun = threading.Event()
    take = Push._next

    def patient(self: Push) -> list[Entry] | None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(60)
            return take(self)
        batch = take(self)
        begun.set()
        return batch

    monkeypatch.setattr(Push, "_next", patient)
    return begun


def complete(bench: Bench, answer: dict[str, object]) -> bool:
    released = Path(str(answer["path"]))
    return all(
        (released / path.name).read_bytes() == path.read_bytes()
        for path in bench.far.code.iterdir()
    )


def test_all_carry_batches_and_the_release_is_whole(
    bench: Bench, waits_for_another: threading.Event
) -> None:
    answer = bench.push()

    assert len(bench.asked) == pushing.FURTHER
    assert waits_for_another.is_set()
    assert complete(bench, answer)


def test_what_another_that_is_cut_had_taken_the_first_sends(
    bench: Bench, waits_for_another: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Push._send_batch

    def cut(self: Push, lane: pushing._Lane, batch: list[Entry]) -> Request:
        if threading.current_thread() is not threading.main_thread():
            raise ConnectionLost("cut on purpose")
        return send(self, lane, batch)

    monkeypatch.setattr(Push, "_send_batch", cut)

    assert complete(bench, bench.push())


def test_another_that_cannot_be_had_costs_nothing(bench: Bench) -> None:
    asked = threading.Event()

    def refused() -> AgentChannel:
        asked.set()
        raise HostUnreachable("no more sessions")

    bench.beside = refused  # type: ignore[method-assign]

    assert complete(bench, bench.push())
    assert asked.is_set()


@pytest.mark.parametrize("why", ["near", "small", "shared"])
def test_none_is_asked_for_where_one_is_as_good(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "near":
        monkeypatch.setattr(pushing, "FAR_S", 60.0)
    if why == "small":
        monkeypatch.setattr(pushing, "WORTH_ANOTHER", FILES * SIZE + 1)

    answer = bench.push(beside=why != "shared")

    assert not bench.asked
    assert complete(bench, answer)
