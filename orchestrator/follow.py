"""Reading a run's log to its end across dropped links: exact cursors, no line lost or twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from orchestrator.channel import AgentChannel
from orchestrator.errors import (
    AuthenticationFailed,
    ContainerNotRunning,
    DflashctlError,
    HostKeyMismatch,
    UnreachableError,
)
from orchestrator.fleet import Fleet, Notice
from orchestrator.reconnect import reconnecting
from orchestrator.run import ENDED, RunRef, RunSummary

# Seconds between attempts; the last one is repeated.
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
# A container that reboots is back within this; one that stays down is told as such.
REBOOT_S = 60.0


@dataclass(frozen=True)
class Piece:
    """Whole lines of one file, as they were written."""

    file: str
    data: bytes


@dataclass
class Start:
    """Where to begin: the last ``lines``, else the last ``since_s`` seconds, else the beginning."""

    lines: int | None = None
    since_s: float | None = None


@dataclass
class Follower:
    """One run's files, read in order. Iterate :meth:`pieces`, then look at :meth:`summary`."""

    fleet: Fleet
    ref: RunRef
    files: tuple[str, ...]
    start: Start
    follow: bool
    notice: Notice
    sleep: Callable[[float], None] = time.sleep
    run_id: str | None = None
    _cursors: list[dict[str, Any] | None] = field(default_factory=list)
    _channel: AgentChannel | None = None
    _met: bool = False
    """Its agent has spoken once."""
    _summary: RunSummary | None = None

    def pieces(self) -> Iterator[Piece]:
        """Every line from the start on, each once; with ``follow`` until the run has ended.

        :raises DflashctlError: the first attempt failed, or what cannot mend itself.
        """
        self.run_id = self.ref.run_id
        self._cursors = [None] * len(self.files)
        attempt = 0
        lost_at: float | None = None
        while True:
            try:
                for piece in self._read():
                    if lost_at is not None:
                        self.notice(f"{self.where}: reading on after {time.time() - lost_at:.0f} s")
                        lost_at, attempt = None, 0
                    yield piece
                return
            except (UnreachableError, ContainerNotRunning) as error:
                now = time.time()
                if self._channel is None or not self._may_mend(error, now - (lost_at or now)):
                    raise
                lost_at = lost_at or now
                pause = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
                attempt += 1
                self.notice(f"{self.where}: {error.what}; trying again in {pause:g} s")
                self.fleet.drop(self._channel)
                self.sleep(pause)

    @property
    def where(self) -> str:
        return f"{self.ref.target.name} {self.run_id or ''}".rstrip()

    def summary(self) -> RunSummary:
        """The run as it stands after the last piece; also when the link went with that piece."""
        if self._summary is None:
            fields = RunRef(self.ref.target, self.run_id).fields
            kept = [self._channel] if self._channel else []
            answer = reconnecting(
                self.fleet,
                lambda: kept.pop() if kept else self.fleet.container(self.ref.target),
                lambda channel: channel.call("run.status", lines=0, **fields),
                self.notice,
            )
            self._summary = RunSummary.model_validate(answer)
        return self._summary

    def _may_mend(self, error: DflashctlError, down_s: float) -> bool:
        if isinstance(error, (AuthenticationFailed, HostKeyMismatch)):
            return False
        if isinstance(error, ContainerNotRunning):
            # One that was down from the first has nothing to come back from.
            return self._met and self.follow and down_s < REBOOT_S
        return True

    def _read(self) -> Iterator[Piece]:
        channel = self.fleet.container(self.ref.target)
        self._channel = channel
        if self.run_id is None:
            # Fixed once: after a reconnect "the newest" may be another run.
            newest = channel.call("run.status", lines=0)
            self.run_id = str(newest["run_id"])
        request = channel.request(
            "tail", run_id=self.run_id, files=list(self.files), **self._from(channel)
        )
        channel.hello()
        self._met = True
        for head, payload in request.frames():
            if "notice" in head:
                self._tell(head)
            if "cursor" not in head:
                continue
            index = head.get("file", 0)
            if payload:
                yield Piece(self.files[index], payload)
            # After the reader has taken it: what it did not take is read again.
            self._cursors[index] = head["cursor"]

    def _from(self, channel: AgentChannel) -> dict[str, Any]:
        fields: dict[str, Any] = {"follow": self.follow}
        if any(self._cursors):
            return {**fields, "cursors": self._cursors}
        if self.start.since_s is not None:
            # By the container's clock: the laptop's may be an hour off.
            return {**fields, "since": channel.hello()["time"] - self.start.since_s}
        if self.start.lines is not None:
            return {**fields, "lines": self.start.lines}
        return fields

    def _tell(self, head: dict[str, Any]) -> None:
        name = head["notice"]
        if name == "gap":
            self.notice(f"{self.where}: {head.get('bytes') or 'some'} bytes are gone from the log")
        elif name == "truncated":
            self.notice(f"{self.where}: the log was cut short and begins anew")
        elif name == "state" and head.get("state") not in ENDED:
            self.notice(f"{self.where}: {head.get('state')}")
