"""The bytes of a push: read as they were hashed, in bounded batches, each shown once."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_push_turns import Far, SlowLink

from orchestrator import push as pushing
from orchestrator import reconnect
from orchestrator import release as releases
from orchestrator.agent.protocol import PAYLOAD_LIMIT
from orchestrator.agent_bundle import bundle
from orchestrator.channel import AgentChannel
from orchestrator.errors import ConnectionLost, TransferError
from orchestrator.fleet import Fleet
from orchestrator.inventory import ContainerSettings, Host
from orchestrator.paths import LaptopPaths
from orchestrator.push import Arrivals, Push
from orchestrator.release import Entry, Release
from orchestrator.request import Request
from orchestrator.snapshot import Root
from orchestrator.state import LaptopState
from orchestrator.target import HostTarget, Target


def build(folder: Path) -> Release:
    laptop = LaptopPaths({"HOME": f"{folder}-home"})
    return releases.build(Root(folder, git=False), laptop)


def test_a_file_that_changes_under_the_push_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("12345")
    (entry,) = build(tmp_path).entries
    for now in ("123", "1234567"):
        path.write_text(now)
        with pytest.raises(TransferError, match="changed while"):
            list(pushing._read(entry, memoryview(bytearray(100)), 0))


def test_the_bytes_of_files_large_and_small_follow_one_another(tmp_path: Path) -> None:
    sizes = [5, 0, PAYLOAD_LIMIT - 5, PAYLOAD_LIMIT + 1, 2 * PAYLOAD_LIMIT, 7]
    whole = b""
    for number, size in enumerate(sizes):
        data = bytes([number + 1]) * size
        (tmp_path / str(number)).write_bytes(data)
        whole += data
    release = build(tmp_path)
    push = Push.__new__(Push)
    pieces = [bytes(piece) for piece in push._pieces(release.entries)]
    assert b"".join(pieces) == whole
    assert {len(piece) for piece in pieces[:-1]} == {PAYLOAD_LIMIT}


def test_batches_are_bounded() -> None:
    entries = [Entry(["f", str(n), "0" * 64, 40 << 20, 0]) for n in range(5)]
    assert [len(batch) for batch in pushing._batches(entries)] == [1, 1, 1, 1, 1]
    small = [Entry(["f", str(n), "0" * 64, 1, 0]) for n in range(pushing.BATCH_FILES + 1)]
    assert [len(batch) for batch in pushing._batches(small)] == [pushing.BATCH_FILES, 1]


class Shown:
    """A meter's numbers."""

    def __init__(self) -> None:
        self.expected = self.done = 0

    def expect(self, count: int) -> None:
        self.expected += count

    def __call__(self, count: int) -> None:
        assert count > 0
        self.done += count


def test_what_travels_twice_is_shown_once() -> None:
    shown = Shown()
    arrivals = Arrivals(shown)
    arrivals.begin(100)
    arrivals(60)
    arrivals.begin(70)  # 30 of the 60 were whole files
    arrivals(20)
    assert (shown.expected, shown.done) == (100, 60)
    arrivals(50)
    assert shown.done == 80
    arrivals.begin(120)  # and even of what somebody removed there meanwhile
    arrivals(120)
    assert (shown.expected, shown.done) == (100, 100)


def test_a_release_whose_answer_was_lost_was_made_by_this_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = Far(tmp_path)
    (far.code / "a").write_text("a")
    fleet = Fleet(LaptopState(far.laptop))
    target = Target(
        name="c", host=HostTarget(name="h", settings=Host()), ct=1, settings=ContainerSettings()
    )
    send = Push.send
    cut: list[str] = []

    def channel() -> AgentChannel:
        link = SlowLink(far.workdir)
        return AgentChannel(link, bundle(), str(far.workdir), trusted=False, host="h", ct=1)

    def send_in_vain(self: Push) -> tuple[list[Request], Request]:
        blobs, commit = send(self)
        if len(cut) == 2:
            return blobs, commit
        cut.append(commit.result()["release"])
        unanswered = Request(commit.number, commit.op, lambda head, payload: None)
        unanswered.fail(ConnectionLost("cut on purpose", host="h", ct=1))
        return blobs, unanswered

    def push() -> tuple[str, bool]:
        answer = pushing.push(fleet, target, channel, far.release(), notice=lambda text: None)
        return answer["release"], answer["existing"]

    monkeypatch.setattr(fleet, "beside", lambda target: None)
    monkeypatch.setattr(Push, "send", send_in_vain)
    monkeypatch.setattr(reconnect, "RETRY_S", (0.0, 0.0, 0.0))

    assert push() == (cut[0], False)
    assert push() == (cut[0], True)
