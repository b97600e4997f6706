"""The same question to many containers or hosts at once; answers in the order they come in."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from orchestrator.errors import AuthenticationFailed, DflashctlError
from orchestrator.fleet import Fleet
from orchestrator.target import HostTarget, Target

if TYPE_CHECKING:
    from orchestrator.run import RunRef

# Containers of one host asked at once: one that does not answer keeps so many threads, and none of
# another host's.
CONCURRENCY = 64

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def each(
    fleet: Fleet, targets: Sequence[Target], work: Callable[[Target], Answer]
) -> Iterator[tuple[Target, Answer | DflashctlError]]:
    """``work`` of every target, in threads. Its error is an answer too: it holds up nobody.

    ``work`` closes the channels that it opens: the next container may wait for their places.
    """
    fleet.expect(targets)
    return _at_once(fleet, [(target.host, target) for target in targets], work)


def each_run(
    fleet: Fleet, refs: Sequence[RunRef], work: Callable[[RunRef], Answer]
) -> Iterator[tuple[RunRef, Answer | DflashctlError]]:
    """The same for runs, of which a container may have several."""
    fleet.expect([ref.target for ref in refs])
    return _at_once(fleet, [(ref.target.host, ref) for ref in refs], work)


def each_host(
    fleet: Fleet, hosts: Sequence[HostTarget], work: Callable[[HostTarget], Answer]
) -> Iterator[tuple[HostTarget, Answer | DflashctlError]]:
    """``work`` of every host, in threads."""
    return _at_once(fleet, [(host, host) for host in hosts], work)


def _at_once(
    fleet: Fleet, items: Sequence[tuple[HostTarget, Asked]], work: Callable[[Asked], Answer]
) -> Iterator[tuple[Asked, Answer | DflashctlError]]:
    waiting: dict[HostTarget, deque[Asked]] = {}
    for host, item in items:
        waiting.setdefault(host, deque()).append(item)
    answers: SimpleQueue[tuple[HostTarget, Asked, Future[Answer]]] = SimpleQueue()

    def serve(host: HostTarget, mine: deque[Asked]) -> None:
        with contextlib.suppress(IndexError):
            while True:
                item = mine.popleft()
                answers.put((host, item, _done(partial(work, item))))

    for host, mine in waiting.items():
        for number in range(min(len(mine), CONCURRENCY)):
            # Daemons, which a pool's threads are not: whoever presses Ctrl-C while a host does not
            # answer would wait at the end of the process for its time-out.
            threading.Thread(
                target=serve, args=(host, mine), daemon=True, name=f"each {host.name} {number}"
            ).start()
    refused: set[HostTarget] = set()
    try:
        for _ in items:
            host, item, done = answers.get()
            answer = _told(fleet, done.result)
            if isinstance(answer, AuthenticationFailed) and fleet.asks and host not in refused:
                # A person is asked for a password in the main thread alone, which is this one.
                answer = _told(fleet, partial(work, item))
                if isinstance(answer, AuthenticationFailed):
                    refused.add(host)
            yield item, answer
    finally:
        for mine in waiting.values():
            mine.clear()


def _done(work: Callable[[], Answer]) -> Future[Answer]:
    """The outcome of ``work``, whatever it is: a fault of ours is for who asked, too."""
    done: Future[Answer] = Future()
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001
        done.set_exception(error)
    return done


def _told(fleet: Fleet, work: Callable[[], Answer]) -> Answer | DflashctlError:
    try:
        return work()
    except DflashctlError as error:
        return fleet.named(error)
