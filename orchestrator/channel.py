"""The one agent of one container (or host), reached through one command: many requests at once.

The wire is ``orchestrator/agent/protocol.py``. Three threads serve a channel: one reads output and
hands frames to their requests, one drains the error stream (2 MiB unread there stops everything),
one watches that the far side still answers.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator import agent_failure, pct
from orchestrator.agent import frames, loader
from orchestrator.agent.protocol import MAGIC, REFUSAL, RESYNC, AgentError
from orchestrator.errors import ConnectionLost, DflashctlError, ExecFailed, RefusedError
from orchestrator.request import Request

if TYPE_CHECKING:
    from orchestrator.agent_bundle import Bundle

# A dead link must be known within 10 s.
QUIET_S = 3.0
DEAD_S = 9.0
# `pct exec` takes 0.5–1 s, ten at once on two cores 2.9 s. In a frozen container it never answers.
START_S = 30.0
# After this a person wants to know what is waited for.
LATE_S = 2.0
NOISE_LIMIT = 64 << 10
STATUS = "a run goes on without it; `dflashctl status` shows it once the host answers"


class Link(Protocol):
    """What a channel needs of :class:`orchestrator.connection.Session`."""

    def send(self, data: bytes | memoryview) -> None: ...
    def receive(self) -> bytes: ...
    def receive_error(self) -> bytes: ...
    def finish_input(self) -> None: ...
    def status(self, timeout: float) -> int | None: ...
    def close(self) -> None: ...


class AgentChannel:
    """Requests to one agent.

    :param trusted: the program is believed to be there: only its hash is sent at first.
    :param queued: whether the far side has yet to begin; such a wait is no failure to start.
    :param on_late: called once, in a thread of its own, if the agent has not spoken by ``LATE_S``.
    :param on_no_word: asked what kept the agent from starting, where nothing that was printed says.
    """

    def __init__(
        self,
        link: Link,
        bundle: Bundle,
        workdir: str,
        *,
        trusted: bool,
        host: str,
        ct: int | None,
        on_hello: Callable[[dict[str, Any]], None] | None = None,
        queued: Callable[[], bool] | None = None,
        on_late: Callable[[AgentChannel], None] | None = None,
        on_no_word: Callable[[str, int | None], DflashctlError | None] = lambda heard, status: None,
    ) -> None:
        self.host = host
        self.ct = ct
        self._link = link
        self._bundle = bundle
        self._workdir = workdir
        self._on_hello = on_hello
        self._queued = queued or (lambda: False)
        self._on_late = on_late
        self._on_no_word = on_no_word
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        # Apart from the other: a sender that waits for the far side must not stop the reader.
        self._send_lock = threading.Lock()
        self._requests: dict[int, Request] = {}
        self._unconfirmed: list[bytes] = []
        """What was sent before the agent spoke: sent again where its program was absent."""
        self._hello: dict[str, Any] | None = None
        self._spoke = threading.Event()
        self._over = threading.Event()
        self._error: DflashctlError | None = None
        self._noise = bytearray()
        self._stderr = bytearray()
        self.link_alive = True
        """Whether the way to the host still worked when the channel ended."""
        self._heard = time.monotonic()
        self._busy = False
        """The reading thread waits for one of our own readers: silence proves nothing then."""
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"{host}/{ct} {target.__name__}")
            for target in (self._drain, self._read, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        # After the readers: a noisy shell may fill its output before it reads a byte of ours.
        self._introduce(b"" if trusted else bundle.data)

    def __enter__(self) -> AgentChannel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, for whatever reason: no request is answered any more."""
        return self._over.is_set()

    @property
    def has_spoken(self) -> bool:
        """Whether its agent has begun to answer."""
        return self._hello is not None

    def hello(self) -> dict[str, Any]:
        """Who answers: version, python, hostname, boot_id, time, tmux, …

        :raises DflashctlError: what kept the agent from starting.
        """
        self._spoke.wait()
        if self._hello is None:
            assert self._error is not None
            raise self._error
        return self._hello

    def request(self, op: str, payload: bytes = b"", /, **fields: Any) -> Request:
        """Send a request and return at once. Input, if ``more=True``, goes by ``feed``."""
        number = next(self._numbers)
        request = Request(number, op, self._send)
        with self._lock:
            if self._error is not None:
                request.fail(self._error)
                return request
            self._requests[number] = request
        self._send({"id": number, "op": op, **fields}, payload)
        return request

    def call(self, op: str, payload: bytes = b"", /, **fields: Any) -> dict[str, Any]:
        """A request's result."""
        return self.request(op, payload, **fields).result()

    def give_up(self, error: DflashctlError) -> None:
        """For whoever knows from elsewhere that no answer will come: all that wait get ``error``
        now, not after ``START_S``."""
        self._fail(error)
        self._link.close()

    def close(self) -> None:
        """End of input, which ends the agent (never a run)."""
        try:
            self._link.finish_input()
        except (OSError, EOFError):
            pass
        self._link.close()
        if not self._over.is_set():
            self._fail(self._lost("the channel was closed"))
        for thread in self._threads:
            # A thread that is still at it when the interpreter ends would print its surprise.
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)

    # Sending

    def _introduce(self, program: bytes) -> None:
        self._send_raw(loader.header(self._bundle.digest, len(program), self._workdir))
        if program:
            # By itself and as it is: a link may know it.
            self._send_raw(program)

    def _send(self, head: dict[str, Any], payload: bytes | memoryview) -> None:
        self._send_raw(frames.encode(head, payload), frame=True)

    def _send_raw(self, data: bytes, *, frame: bool = False) -> None:
        with self._send_lock:
            if self._hello is not None:
                self._unconfirmed.clear()
            elif frame:
                self._unconfirmed.append(data)
            try:
                self._link.send(data)
            except (OSError, EOFError):
                # The reading thread finds out why and tells every request.
                return

    def _resend_with_program(self) -> None:
        with self._send_lock:
            header = loader.header(self._bundle.digest, len(self._bundle.data), self._workdir)
            self._link.send(RESYNC + header)
            self._link.send(self._bundle.data)
            for data in self._unconfirmed:
                self._link.send(data)

    # Reading

    def _read(self) -> None:
        try:
            rest = self._skip_noise()
            decoder = frames.Decoder()
            while rest:
                for head, payload in decoder.feed(rest):
                    self._dispatch(head, payload)
                rest = self._receive()
        except AgentError as error:
            self._fail(agent_failure.explain(error.as_dict(), host=self.host, ct=self.ct))
        except DflashctlError as error:
            self._fail(error)
        except (OSError, EOFError) as error:
            self._fail(self._lost(str(error)))
        else:
            self._fail(self._ended())
        finally:
            self._link.close()

    def _receive(self) -> bytes:
        data = self._link.receive()
        self._heard = time.monotonic()
        return data

    def _skip_noise(self) -> bytes:
        """What the login shell printed is kept for messages; returns the first bytes of frames."""
        while True:
            for marker in (MAGIC, REFUSAL):
                at = self._noise.find(marker)
                if at >= 0 and marker is MAGIC:
                    return bytes(self._noise[at + len(MAGIC) :]) or self._receive()
                if at >= 0 and b"\n" in self._noise[at:]:
                    words = bytes(self._noise[at + len(REFUSAL) :]).split(b"\n")[0]
                    raise refused_interpreter(
                        words.decode(errors="replace"), host=self.host, ct=self.ct
                    )
            data = self._receive()
            if not data:
                return b""
            self._noise += data
            if len(self._noise) > NOISE_LIMIT:
                # A marker may straddle the cut.
                del self._noise[: -NOISE_LIMIT // 2]

    def _dispatch(self, head: dict[str, Any], payload: bytes) -> None:
        number = head["id"]
        if number == 0:
            self._unasked(head)
            return
        request = self._requests.get(number)
        if request is None:
            return
        if head.get("more"):
            self._busy = True
            request.accept(head, payload)
            self._heard = time.monotonic()
            self._busy = False
            return
        with self._lock:
            del self._requests[number]
        if head.get("ok"):
            request.finish(head.get("result") or {})
        else:
            request.fail(agent_failure.explain(head.get("error") or {}, host=self.host, ct=self.ct))

    def _unasked(self, head: dict[str, Any]) -> None:
        if "hello" in head:
            self._hello = head["hello"]
            self._spoke.set()
            if self._on_hello:
                self._on_hello(head["hello"])
            return
        error = head.get("error") or {}
        if error.get("kind") == "agent.absent" and self._hello is None:
            self._resend_with_program()
            return
        self._fail(agent_failure.explain(error, host=self.host, ct=self.ct))

    def _drain(self) -> None:
        try:
            while data := self._link.receive_error():
                self._stderr += data
                del self._stderr[:-NOISE_LIMIT]
        except (OSError, EOFError):
            return

    # Ends

    def _watch(self) -> None:
        began = time.monotonic()
        while True:
            if self._over.wait(0.25):
                return
            if self._queued():
                began = time.monotonic()
            if self._busy:
                continue
            now = time.monotonic()
            if self._hello is None:
                if self._on_late and now - began > LATE_S:
                    tell, self._on_late = self._on_late, None
                    threading.Thread(target=tell, args=(self,), daemon=True).start()
                if now - began > START_S:
                    self._fail(self._no_start())
                    self._link.close()
                continue
            quiet = now - self._heard
            if quiet > DEAD_S:
                self._fail(self._lost(f"no answer for {quiet:.0f} s"))
                self._link.close()
            elif quiet > QUIET_S and not any(r.op == "ping" for r in self._waiting()):
                threading.Thread(target=self.request, args=("ping",), daemon=True).start()

    def _waiting(self) -> list[Request]:
        with self._lock:
            return list(self._requests.values())

    def _fail(self, error: DflashctlError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            waiting, self._requests = list(self._requests.values()), {}
        for request in waiting:
            request.fail(self._error)
        self._over.set()
        self._spoke.set()

    def _ended(self) -> DflashctlError:
        """The output ended: before the agent spoke, or under it."""
        status = self._link.status(timeout=2.0)
        # The error stream ends with the output; its last words may still be on their way.
        self._threads[0].join(timeout=1.0)
        stderr = self._stderr.decode(errors="replace")
        if self._hello is None:
            # Its own first word, where it was killed after that, is nothing that was printed.
            noise = self._noise.partition(MAGIC)[0].decode(errors="replace")
            if not pct.says_why(stderr):
                # Its own words are no reason: a login shell that prints says them every time.
                why = self._on_no_word(stderr.strip() or noise.strip(), status)
                if why is not None:
                    return why
                if status is None:
                    return self._lost("it ended while the agent was starting", "try again")
            return pct.failure(stderr, status, host=self.host, ct=self.ct, stdout=noise)
        if status is None:
            return self._lost("")
        last = stderr.strip().splitlines()
        return ConnectionLost(
            f"the agent ended (exit code {status}{f': {last[-1]}' if last else ''}): "
            "the container was stopped or rebooted, or something killed it",
            next_step="`dflashctl status` shows what is left of its runs",
            host=self.host,
            ct=self.ct,
        )

    def _lost(self, reason: str, next_step: str = STATUS) -> ConnectionLost:
        self.link_alive = False
        return ConnectionLost(
            "the connection was lost" + (f": {reason}" if reason else ""),
            next_step=next_step,
            host=self.host,
            ct=self.ct,
        )

    def _no_start(self) -> ExecFailed:
        if self.ct is None:
            return ExecFailed(
                f"the agent did not start on the host itself within {START_S:.0f} s",
                next_step="try again; the host may be overloaded",
                host=self.host,
            )
        return ExecFailed(
            f"the agent did not start within {START_S:.0f} s: the container may be frozen (a "
            "backup in suspend mode), or the host overloaded",
            next_step=f"on the host: pct status {self.ct} --verbose; "
            f"cat /sys/fs/cgroup/lxc/{self.ct}/cgroup.freeze",
            host=self.host,
            ct=self.ct,
        )


def refused_interpreter(words: str, *, host: str, ct: int | None) -> RefusedError:
    """``json <version> <path>`` or ``python <version> <path>``: an interpreter that will not do."""
    word, _, python = words.partition(" ")
    place = "the container" if ct is not None else "the host"
    if word == "json":
        return RefusedError(
            f"{place}'s Python has no standard library ({python}): only python3-minimal is there",
            next_step="apt install python3 there, or set `python` in the inventory",
            host=host,
            ct=ct,
        )
    return RefusedError(
        f"{place}'s Python is too old ({python})",
        next_step="install Python 3.10 or later there, or set `python` in the inventory",
        host=host,
        ct=ct,
    )
