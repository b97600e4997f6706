"""Work that may be asked for again: a link lost under it is made anew, and all of it is repeated;
so it is where files that the container had were found damaged there.

Only for what does no harm twice: a start under its run id, a push, a stop. Reading a log and
pulling files have an exact place to go on from, and loops of their own (``follow``, ``transfer``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from orchestrator.agent_failure import kind_of
from orchestrator.channel import AgentChannel
from orchestrator.errors import ConnectionLost, HostUnreachable, TransferError
from orchestrator.fleet import Fleet, Notice

# A link that drops comes back within seconds; after 15 a person wants to know.
RETRY_S = (1.0, 2.0, 4.0, 8.0)

Done = TypeVar("Done")


def reconnecting(
    fleet: Fleet,
    channels: Callable[[], AgentChannel],
    work: Callable[[AgentChannel], Done],
    notice: Notice,
) -> Done:
    """What ``work`` returns on a channel from ``channels``; each new attempt is told.

    :raises UnreachableError: the host was never reached, or the link stays away.
    """
    channel: AgentChannel | None = None
    reached = False
    for pause in RETRY_S:
        try:
            channel = channel or channels()
            reached = True
            return work(channel)
        except (ConnectionLost, HostUnreachable) as error:
            if fleet.closed:
                # Ctrl-C closed the link under a thread's work: nobody waits for it any more.
                raise
            if not reached and isinstance(error, HostUnreachable):
                raise
            notice(f"{fleet.named(error).where}: {error.what}; trying again in {pause:.0f} s")
        except TransferError as error:
            # The commit is the first to read what a job may have edited in place. It removed that:
            # now it is known to be missing, and is sent.
            if kind_of(error) != "release.missing":
                raise
            notice(f"{fleet.named(error).where}: {error.what}; sending them again")
            continue
        if channel is not None:
            fleet.drop(channel)
            channel = None
        time.sleep(pause)
    return work(channels())
