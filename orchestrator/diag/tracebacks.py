"""Tracebacks as data: frames, type, message, chain, thread, rank.

Ranks and threads interleave, so every stream (rank prefix, thread tag) is read by itself; within
one stream several processes may still mix, which costs frames but never the exception's line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from orchestrator.diag.text import Line

_HEADER = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)(?:, in (.+))?')
_RICH_FRAME = re.compile(r"^[│|]\s+(/?[\w./<>-]+\.py):(\d+) in (\S+)")
_WRAPPED_FRAME = re.compile(r'^\s*File "([^"]*)$')
_GUTTER = re.compile(r"^\s*(?:\+-\+-+ \d+ -+|\+-+$|(?:\|\s?)+|\+ (?=Exception Group))")
_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Za-z_]\w*(?:Error|Exception|Exceptions|Interrupt|Exit"
    r"|Failed|Failure|Timeout|Closed|Iteration|Group|Warning|Missing|Unsupported|Refused|Abort"
    r"|OutOfResources|FailOnRecompileLimitHit|ArrowInvalid|Invalid|NotFound|Empty|Full|gaierror"
    r"|timeout|error|herror|LimitHit|NotImplemented|Exhausted|Overflow|Stop\w*|ProcessRaised\w*)"
    r"|Exception|error))(?::(?:[ ]|$)(?P<message>.*)|:?\s*$)"
)
_DOTTED = re.compile(r"^(?P<type>(?:[a-z_]\w*\.)+[A-Z]\w*)(?::(?:[ ]|$)(?P<message>.*)|:?\s*$)")
_CAUSE = re.compile(r"The above exception was the direct cause of the following exception")
_DURING = re.compile(r"During handling of the above exception, another exception occurred")
_IGNORED = re.compile(r"^Exception ignored (?:in|on)")
_THREAD = re.compile(r"Exception in thread (\S+?)(?: \((.+?)\))?:?\s*(?:Traceback.*)?$")
_TERMINATE = re.compile(r"terminate called after throwing an instance of '([^']+)'")
_WHAT = re.compile(r"^\s*what\(\):\s*(.*)")
_FATAL = re.compile(r"^Fatal Python error: (.+)")
_STOPS = re.compile(  # a line that no exception message continues over
    r"^(?:step\s|\{['\"]|Epoch |\[supervisor\]|=====|-----|torchrun|ERROR:torch|srun:|make\b|"
    r"wandb:|"
    r"\s*(?:Failures|Root Cause)|.{1,40}: (?:train(?:er)?|exit)\b|exit \d|\[\w+-\d+\] )"
)
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python\d|<frozen |<string>|<__array|^torch/|^/usr/lib/"
    r"|/tmp/torchinductor|<eval_with_key>|/importlib/|lib64/python"
)
MESSAGE_LINES = 40


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str
    code: str = ""

    @property
    def library(self) -> bool:
        """Not the user's own code."""
        return _LIBRARY.search(self.file) is not None


@dataclass
class Failure:
    """One exception that was printed, with its frames if there were any."""

    type: str
    message: str
    line: Line
    """The line that names the exception."""
    first: int
    """Number of the header's line, or of the exception's where there was no header."""
    last: int
    frames: list[Frame] = field(default_factory=list)
    cause: Failure | None = None
    """What it was raised from, or while handling which."""
    thread: str = ""
    ignored: bool = False
    """``Exception ignored in``: at interpreter exit or in ``__del__``; harmless."""
    headed: bool = True
    """A traceback's end, not a lone ``SomeError: text`` line."""
    inner: bool = False
    """The cause of another: reported through it."""

    @property
    def name(self) -> str:
        return self.type.rsplit(".", 1)[-1]

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    def chain(self) -> Iterator[Failure]:
        """This one, then what caused it, outermost first."""
        link: Failure | None = self
        seen = 0
        while link is not None and seen < 50:
            yield link
            link, seen = link.cause, seen + 1

    @property
    def root(self) -> Failure:
        return list(self.chain())[-1]

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame outside of libraries, of the first failure that has one."""
        for link in self.chain():
            for frame in reversed(link.frames):
                if not frame.library:
                    return frame
        return None


@dataclass
class _Open:
    first: int
    frames: list[Frame] = field(default_factory=list)
    thread: str = ""
    ignored: bool = False
    parent: Failure | None = None  # the exception whose "Original Traceback" this is
    headed: bool = False
    at: Line | None = None  # of the last frame


class _Stream:
    """The parser's state for one rank or thread."""

    def __init__(self) -> None:
        self.open: list[_Open] = []
        self.last: Failure | None = None  # it may still gain message lines
        self.room = 0
        self.pending_cause: Failure | None = None
        self.thread = ""
        self.ignored = False
        self.half_frame = ""


def parse(lines: Iterable[Line]) -> list[Failure]:
    """Every printed exception, in the order of its last line."""
    streams: dict[tuple[int | None, str], _Stream] = {}
    found: list[Failure] = []
    end = 0
    for line in lines:
        stream = streams.setdefault(line.stream, _Stream())
        _feed(stream, line, found)
        end = line.number
    for stream in streams.values():
        _cut(stream, end, found)
    return found


