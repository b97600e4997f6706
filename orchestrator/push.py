"""A release on its way into a container.

begin (manifest) → what is missing → blobs → commit. begin is one round trip; the rest is sent
without waiting, so a push of one changed file takes two beyond the connection.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.agent.protocol import PAYLOAD_LIMIT
from orchestrator.channel import AgentChannel
from orchestrator.errors import ConnectionLost, DflashctlError, TransferError
from orchestrator.fleet import Fleet
from orchestrator.reconnect import Notice, reconnecting
from orchestrator.release import Entry, Release
from orchestrator.request import FIRST_WINDOW, Request
from orchestrator.target import Target

# One request's blobs: few enough that a cut loses little, and that two channels end together.
BATCH_BYTES = 8 << 20
BATCH_FILES = 4096
# sshd takes 2 MB of a session before it answers, whatever the link carries: 20 MB/s at 100 ms. A
# further session takes as much again, and costs an agent's start: one is as good as two at 10 ms
# and slower at 0, two are as good as three at 20 ms, four are the quickest at 100 ms.
FAR_S = 0.015
FURTHER = 3
WORTH_ANOTHER = 24 << 20


class Progress(Protocol):
    """Who shows it."""

    def expect(self, count: int) -> None:
        """So many bytes more are to travel."""

    def __call__(self, count: int) -> None:
        """So many bytes more have arrived."""


class Arrivals:
    """How much of a release one container has said that it took, over all attempts to send it."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._wanted: int | None = None
        self._before = 0
        self._shown = 0
        self._lock = threading.Lock()

    def begin(self, missing: int) -> None:
        """An attempt: what the last one left incomplete travels once more."""
        if self._wanted is None:
            self._wanted = missing
            if self._progress:
                self._progress.expect(missing)
        self._before = max(0, self._wanted - missing)

    def __call__(self, taken: int) -> None:
        """``taken`` bytes of this attempt; told by any channel's reading thread."""
        with self._lock:
            there = min(self._before + taken, self._wanted or 0)
            if self._progress and there > self._shown:
                self._progress(there - self._shown)
                self._shown = there


