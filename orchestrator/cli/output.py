"""What a person or a program reads: one place for tables, notices, errors and JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TextIO

from orchestrator.agent.frames import finite
from orchestrator.errors import DflashctlError
from orchestrator.terminal_text import Stream, fit, fit_name, plain, shown

if TYPE_CHECKING:
    from orchestrator.launch import Step

CLEAR = "\r\x1b[K"
"""Begins the line anew."""


def fail(error: DflashctlError, *, as_json: bool) -> None:
    """One message: JSON on standard output, else words on standard error."""
    if as_json:
        print(json.dumps(error.as_dict()), flush=True)
    else:
        before = CLEAR if redraws(sys.stderr) else ""
        _print(f"{paint('error:', '31;1', sys.stderr)} {error}", sys.stderr, before)


def notice(text: str) -> None:
    """Something worth knowing that is not the verb's answer. A meter's line gives way to it."""
    _print(f"dflashctl: {text}", sys.stderr, before=CLEAR if redraws(sys.stderr) else "")


def waiting(text: str) -> None:
    """What takes long, for who sits there: like a meter's line on a terminal only."""
    if redraws(sys.stderr):
        notice(text)


def emit(data: dict[str, Any]) -> None:
    """The verb's answer as one JSON object, without Python's NaN, which no other parser takes."""
    try:
        text = json.dumps(data, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(finite(data), default=str)
    print(text, flush=True)


def show_steps(steps: Sequence[Step], place: dict[str, Any], *, as_json: bool) -> None:
    """What a dry run would send; ``place`` is what it is about, in the JSON."""
    if as_json:
        emit({**place, "steps": [{"to": step.label, "text": step.text} for step in steps]})
        return
    for step in steps:
        say(step.line())


def say(text: str) -> None:
    """The verb's answer as words."""
    _print(text, sys.stdout)


def _print(text: str, stream: TextIO, before: str = "") -> None:
    """Whatever came from a container or a file name steers no terminal."""
    print(before + shown(text, colour=wants_colour(stream)), file=stream, flush=True)


def wants_colour(stream: TextIO) -> bool:
    """A terminal whose user did not refuse it (https://no-color.org)."""
    return redraws(stream) and not os.environ.get("NO_COLOR")


def redraws(stream: TextIO) -> bool:
    """A terminal on which a line can be written over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str, stream: TextIO | None = None) -> str:
    """Colour where it is wanted; ``stream`` is standard output unless given.

    Yellow is never bold: many terminals make that a bright one, which no white ground shows.
    """
    return f"\x1b[{code}m{text}\x1b[0m" if wants_colour(stream or sys.stdout) else text


def shower(stream: TextIO) -> Callable[[bytes], None]:
    """Hands a container's output on as it comes: all of it into a pipe, only words and colours to
    a terminal."""
    if not stream.isatty():
        return lambda piece: _write(stream, piece)
    filtered = Stream(colour=wants_colour(stream))
    return lambda piece: _write(stream, filtered.feed(piece))


def _write(stream: TextIO, data: bytes) -> None:
    stream.buffer.write(data)
    stream.flush()


def terminal_width() -> int | None:
    """Columns of the terminal that standard output is; None in a pipe, where nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def hang(lead: str, text: str, indent: int) -> None:
    """Words after ``lead``; on a terminal their further lines begin in column ``indent``."""
    width = terminal_width()
    if width is None or width < 2 * indent:
        say(lead + text)
        return
    room = width - indent
    lines = textwrap.wrap(plain(text), room, break_long_words=False, break_on_hyphens=False)
    say(lead + f"\n{'':{indent}}".join(lines))


class Table:
    """Rows in columns of fixed width: on a terminal as they come, in a pipe all at the end.

    The first column holds what one copies: it is never cut. It takes what a terminal has to spare,
    and a cell too long for it stands on a line of its own. The second holds names. In a pipe
    nothing is cut: a column is as wide as its longest cell, which only the last row tells, and who
    reads there reads on until the verb ends.
    """

    LONGEST = 65
    """Of a run id: 40 of its name, which node, and when."""

    def __init__(self, *columns: tuple[str, int]) -> None:
        self._names = [name for name, _ in columns]
        self._widths = [width for _, width in columns]
        self._terminal = terminal_width()
        self._begun = False
        self._held: list[list[str]] = []
        if self._terminal is not None:
            spare = max(0, self._terminal - sum(self._widths) - len(columns) + 1)
            more = min(spare, self.LONGEST - self._widths[0])
            self._widths[0] += more
            self._widths[1] += spare - more

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Also where something went wrong: what has come is worth reading."""
        for cells in self._held:
            self._widths = [max(w, len(c)) for c, w in zip(cells, self._widths, strict=True)]
        for cells in self._held:
            self._print(cells)

    def row(self, *cells: object) -> None:
        if not self._begun:
            self._begun = True
            self._take(self._names)
        filled = [*cells, *[None] * (len(self._names) - len(cells))]
        self._take(["-" if cell in (None, "") else plain(str(cell)) for cell in filled])

    def _take(self, cells: list[str]) -> None:
        if self._terminal is None:
            self._held.append(cells)
            return
        first, second, *others = cells
        others = [fit(c, w) for c, w in zip(others, self._widths[2:], strict=True)]
        if len(first) > self._widths[0]:
            say(first)
            first = ""
        self._print([first, fit_name(second, self._widths[1]), *others])

    def _print(self, cells: list[str]) -> None:
        padded = (f"{c:<{w}}" for c, w in zip(cells, self._widths, strict=True))
        say(" ".join(padded).rstrip())


class Meter:
    """Bytes that have arrived so far, on a terminal only, twice a second."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._total = 0
        self._done = 0
        self._shown = 0.0
        self._lock = threading.Lock()
        self._live = redraws(sys.stderr)

    def expect(self, count: int) -> None:
        """So many more are to come; unless told, only what has come is shown."""
        with self._lock:
            self._total += count

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._live and now - self._shown > 0.5:
                self._shown = now
                of = f" of {size(self._total)}" if self._total else ""
                print(f"\r{self._what} {size(self._done)}{of}\x1b[K", end="", file=sys.stderr)

    def close(self) -> None:
        if self._live and self._shown:
            print(CLEAR, end="", file=sys.stderr, flush=True)
        self._shown = 0.0


def size(count: float) -> str:
    """``1.5 MB``: decimal units."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"
