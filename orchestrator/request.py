"""One request on an agent's channel: its frames as they come, its result, its input."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from orchestrator.agent.frames import Frame
from orchestrator.agent.protocol import PAYLOAD_LIMIT, WINDOW
from orchestrator.errors import DflashctlError

# Frames that nobody has taken yet: beyond this the channel stops reading, and the far side waits.
BACKLOG = 32 << 20
# No more is on its way than the link carries in this time: what is sent after it waits behind it, a
# ping too, and a link of 64 KB/s with megabytes under way would look dead.
IN_FLIGHT_S = 2.0
# Before the first answer nothing is known of the link; 4 s of a slow one.
FIRST_WINDOW = 256 << 10
# The far side answers for whole pieces: one must not take long either. But each costs both sides an
# answer: in pieces of 128 KiB 100 MB took 3.0 s on a quick link, in pieces of 1 MiB 1.8 s.
PIECE = 128 << 10
PIECES_IN_FLIGHT = 8
RATE_OVER_S = 1.0

Send = Callable[[dict[str, Any], bytes | memoryview], None]


class Request:
    """Made by :meth:`orchestrator.channel.AgentChannel.request`; filled by its reading thread."""

    def __init__(self, number: int, op: str, send: Send) -> None:
        self.number = number
        self.op = op
        self._send = send
        self._frames: deque[Frame] = deque()
        self._held = 0
        self._kept = True
        self._acknowledged = 0
        self._put = 0
        self._window = FIRST_WINDOW
        self._told: Callable[[int], None] = lambda total: None
        self._acks: deque[tuple[float, int]] = deque()
        """When how much had been acknowledged, within the last ``RATE_OVER_S``."""
        self._changed = threading.Condition()
        self._result: dict[str, Any] | None = None
        self._error: DflashctlError | None = None
        self.answered = 0.0
        """By this machine's clock, when the result came; it may be read much later."""

    @property
    def done(self) -> bool:
        return self._result is not None or self._error is not None

    def frames(self) -> Iterator[Frame]:
        """Each frame of the reply once, as it comes, up to the end of the request.

        :raises DflashctlError: the request failed, or the link did.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._frames or self.done)
                if not self._frames:
                    break
                frame = self._frames.popleft()
                self._held -= len(frame[1])
                self._changed.notify_all()
            yield frame
        self.result()

    def result(self) -> dict[str, Any]:
        """The result; frames that were not taken before are dropped.

        :raises DflashctlError: the request failed, or the link did.
        """
        with self._changed:
            self._kept = False
            self._frames.clear()
            self._held = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.done)
            if self._error is not None:
                raise self._error
            assert self._result is not None
            return self._result

    def outputs(self) -> tuple[dict[str, Any], bytes, bytes]:
        """Of an ``exec``: its result, and all of its standard output and standard error.

        :raises DflashctlError: as from :meth:`result`.
        """
        heard = {"stdout": bytearray(), "stderr": bytearray()}
        for head, payload in self.frames():
            if "stream" in head:
                heard[head["stream"]] += payload
        return self.result(), bytes(heard["stdout"]), bytes(heard["stderr"])

    def feed(
        self,
        pieces: Iterable[bytes | memoryview],
        window: int = FIRST_WINDOW,
        arrived: Callable[[int], None] = lambda total: None,
    ) -> int:
        """Send the request's input and its end; at most ``WINDOW`` bytes, and no more than the link
        carries in ``IN_FLIGHT_S``, wait for the far side.

        Stops early without an error where the request has already ended: :meth:`result` tells why.

        :param window: how much may wait at first; what an earlier request on this link has returned
            saves its round trips of learning that.
        :param arrived: told how many bytes of the input the far side has taken, as it says so.
        """
        sent = 0
        self._told = arrived
        self._window = window
        self._acks.append((time.monotonic(), 0))
        for piece in pieces:
            view = memoryview(piece)
            while view:
                size = min(max(PIECE, self._window // PIECES_IN_FLIGHT), PAYLOAD_LIMIT)
                part, view = view[:size], view[size:]
                if not self._room(sent + len(part)):
                    return self._window
                self._send({"id": self.number, "more": True}, part)
                sent += len(part)
        self._send({"id": self.number}, b"")
        return self._window

    def put(self, piece: bytes | memoryview, window: int, *, program: bool = False) -> bool:
        """Send some of a ``relay``'s input, once fewer than ``window`` bytes wait for the far side.

        What is relayed is paced by its own requests. False: it has ended already.

        :param program: the piece is the agent's program, which need not travel: it is there.
        """
        view = memoryview(piece)
        step = len(view) if program else PAYLOAD_LIMIT
        for start in range(0, len(view), step):
            part = view[start : start + step]
            with self._changed:
                self._changed.wait_for(lambda: self._put - self._acknowledged < window or self.done)
                if self.done:
                    return False
            if program:
                self._send({"id": self.number, "more": True, "program": True}, b"")
            else:
                self._send({"id": self.number, "more": True}, part)
            self._put += len(part)
        return True

    def end(self) -> None:
        """The end of what was :meth:`put`."""
        self._send({"id": self.number}, b"")

    def acknowledge(self, total: int) -> None:
        """Tell a ``relay`` how many bytes of its output were taken."""
        self._send({"id": self.number, "ack": total}, b"")

    def cancel(self) -> None:
        """Ask the agent to end it; the reply still comes."""
        if not self.done:
            self._send({"id": self.number, "cancel": True}, b"")

    def _room(self, total: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: total - self._acknowledged <= self._window or self.done)
            return not self.done

    def _acknowledge(self, total: int) -> None:
        now = time.monotonic()
        self._acknowledged = total
        self._told(total)
        self._acks.append((now, total))
        while len(self._acks) > 2 and now - self._acks[0][0] > RATE_OVER_S:
            self._acks.popleft()
        then, before = self._acks[0]
        rate = (total - before) / max(now - then, 1e-6)
        self._window = min(max(int(rate * IN_FLIGHT_S), FIRST_WINDOW), WINDOW)

    # What follows is for the channel's reading thread.

    def accept(self, head: dict[str, Any], payload: bytes) -> None:
        """A frame that is not the last; waits while the reader of this request is far behind."""
        with self._changed:
            if "ack" in head:
                self._acknowledge(head["ack"])
            elif self._kept:
                self._changed.wait_for(lambda: self._held < BACKLOG or not self._kept or self.done)
                if self._kept:
                    self._frames.append((head, payload))
                    self._held += len(payload)
            self._changed.notify_all()

    def finish(self, result: dict[str, Any]) -> None:
        with self._changed:
            if not self.done:
                self._result = result
                self.answered = time.time()
            self._changed.notify_all()

    def fail(self, error: DflashctlError) -> None:
        with self._changed:
            if not self.done:
                self._error = error
            self._changed.notify_all()


def exec_ending(answer: Mapping[str, Any]) -> str:
    """How the command of an ``exec`` ended: ``ended with exit code 3``."""
    if answer["timed_out"]:
        return "was ended when its time was over"
    if answer["signal"]:
        return f"was ended by signal {answer['signal']}"
    return f"ended with exit code {answer['exit_code']}"
