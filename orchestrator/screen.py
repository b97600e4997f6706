"""Log bytes on their way to a terminal or a pipe: prefixes, filters, progress bars."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import BinaryIO

from orchestrator.terminal_text import clean_bytes

# A bar that moves for an hour within one line would be silence in a pipe.
BAR_EVERY_S = 10.0


class LogScreen:
    """Writes pieces of whole lines (each ends in ``\\n`` or ``\\r``) as a person wants to see them.

    On a terminal a bar overwrites itself. In a pipe only the last state of a line is written, and a
    bar's state once in ``BAR_EVERY_S``. Control sequences are left out, and so are colours unless
    they are wanted. The log itself keeps every byte.
    """

    def __init__(
        self,
        out: BinaryIO,
        *,
        terminal: bool,
        colour: bool = False,
        prefix: str = "",
        grep: re.Pattern[bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._terminal = terminal
        self._colour = colour
        self._prefix = prefix.encode()
        self._grep = grep
        self._clock = clock
        self._bar_shown = clock()
        self._bar = b""
        """What stands on the unfinished line."""

    def write(self, data: bytes) -> None:
        data = clean_bytes(data, colour=self._colour)
        plain = not self._prefix and self._grep is None
        if plain and (self._terminal or b"\r" not in data) and not self._bar:
            self._out.write(data)
        else:
            self._out.write(b"".join(self._line(part) for part in _parts(data)))
        self._out.flush()

    def _line(self, part: bytes) -> bytes:
        text, end = part[:-1].removesuffix(b"\r"), part[-1:]
        if end == b"\r" and not self._terminal:
            return self._moving(text)
        if end == b"\r":
            return self._shown(text, b"\r") if self._wanted(text) else b""
        # "\r\n", or a bar that is closed by a bare newline.
        text, self._bar = text or self._bar, b""
        return self._shown(text, b"\n") if self._wanted(text) else b""

    def _moving(self, text: bytes) -> bytes:
        self._bar = text or self._bar
        now = self._clock()
        if not text or now - self._bar_shown < BAR_EVERY_S or not self._wanted(text):
            return b""
        self._bar_shown = now
        return self._shown(text, b"\n")

    def _wanted(self, text: bytes) -> bool:
        return self._grep is None or bool(self._grep.search(text))

    def _shown(self, text: bytes, end: bytes) -> bytes:
        # Clears what a longer bar left behind it on the line.
        clear = b"\x1b[K" if self._terminal and end == b"\r" else b""
        return self._prefix + text + clear + end


def _parts(data: bytes) -> list[bytes]:
    """Cut after every ``\\n`` and ``\\r``, keeping them."""
    return re.findall(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", data)
