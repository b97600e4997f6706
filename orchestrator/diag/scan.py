"""A log of any size to the few thousand lines that matter, in one pass and constant memory.

Training logs repeat themselves: with the digits deleted, 2 GB of step lines have a few dozen shapes.
Deleting digits, splitting and one set difference run at C speed (390 MB/s measured on 2 cores),
while one regular expression over the same bytes made 18 MB/s. So only the first lines of each *new*
shape are looked at, by a list of telling words, and kept with their neighbourhood.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20
WHOLE_LINES = 20_000  # a log up to this long is kept whole
WHOLE_BYTES = 4 << 20
HEAD, TAIL = 400, 3_000
BEFORE, AFTER = 40, 25  # neighbourhood of a telling line: a traceback's frames, a message's rest
MAX_KEPT = 24_000
MAX_SHAPES = 200_000
REPEATS = 3  # kept occurrences of one telling shape in one chunk: the first ones and the last
SAMPLES = 8  # step lines kept of each chunk
MAX_LINE = 4_096

# A line that carries one of these may matter. Wide on purpose: a needless hit costs one kept line.
TELLING = tuple(
    word.encode()
    for word in (
        "rror|xcept|raceback|ailed|ailure|FAILED|arning|WARN|FATAL|atal|illed|KILL|Xid|NVRM|oom|"
        "OOM|out of|denied|refused|imed out|imeout|ot found|o such|annot|an't|ould not|nable|"
        "ismatch|issing|nvalid|ndefined|nan|NaN|inf|non-finite|bort|SIG|ignal|exit|dumped|ecompil|"
        "flex_attention|FX |lock|idle|starv|queue|wait|resum|Resum|estart|ttempt|done|Done|inish|"
        "omplete|unning|heckpoint|ckpt|Assertion|orrupt|truncat|ncomplete|nterrupt|hang|hung|"
        "stuck|skip|empty|expected|no space|No space|quota|ead-only|ermission|libcuda|NVML|driver|"
        "Terminated|Hangup|Broken|closed|reset|terminate|what()|fault|throttl|slow|ommand|"
        "tmux|pct|lxc|ssh|dflashctl|evicted|shutdown|reboot|graph break|eager|fall|unused|ignored"
    ).split("|")
)
DIGITS = b"0123456789"


@dataclass
class Scan:
    """The kept lines by number, and what was left out."""

    lines: dict[int, bytes] = field(default_factory=dict)
    total: int = 0
    whole: bool = True
    steps: set[int] = field(default_factory=set)
    """Numbers of kept sample lines that are there for the step series."""
    counts: dict[bytes, int] = field(default_factory=dict)
    """How often each telling shape occurred."""
    work: int = 0
    """Lines looked at one by one; a bound for tests that want no quadratic time."""


def scan_file(path: Path) -> Scan:
    """``path`` is read once, in pieces."""
    with path.open("rb") as stream:
        return scan_chunks(_pieces(stream))


def scan_bytes(data: bytes) -> Scan:
    return scan_chunks(data[i : i + CHUNK] for i in range(0, len(data), CHUNK))


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    while piece := stream.read(CHUNK):
        yield piece


def scan_chunks(pieces: Iterable[bytes]) -> Scan:
    """Whole while small; once past the bound, by shapes."""
    buffered: list[bytes] = []
    size = newlines = 0
    stream = iter(pieces)
    for piece in stream:
        buffered.append(piece)
        size += len(piece)
        newlines += piece.count(b"\n")
        if size > WHOLE_BYTES or newlines > WHOLE_LINES:
            break
    else:
        lines = b"".join(buffered).split(b"\n")
        if lines and not lines[-1]:
            lines.pop()
        return Scan({i: line for i, line in enumerate(lines, 1)}, len(lines))
    return _Shapes().run(_joined(buffered, stream))


def _joined(buffered: list[bytes], rest: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Lists of whole lines; a line without end is cut at a chunk's length."""
    carry = b""
    for piece in _chain(buffered, rest):
        data = carry + piece
        cut = data.rfind(b"\n") + 1
        if cut:
            carry = data[cut:]
            yield data[: cut - 1].split(b"\n")
        elif len(data) >= CHUNK:
            carry = b""
            yield [data]
        else:
            carry = data
    if carry:
        yield [carry]


