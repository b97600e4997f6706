"""Being told that a file grew: inotify where it works, looking now and then where it does not.

The overlay of a container reports what happens inside it; a network mount reports nothing of what
others do. So a look every ``PATIENCE_S`` comes on top of inotify, never instead of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time

PATIENCE_S = 0.5
POLL_S = (0.002, 0.1)
"""Without inotify: from 2 ms after something came to 100 ms when nothing did for a while."""

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE, _IN_MOVED_FROM = 0x2, 0x80, 0x100, 0x40
_IN_NONBLOCK, _IN_CLOEXEC = 0o4000, 0o2000000


class Watch:
    """``wait`` returns when a file in one of the folders may have changed, when ``wake`` is
    readable, or after a while."""

    def __init__(self, folders: set[str], wake: int) -> None:
        self._wake = wake
        self._waited_until = 0.0
        self._inotify = -1
        self._delay = POLL_S[0]
        library = ctypes.CDLL(None, use_errno=True)
        descriptor = library.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        mask = _IN_MODIFY | _IN_MOVED_TO | _IN_MOVED_FROM | _IN_CREATE
        added = descriptor >= 0 and all(
            # The folder, not the file: a rotation's new file is then seen too.
            library.inotify_add_watch(descriptor, os.fsencode(folder), mask) >= 0
            for folder in folders
        )
        if added:
            self._inotify = descriptor
        elif descriptor >= 0:
            # Often max_user_instances, which the host shares among its containers.
            os.close(descriptor)

    def wait(self) -> None:
        """Call it when a look found nothing."""
        if self._inotify < 0:
            now = time.monotonic()
            # Something came since the last wait began: look often again.
            quick = now - self._waited_until > POLL_S[0]
            self._delay = POLL_S[0] if quick else min(self._delay * 1.5, POLL_S[1])
            select.select([self._wake], [], [], self._delay)
            self._waited_until = time.monotonic()
            return
        ready, _, _ = select.select([self._wake, self._inotify], [], [], PATIENCE_S)
        if self._inotify in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._inotify, 1 << 16)

    def close(self) -> None:
        if self._inotify >= 0:
            os.close(self._inotify)
