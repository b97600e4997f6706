"""Many requests on one channel: a thread reads, a thread each answers, one lock writes.

Memory is bounded: input waits in queues of at most ``WINDOW`` bytes a request (the laptop sends no
more than that unacknowledged), output blocks in ``write`` until the laptop reads, and at most
``REQUESTS`` requests run at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from orchestrator.agent.frames import Decoder, encode
from orchestrator.agent.protocol import PAYLOAD_LIMIT, WINDOW, AgentError
from orchestrator.paths import HostPaths

if TYPE_CHECKING:
    from orchestrator.agent.release import Push

_F_SETPIPE_SZ = 1031
REQUESTS = 256
REMEMBERED = 4096
"""Requests, ended ones too: others may wait for them, and their last input may still be under way.
All of them, at one every three seconds for a week, would fill the container's memory."""
ACKNOWLEDGE = 64 << 10
"""Bytes of input between two acknowledgements: one for each small piece would double the frames."""
Operation = Callable[["Request"], dict[str, Any]]


class Cancelled(Exception):
    """The laptop wants no more of this request, or is gone."""


class Request:
    """One request as its operation sees it: fields, input, a way to send, a way to be stopped."""

    def __init__(self, server: Server, head: dict[str, Any], payload: bytes) -> None:
        self.id: int = head["id"]
        self.fields = head
        self.server = server
        self.paths: HostPaths = server.paths
        self.ended = threading.Event()
        self.result: dict[str, Any] | None = None
        self.failure: AgentError | None = None
        self.afterwards: Callable[[], None] = lambda: None
        """What of its work the answer need not wait for."""
        self._cancel = threading.Event()
        self._event = -1
        self._arrival = threading.Condition()
        self._pieces: deque[bytes] = deque([payload] if payload else [])
        self._waiting = len(payload)
        self._open = bool(head.get("more"))
        self._consumed = self._told = 0
        self._sent = self._taken = 0

    # Fields

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A field of the given type; ``default`` if absent or null."""
        value = self.fields.get(name)
        if value is None:
            return default
        wrong_bool = isinstance(value, bool) and kind is not bool
        if wrong_bool or not isinstance(value, kind):
            raise AgentError("request.invalid", f"field {name!r} has the wrong type", field=name)
        return value

    def need(self, name: str, kind: type | tuple[type, ...]) -> Any:
        value = self.get(name, kind)
        if value is None:
            raise AgentError("request.invalid", f"field {name!r} is missing", field=name)
        return value

    # Input

    def feed(self, payload: bytes, more: bool) -> None:
        """From the reading thread: never blocks, so that pings are answered."""
        with self._arrival:
            if not self._open:
                raise AgentError("protocol", f"request {self.id} takes no more input")
            self._waiting += len(payload)
            if self._waiting > WINDOW and not self.ended.is_set():
                raise AgentError("protocol", f"request {self.id} was sent more than the window")
            if payload and not self.ended.is_set():
                self._pieces.append(payload)
            self._open = more
            self._arrival.notify_all()

    def input(self) -> Iterator[bytes]:
        """The input's pieces; each is acknowledged when the next is asked for."""
        while True:
            with self._arrival:
                while not self._pieces and self._open and not self._cancel.is_set():
                    self._arrival.wait()
                self.check()
                if not self._pieces:
                    return
                piece = self._pieces.popleft()
            yield piece
            with self._arrival:
                self._waiting -= len(piece)
            self._consumed += len(piece)
            if self.fields.get("more") and self._consumed - self._told >= ACKNOWLEDGE:
                self._told = self._consumed
                self.send({"ack": self._consumed})

    def read_input(self, limit: int) -> bytes:
        """All of it, refused beyond ``limit`` bytes."""
        pieces = bytearray()
        for piece in self.input():
            pieces += piece
            if len(pieces) > limit:
                raise AgentError("request.invalid", f"the input is longer than {limit} bytes")
        return bytes(pieces)

    # Output

    def send(self, head: dict[str, Any], payload: bytes | memoryview = b"") -> None:
        """One ``more`` frame; payloads beyond the limit are cut into several."""
        self.check()
        first = {"id": self.id, "more": True, **head}
        if len(payload) <= PAYLOAD_LIMIT:
            self.server.write(first, payload)
            return
        view = memoryview(payload)
        for start in range(0, len(view), PAYLOAD_LIMIT):
            self.server.write(first, view[start : start + PAYLOAD_LIMIT])

    def send_paced(self, head: dict[str, Any], payload: bytes, window: int) -> None:
        """The same, once fewer than ``window`` bytes wait for the laptop's acknowledgement."""
        with self._arrival:
            while self._sent - self._taken >= window and not self._cancel.is_set():
                self._arrival.wait()
        self._sent += len(payload)
        self.send(head, payload)

    def acknowledge(self, total: int) -> None:
        """From the reading thread: the laptop has taken so much of what was sent."""
        with self._arrival:
            self._taken = max(self._taken, total)
            self._arrival.notify_all()

    # End

    def check(self) -> None:
        """Raises ``Cancelled`` once the laptop wants no more."""
        if self._cancel.is_set():
            raise Cancelled

    def sleep(self, seconds: float) -> None:
        """``Cancelled`` interrupts it."""
        if self._cancel.wait(seconds):
            raise Cancelled

    def cancel_event(self) -> int:
        """A descriptor that is readable once the request is cancelled; closed when it ends."""
        with self._arrival:
            if self._event < 0:
                self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            if self._cancel.is_set():
                os.eventfd_write(self._event, 1)
            return self._event

    def cancel(self) -> None:
        with self._arrival:
            if self._cancel.is_set():
                return
            self._cancel.set()
            if self._event >= 0:
                os.eventfd_write(self._event, 1)
            self._arrival.notify_all()

    def finish(self, result: dict[str, Any] | None, failure: AgentError | None) -> None:
        self.result, self.failure = result, failure
        self.ended.set()
        with self._arrival:
            self._pieces.clear()
            if self._event >= 0:
                os.close(self._event)
                self._event = -1