def _chain(first: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    yield from first
    yield from rest


class _Shapes:
    """The state of one pass over a long log."""

    def __init__(self) -> None:
        self.scan = Scan(whole=False)
        self.seen: set[bytes] = set()
        self.telling: set[bytes] = set()
        self.step_shapes: set[bytes] = set()
        self.tail: deque[tuple[int, bytes]] = deque(maxlen=TAIL)
        self.after = 0  # keep lines up to this number: the rest of a neighbourhood

    def run(self, chunks: Iterator[list[bytes]]) -> Scan:
        for lines in chunks:
            self._chunk(lines)
        for number, line in self.tail:
            self.scan.lines.setdefault(number, line)
        self.scan.lines = dict(sorted(self.scan.lines.items()))
        return self.scan

    def _chunk(self, lines: list[bytes]) -> None:
        base = self.scan.total  # line i of this chunk has number base + i + 1
        shapes = b"\n".join(lines).translate(None, DIGITS).split(b"\n")
        present = set(shapes)
        fresh = present - self.seen
        if len(self.seen) > MAX_SHAPES:
            self.seen.clear()
        self.seen |= fresh
        self._classify(fresh)
        for number in range(base + 1, min(self.after, base + len(lines)) + 1):
            self._keep(number, lines[number - base - 1])
        if base < HEAD:
            for i, line in enumerate(islice(lines, max(0, HEAD - base))):
                self._keep(base + i + 1, line)
        wanted = present & self.telling
        if wanted:
            self._telling(base, lines, shapes, wanted)
        if self.step_shapes:
            self._sample(base, lines, shapes)
        first = max(0, len(lines) - TAIL)
        self.tail.extend((base + i + 1, _clip(lines[i])) for i in range(first, len(lines)))
        self.scan.total += len(lines)

    def _classify(self, fresh: set[bytes]) -> None:
        if not fresh:
            return
        blob = b"\n".join(fresh)
        words = [word for word in TELLING if word in blob]
        for shape in fresh:
            self.scan.work += 1
            if any(word in shape for word in words):
                self.telling.add(shape)
            if (b"loss" in shape or b"tok" in shape or b"step" in shape) and len(shape) < 600:
                self.step_shapes.add(shape)
        if len(self.telling) > MAX_SHAPES:
            self.telling = set(fresh & self.telling)
        if len(self.step_shapes) > MAX_SHAPES:
            self.step_shapes.clear()

    def _telling(
        self, base: int, lines: list[bytes], shapes: list[bytes], wanted: set[bytes]
    ) -> None:
        places: dict[bytes, list[int]] = {}
        for i, shape in enumerate(shapes):
            if shape in wanted:
                places.setdefault(shape, []).append(i)
        for shape, where in places.items():
            self.scan.work += 1
            known = self.scan.counts.get(shape, 0)
            if len(self.scan.counts) < MAX_SHAPES:
                self.scan.counts[shape] = known + len(where)
            if known > 60 or len(self.scan.lines) > MAX_KEPT:
                picks = where[-1:] if len(self.scan.lines) <= 2 * MAX_KEPT else []
                for i in picks:
                    self._keep(base + i + 1, lines[i])
                continue
            # Long lines that repeat are step lines or bars; their neighbourhood is more of them.
            for i in {*where[:REPEATS], where[-1]}:
                self._window(base, lines, i)

    def _window(self, base: int, lines: list[bytes], i: int) -> None:
        number = base + i + 1
        for j in range(number - BEFORE, number + AFTER + 1):
            k = j - base - 1
            if 0 <= k < len(lines):
                self._keep(j, lines[k])
        if i < BEFORE and self.tail:  # the neighbourhood began in the chunk before
            for j, line in islice(reversed(self.tail), BEFORE - i):
                self._keep(j, line)
        self.after = max(self.after, number + AFTER)

    def _sample(self, base: int, lines: list[bytes], shapes: list[bytes]) -> None:
        stride = max(1, len(lines) // SAMPLES)
        for start in range(0, len(lines), stride):
            for i in range(start, min(start + 40, start + stride, len(lines))):
                if shapes[i] in self.step_shapes:
                    self._keep(base + i + 1, lines[i])
                    self.scan.steps.add(base + i + 1)
                    break
        if len(self.scan.steps) > MAX_KEPT // 2:
            self._thin()

    def _thin(self) -> None:
        ordered = sorted(self.scan.steps)
        for number in ordered[1::2]:
            self.scan.lines.pop(number, None)
        self.scan.steps = set(ordered[::2])

    def _keep(self, number: int, line: bytes) -> None:
        self.scan.work += 1
        self.scan.lines[number] = _clip(line)


def _clip(line: bytes) -> bytes:
    """The ends of a long line: what came first, and what a bar was overwritten with last."""
    if len(line) <= MAX_LINE:
        return line
    return line[: MAX_LINE // 2] + b"\r" + line[-MAX_LINE // 2 :]
