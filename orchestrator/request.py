"""One request on an agent's channel: its frames as they come, its result, its input."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from orchestrator.agent.frames import Frame
from orchestrator.agent.protocol import PAYLOAD_LIMIT, WINDOW
from orchestrator.errors import DflashctlError

# Frames that nobody has taken yet: beyond this the channel stops reading, and the far side waits.
BACKLOG = 32 << 20

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
        self._changed = threading.Condition()
        self._result: dict[str, Any] | None = None
        self._error: DflashctlError | None = None

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

    def feed(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send the request's input and its end; at most ``WINDOW`` bytes wait for the far side.

        Stops early without an error where the request has already ended: :meth:`result` tells why.
        """
        sent = 0
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), PAYLOAD_LIMIT):
                part = view[start : start + PAYLOAD_LIMIT]
                if not self._room(sent + len(part)):
                    return
                self._send({"id": self.number, "more": True}, part)
                sent += len(part)
        self._send({"id": self.number}, b"")

    def cancel(self) -> None:
        """Ask the agent to end it; the reply still comes."""
        if not self.done:
            self._send({"id": self.number, "cancel": True}, b"")

    def _room(self, total: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: total - self._acknowledged <= WINDOW or self.done)
            return not self.done

    # What follows is for the channel's reading thread.

    def accept(self, head: dict[str, Any], payload: bytes) -> None:
        """A frame that is not the last; waits while the reader of this request is far behind."""
        with self._changed:
            if "ack" in head:
                self._acknowledged = head["ack"]
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
            self._changed.notify_all()

    def fail(self, error: DflashctlError) -> None:
        with self._changed:
            if not self.done:
                self._error = error
            self._changed.notify_all()