def _cut(stream: _Stream, end: int, found: list[Failure]) -> None:
    """The lines end within a traceback: it has no exception, but the frames tell where."""
    opened = stream.open[-1] if stream.open else None
    if opened is None or opened.at is None or not opened.headed or end - opened.at.number > 2:
        return
    raised = re.match(r"raise ([\w.]+)", opened.frames[-1].code)
    name = raised[1] if raised else "Exception"
    _close(stream, opened.at, name, "its words are cut off: the log ends before them", found)


def _feed(stream: _Stream, line: Line, found: list[Failure]) -> None:
    text = line.text
    while (gutter := _GUTTER.match(text)) is not None and gutter.end() > 0:
        text = text[gutter.end() :]
    if _HEADER.search(text) is not None:
        _open(stream, line, text)
    elif _frame(stream, line, text):
        pass
    elif _CAUSE.search(text) or _DURING.search(text):
        stream.pending_cause, stream.last = _newest(stream, found), None
    elif (match := _THREAD.search(text)) is not None and not line.quiet:
        stream.thread, stream.last = match[1], None
    elif _IGNORED.match(text):
        stream.ignored, stream.last = True, None
    elif (match := _TERMINATE.search(text)) is not None:
        _close(stream, line, match[1], "", found)
    elif (match := _WHAT.match(text)) is not None and stream.last is not None:
        stream.last.message = (stream.last.message + " " + match[1]).strip()
    elif (match := _FATAL.match(text)) is not None:
        _close(stream, line, "FatalPythonError", match[1], found)
    elif (match := _exception(text, bool(stream.open))) is not None:
        if not stream.open and stream.last is not None and stream.room > 0 and _near(stream, line):
            _continue(stream, line, text)  # a message that quotes another exception
        elif stream.open or not line.quiet:
            _close(stream, line, match["type"], match["message"] or "", found)
    else:
        _continue(stream, line, text)


def _near(stream: _Stream, line: Line) -> bool:
    """The line goes on with the last exception's message."""
    last = stream.last
    return last is not None and last.headed and line.number - last.last <= 1 and not line.where


def _newest(stream: _Stream, found: list[Failure]) -> Failure | None:
    if stream.last is not None:
        return stream.last
    return found[-1] if found else None


def _exception(text: str, in_traceback: bool) -> re.Match[str] | None:
    match = _EXCEPTION.match(text) or _DOTTED.match(text)
    if match is None:
        return None
    if not in_traceback and not match["message"] and "." not in match["type"]:
        # A bare word such as "Error" or "Timeout" alone on a line is prose, not an exception;
        # "RuntimeError:" may have its message in the lines below.
        told = re.match(r"[A-Z]\w+Error:\s*$", text)
        return match if told or match["type"] in ("KeyboardInterrupt", "MemoryError") else None
    if not in_traceback and match["type"][0].islower() and "." not in match["type"]:
        return None  # "error: …" of some tool
    return match


def _open(stream: _Stream, line: Line, text: str) -> None:
    parent = None
    if "Original Traceback" in text and stream.last is not None:
        parent = stream.last
    opened = _Open(line.number, [], stream.thread, stream.ignored, parent, headed=True)
    stream.open.append(opened)
    del stream.open[:-16]
    stream.last, stream.ignored, stream.thread = None, False, ""


def _frame(stream: _Stream, line: Line, text: str) -> bool:
    match = _FRAME.match(text) or _RICH_FRAME.match(line.text)
    if match is None and stream.half_frame:  # a frame that the terminal wrapped
        joined = stream.half_frame + text.strip()
        stream.half_frame = ""
        match = _FRAME.match(joined)
    if match is None:
        if stream.open and _WRAPPED_FRAME.match(text) is not None:
            stream.half_frame = text.rstrip("\n")
            return True
        if stream.open and stream.open[-1].frames and text[:4] == "    ":
            stream.open[-1].at, frames = line, stream.open[-1].frames
            if not frames[-1].code and text.strip(" ^~"):
                last = frames[-1]
                frames[-1] = Frame(last.file, last.line, last.function, text.strip())
            return True
        return False
    if not stream.open:
        stream.open.append(_Open(line.number))  # the header was lost or cut off
    stream.open[-1].frames.append(Frame(match[1], int(match[2]), match[3] or ""))
    stream.open[-1].at = line
    return True


def _close(stream: _Stream, line: Line, type_: str, message: str, found: list[Failure]) -> None:
    if stream.open:
        opened = stream.open.pop()
        failure = Failure(
            type_,
            message.strip(),
            line,
            opened.first,
            line.number,
            opened.frames,
            thread=opened.thread or line.tag,
            ignored=opened.ignored,
        )
        if opened.parent is not None:  # a worker's own traceback inside the one that re-raised it
            failure.inner = True
            opened.parent.cause = opened.parent.cause or failure
    else:
        failure = Failure(
            type_, message.strip(), line, line.number, line.number, headed=False, thread=line.tag
        )
    if stream.pending_cause is not None and not failure.inner:
        failure.cause = stream.pending_cause
        stream.pending_cause.inner = True
    stream.pending_cause = None
    stream.last, stream.room = failure, MESSAGE_LINES
    found.append(failure)


def _continue(stream: _Stream, line: Line, text: str) -> None:
    last = stream.last
    if last is None:
        return
    foreign = line.where or line.time is not None or (line.day_time is not None)
    if stream.room <= 0 or foreign or _STOPS.match(text):
        stream.last = None
        return
    stream.room -= 1
    last.message += "\n" + text
    last.last = line.number
