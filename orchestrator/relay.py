"""The way to a container through its host's own agent, beside many others on one ssh channel.

sshd lets ten sessions share a connection; the host's agent starts any number of `pct exec` and
carries their streams as frames (``relay`` in ``orchestrator/agent/protocol.py``). A
:class:`RelayLink` is to an :class:`~orchestrator.channel.AgentChannel` what an ssh session is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from orchestrator import pct
from orchestrator.agent.protocol import RELAY_WINDOW
from orchestrator.agent_failure import kind_of
from orchestrator.channel import AgentChannel
from orchestrator.errors import ConnectionLost, DflashctlError

# Five descriptors each, of the 1,024 that a login session on the host may have open.
RELAYS = 128
# Bytes taken between two acknowledgements: one upwards for each line would double the frames.
ACKNOWLEDGE = RELAY_WINDOW // 8


class RelayLink:
    """One relayed command's streams.

    :param carrier: the channel to the host's agent.
    :param program: bytes that the host has too: a word that stands for them travels instead.
    :param on_close: called once.
    """

    def __init__(
        self,
        carrier: AgentChannel,
        ct: int,
        argv: Sequence[str],
        program: bytes,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._carrier = carrier
        self._ct = ct
        self.waiting = True
        """For its turn: the host starts only so many at a time."""
        self._argv = argv
        self._program = program
        self._on_close = on_close
        self._open = threading.Lock()
        self._errors: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._taken = self._told = 0
        self._status: int | None = None
        self._request = carrier.request("relay", command=list(argv), ct=ct, more=True)
        self._frames = self._request.frames()

    def send(self, data: bytes | memoryview) -> None:
        """Blocks while the container reads nothing.

        :raises OSError: it has ended.
        """
        known = data is self._program
        if not self._request.put(data, RELAY_WINDOW, program=known):
            raise OSError("the relayed command has ended")

    def receive(self) -> bytes:
        """The next bytes of its output; empty at its end.

        :raises OSError: the way to the host broke.
        :raises ExecFailed: the container is frozen.
        """
        try:
            data = self._next()
        except ConnectionLost as error:
            self._errors.put(b"")
            reason = error.what.removeprefix("the connection was lost").lstrip(": ")
            raise OSError(reason) from None
        except DflashctlError as error:
            if kind_of(error) == "ct.frozen":
                self._errors.put(b"")
                raise pct.frozen(self._carrier.host, self._ct) from None
            self._fail(error)
            data = b""
        if not data:
            self._errors.put(b"")
        return data

    def receive_error(self) -> bytes:
        """The next bytes of its error output; empty at its end. Filled by :meth:`receive`."""
        return self._errors.get()

    def finish_input(self) -> None:
        self._request.end()

    def status(self, timeout: float) -> int | None:
        """Known once :meth:`receive` has returned the end; None where the way to the host broke."""
        return self._status

    def close(self) -> None:
        if self._open.acquire(blocking=False):
            self._request.cancel()
            self._request.fail(ConnectionLost("the channel was closed", next_step="try again"))
            self._errors.put(b"")
            self._on_close()

    def _next(self) -> bytes:
        for head, payload in self._frames:
            self.waiting = False
            self._acknowledge(len(payload))
            if head.get("stream") == "stdout":
                return payload
            if head.get("stream") == "stderr":
                self._errors.put(payload)
        result = self._request.result()
        signal = result.get("signal")
        self._status = 128 + signal if signal else result.get("exit_code")
        return b""

    def _acknowledge(self, count: int) -> None:
        self._taken += count
        if self._taken - self._told >= ACKNOWLEDGE:
            self._told = self._taken
            self._request.acknowledge(self._taken)

    def _fail(self, error: DflashctlError) -> None:
        """As ssh and the host's shell would have told it: words on the error output."""
        if kind_of(error) in ("command.not_found", "file.unusable"):
            self._errors.put(f"{self._argv[0]}: not found".encode())
            self._status = 127
        else:
            self._errors.put(error.what.encode())