class Server:
    """Reads requests from one descriptor and answers on another until the input ends."""

    def __init__(
        self,
        source: int,
        sink: int,
        workdir: str,
        program: str,
        find: Callable[[str], Operation],
    ) -> None:
        self.paths = HostPaths(workdir)
        self.program = program
        self.pushes: dict[int, Push] = {}
        """By the id of the ``release.begin`` that announced them."""
        self._source = source
        self._sink = sink
        self._find = find
        self._write_lock = threading.Lock()
        self._requests: dict[int, Request] = {}
        self._running = 0
        self._change = threading.Condition()
        self.gone = False

    def request(self, number: int) -> Request | None:
        """One that came on this channel, running or ended."""
        return self._requests.get(number)

    def write(self, head: dict[str, Any], payload: bytes | memoryview = b"") -> None:
        data = memoryview(encode(head, payload))
        with self._write_lock:
            while data and not self.gone:
                try:
                    data = data[os.write(self._sink, data) :]
                except BrokenPipeError:
                    self.gone = True
        if self.gone:
            raise Cancelled

    def run(self, hello: dict[str, Any]) -> None:
        """Until end of input, or until the stream can no longer be trusted."""
        decoder = Decoder()
        try:
            self.write({"id": 0, "hello": hello})
            while data := os.read(self._source, PAYLOAD_LIMIT):
                for head, payload in decoder.feed(data):
                    self._take(head, payload)
        except AgentError as error:
            self.write({"id": 0, "ok": False, "error": error.as_dict()})
        except Cancelled:
            pass
        finally:
            for request in list(self._requests.values()):
                request.cancel()

    def wait_idle(self, seconds: float) -> bool:
        """True once no request runs any more."""
        with self._change:
            return self._change.wait_for(lambda: self._running == 0, seconds)

    def _take(self, head: dict[str, Any], payload: bytes) -> None:
        number = head["id"]
        known = self._requests.get(number)
        if head.get("cancel"):
            if known is not None:
                known.cancel()
        elif "op" not in head:
            if known is None:
                raise AgentError("protocol", f"input for request {number}, which is not known")
            if "ack" in head:
                known.acknowledge(int(head["ack"]))
            else:
                known.feed(self._content(head, payload), bool(head.get("more")))
        elif known is not None or number < 1:
            raise AgentError("protocol", f"request id {number} is used twice or is not positive")
        elif head["op"] == "ping":
            import time

            self.write({"id": number, "ok": True, "result": {"time": time.time()}})
        else:
            self._start(Request(self, head, payload))

    def _content(self, head: dict[str, Any], payload: bytes) -> bytes:
        if not head.get("program"):
            return payload
        try:
            with open(self.program, "rb") as file:
                return file.read()
        except OSError as error:
            raise from_os_error(error) from error

    def _start(self, request: Request) -> None:
        self._requests[request.id] = request
        if len(self._requests) > REMEMBERED:
            self._forget()
        with self._change:
            busy = self._running >= REQUESTS
            if not busy:
                self._running += 1
        if busy:
            self._answer(request, None, AgentError("protocol", f"more than {REQUESTS} requests"))
            return
        # Daemon threads: a request stuck in the kernel (a dead mount) must not keep us alive.
        threading.Thread(target=self._work, args=(request,), daemon=True).start()

    def _forget(self) -> None:
        """The older half, as far as they have ended."""
        for number in list(self._requests)[: REMEMBERED // 2]:
            if self._requests[number].ended.is_set():
                del self._requests[number]

    def _work(self, request: Request) -> None:
        try:
            try:
                self._await_others(request)
                operation = self._find(str(request.fields["op"]))
                result, failure = operation(request), None
            except Cancelled:
                result, failure = None, AgentError("cancelled", "cancelled")
            except AgentError as error:
                result, failure = None, error
            except OSError as error:
                result, failure = None, from_os_error(error)
            except Exception as error:  # noqa: BLE001 - the laptop must hear of our own faults too
                import traceback

                text = "".join(traceback.format_exception(error))
                result, failure = None, AgentError("internal", repr(error), traceback=text)
            with contextlib.suppress(Cancelled):
                self._answer(request, result, failure)
            # Whoever asked may be gone, and hears nothing of it.
            with contextlib.suppress(OSError):
                request.afterwards()
        finally:
            with self._change:
                self._running -= 1
                self._change.notify_all()

    def _await_others(self, request: Request) -> None:
        after = list(request.get("after", list, []))
        if "release_from" in request.fields:
            after.append(request.fields["release_from"])
        for number in after:
            other = self._requests.get(number)
            if other is None:
                raise AgentError("request.invalid", f"after {number!r}: no such request")
            while not other.ended.wait(0.5):
                request.check()
            if other.failure is not None:
                raise AgentError(
                    "dependency",
                    f"request {number} failed first: {other.failure.message}",
                    id=number,
                    kind=other.failure.kind,
                )
        request.check()

    def _answer(
        self, request: Request, result: dict[str, Any] | None, failure: AgentError | None
    ) -> None:
        # Written before ``ended`` is set, so that a dependent's answer never overtakes this one.
        try:
            if failure is None:
                try:
                    self.write({"id": request.id, "ok": True, "result": result})
                except (ValueError, TypeError) as error:
                    # Too long, or no JSON: the laptop would wait for ever.
                    failure = AgentError("internal", f"the answer cannot be sent: {error}")
            if failure is not None:
                self.write({"id": request.id, "ok": False, "error": failure.as_dict()})
        finally:
            request.finish(result, failure)


def from_os_error(error: OSError) -> AgentError:
    """The kind that a person can act on, where there is one."""
    import errno

    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None
    kind = {
        errno.ENOSPC: "disk.full",
        errno.EDQUOT: "disk.full",
        errno.EROFS: "disk.readonly",
        errno.ENOENT: "file.not_found",
        # Something else stands there, or it is not ours to touch.
        **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST), "file.unusable"),
        **dict.fromkeys((errno.ELOOP, errno.ENAMETOOLONG), "file.unusable"),
        **dict.fromkeys((errno.EACCES, errno.EPERM), "file.unusable"),
    }.get(error.errno or 0, "os")
    name = errno.errorcode.get(error.errno or 0, "")
    message = f"{error.strerror or error}" + (f": {path}" if path else "")
    return AgentError(kind, message, errno=error.errno, name=name, path=path)


def take_standard_streams() -> tuple[int, int]:
    """Private copies of fds 0 and 1; the originals become /dev/null and a copy of stderr.

    Nothing that an operation prints, and no child that reads its input, can then touch the frames.
    """
    source, sink = os.dup(0), os.dup(1)
    # A pipe of sshd's holds 64 KiB: each piece of a push would be a turn of ours and one of its.
    with contextlib.suppress(OSError):
        fcntl.fcntl(source, _F_SETPIPE_SZ, PAYLOAD_LIMIT)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as we do
    return source, sink