def push(
    fleet: Fleet,
    target: Target,
    channels: Callable[[], AgentChannel],
    release: Release,
    *,
    notice: Notice,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Bring a release into a container; after a cut only what is still missing travels. Then old
    ones go: the answer's ``removed`` names them. That one cannot (``not_removed``) is no failure,
    and told.

    :raises UnreachableError: the link stays away; what was there before is untouched.
    """
    arrivals = Arrivals(progress)
    was_there: list[bool] = []

    def once(channel: AgentChannel) -> dict[str, Any]:
        sending = Push(channel, release, arrivals, fleet.beside(target))
        blobs, commit = sending.send()
        was_there.append(sending.was_there)
        pruning = prune(channel, target, commit)
        for request in blobs:
            request.result()
        answer = commit.result()
        # An earlier attempt may have made it, whose answer was lost.
        existing = answer["existing"] and was_there[0]
        return {**answer, "existing": existing, **_pruned(pruning, target, notice)}

    return reconnecting(fleet, channels, once, notice)


def prune(channel: AgentChannel, target: Target, commit: Request) -> Request:
    """Asks for old releases to be removed once ``commit`` is done; who does not wait for the answer
    may go."""
    keep = target.settings.keep_releases
    return channel.request("release.prune", keep=keep, after=[commit.number])


def _pruned(pruning: Request, target: Target, notice: Notice) -> dict[str, Any]:
    try:
        found = pruning.result()
    except ConnectionLost:
        raise
    except DflashctlError as error:
        notice(
            f"{target.name}: pushed, but older releases stay, which the next push tries to remove "
            f"again: {error.what}"
        )
        return {"removed": [], "not_removed": []}
    for stays in found["failed"]:
        look = f"dflashctl exec {target.arguments} -- ls -laR {shlex.quote(stays['path'])}"
        notice(
            f"{target.name}: pushed, but the old {stays['path']} could not be removed: "
            f"{stays['why']}. Look there for a mount or an immutable file ({look}); the next push "
            "tries again"
        )
    return {"removed": found["removed"], "not_removed": found["failed"]}


@dataclass
class _Lane:
    """One channel of a push, and how far it is."""

    channel: AgentChannel
    window: int = FIRST_WINDOW
    sent: int = 0
    """Bytes of the batches before the one that travels."""
    taken: int = 0
    batches: list[list[Entry]] = field(default_factory=list)


class Push:
    """One push: begin at once; finish when the reply is there. On one channel, or on several where
    the container is far."""

    def __init__(
        self,
        channel: AgentChannel,
        release: Release,
        arrivals: Arrivals,
        beside: Callable[[], AgentChannel] | None = None,
    ) -> None:
        """:param beside: opens a further channel to the same container."""
        self.release = release
        self._channel = channel
        self._arrivals = arrivals
        self._beside = beside
        self._waiting: deque[list[Entry]] = deque()
        self._lanes = [_Lane(channel)]
        self._stamp = 0
        self._begin = channel.request("release.begin", more=True)
        self._begin.feed([release.manifest])

    @property
    def was_there(self) -> bool:
        """Whether the container had this very release before."""
        return bool(self._begin.result()["present"])

    def send(self) -> tuple[list[Request], Request]:
        """Wait for what is missing, then send it and the commit without waiting.

        Returns the blob requests and the commit request, whose id ``run.start`` may name.
        """
        answer = self._begin.result()
        self._stamp = answer["stamp"]
        self._arrivals.begin(answer["bytes"])
        self._waiting.extend(_batches([self.release.entries[i] for i in answer["missing"]]))
        further = self._further(answer["bytes"])
        blobs = self._send_batches(self._lanes[0])
        if further:
            further.join()
            # What they could not bring.
            blobs += self._send_batches(self._lanes[0])
        commit = self._channel.request(
            "release.commit",
            begin=self._begin.number,
            after=[request.number for request in blobs],
            meta=self.release.meta(),
        )
        return blobs, commit

    def _further(self, missing: int) -> threading.Thread | None:
        """Carries batches over more channels, where the window of one holds them up."""
        if self._beside is None or missing < WORTH_ANOTHER:
            return None
        # Answered while the first batch is under way: it was sent before that.
        ping = self._channel.request("ping")
        asked = time.time()
        thread = threading.Thread(
            target=self._send_further, args=(self._beside, ping, asked), daemon=True
        )
        thread.start()
        return thread

    def _send_further(
        self, beside: Callable[[], AgentChannel], ping: Request, asked: float
    ) -> None:
        with contextlib.suppress(DflashctlError):
            ping.result()
        count = min(FURTHER, int((ping.answered - asked) / FAR_S))
        threads = [
            threading.Thread(target=self._send_beside, args=(beside,), daemon=True)
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send_beside(self, beside: Callable[[], AgentChannel]) -> None:
        """A failure costs only time: the first channel sends what this one took, or fails too."""
        with contextlib.suppress(DflashctlError), beside() as channel:
            # It takes nothing before it can send it: the first channel would wait for that.
            channel.hello()
            lane = _Lane(channel)
            self._lanes.append(lane)
            try:
                for request in self._send_batches(lane):
                    request.result()
            except DflashctlError:
                self._lanes.remove(lane)
                self._waiting.extend(lane.batches)

    def _send_batches(self, lane: _Lane) -> list[Request]:
        requests = []
        while (batch := self._next()) is not None:
            lane.batches.append(batch)
            requests.append(self._send_batch(lane, batch))
        return requests

    def _next(self) -> list[Entry] | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _send_batch(self, lane: _Lane, batch: list[Entry]) -> Request:
        request = lane.channel.request(
            "release.blobs",
            blobs=[[entry.line[2], entry.line[3]] for entry in batch],
            stamp=self._stamp,
            more=True,
        )
        before = lane.sent
        lane.sent += sum(entry.line[3] for entry in batch)

        def arrived(taken: int) -> None:
            lane.taken = before + taken
            self._arrivals(sum(one.taken for one in self._lanes))

        lane.window = request.feed(self._pieces(batch), lane.window, arrived)
        return request

    def _pieces(self, batch: list[Entry]) -> Iterator[memoryview]:
        """The files' bytes one after the other, in pieces that fill a frame; each is good until the
        next is asked for."""
        buffer = memoryview(bytearray(PAYLOAD_LIMIT))
        filled = 0
        for entry in batch:
            for count in _read(entry, buffer, filled):
                filled += count
                if filled == len(buffer):
                    yield buffer
                    filled = 0
        if filled:
            yield buffer[:filled]


def _batches(entries: list[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        if batch and (size + entry.line[3] > BATCH_BYTES or len(batch) == BATCH_FILES):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += entry.line[3]
    if batch:
        yield batch


def _read(entry: Entry, into: memoryview, at: int) -> Iterator[int]:
    """Exactly the promised bytes of a file, ``into`` the buffer from ``at`` on and, whenever that
    is full, from its start; how many, each time.

    :raises TransferError: it changed since it was hashed.
    """
    assert entry.source is not None
    left: int = entry.line[3]
    try:
        with entry.source.open("rb", buffering=0) as stream:
            while left:
                count = stream.readinto(into[at : at + left])
                if not count:
                    break
                left -= count
                at = (at + count) % len(into)
                yield count
            grew = bool(stream.read(1))
    except OSError as error:
        raise TransferError(
            f"{entry.source} cannot be read: {error.strerror}",
            next_step="make it readable, or leave it out (.dflashignore), and push again",
        ) from None
    if left or grew:
        raise TransferError(
            f"{entry.source} changed while it was being pushed",
            next_step="push again; what was there before is untouched",
        )
