"""A request's input on its way: as much as the link carries, never so much that a ping drowns."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from orchestrator.agent.protocol import WINDOW
from orchestrator.request import FIRST_WINDOW, IN_FLIGHT_S, PIECE, PIECES_IN_FLIGHT, Request


class FarSide:
    """Takes ``rate`` bytes a second and acknowledges each piece; no link is between."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.sent = self.taken = self.most = 0
        self.pieces: list[int] = []
        self.ended = threading.Event()
        self.request = Request(1, "release.blobs", self.send)
        threading.Thread(target=self.take, daemon=True).start()

    def send(self, head: dict[str, Any], payload: bytes | memoryview) -> None:
        self.pieces.append(len(payload))
        self.sent += len(payload)
        self.most = max(self.most, self.sent - self.taken)
        if not head.get("more"):
            self.ended.set()

    def take(self) -> None:
        began = time.monotonic()
        while not self.ended.is_set() or self.taken < self.sent:
            due = int((time.monotonic() - began) * self.rate)
            while self.taken < self.sent and self.taken + PIECE <= due:
                self.taken += PIECE
                self.request.accept({"id": 1, "more": True, "ack": self.taken}, b"")
            time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.5e6, 4e6])
def test_a_slow_link_has_two_seconds_of_it_under_way_at_most(rate: float) -> None:
    far = FarSide(rate)
    far.request.feed([bytes(8 * PIECE)] * 2)
    assert far.sent == 16 * PIECE and far.ended.is_set()
    assert far.most <= max(FIRST_WINDOW, IN_FLIGHT_S * rate * 1.5)
    assert max(far.pieces) <= max(PIECE, IN_FLIGHT_S * rate * 1.5 / PIECES_IN_FLIGHT)


def test_a_fast_link_is_filled_to_the_window_and_no_further() -> None:
    far = FarSide(400e6)
    far.request.feed([bytes(1 << 20)] * 128)
    assert far.sent == 128 << 20
    assert FIRST_WINDOW < far.most <= WINDOW


def test_what_ends_before_its_input_does_leaves_the_sender_free() -> None:
    far = FarSide(0.0)
    threading.Timer(0.2, lambda: far.request.finish({})).start()
    far.request.feed([bytes(1 << 20)] * 4)
    assert far.sent <= FIRST_WINDOW


def test_when_it_was_answered_is_not_when_the_answer_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock in an answer that waited behind a push of a minute looked a minute slow."""
    request = Request(1, "preflight", lambda head, payload: None)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    request.finish({})
    monkeypatch.setattr(time, "time", lambda: 1070.0)
    assert request.result() == {} and request.answered == 1000.0
