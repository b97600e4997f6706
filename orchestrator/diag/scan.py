"""A log of any size to the few thousand lines that matter, in one pass and constant memory.

Training logs repeat themselves: with the digits deleted, 2 GB of step lines have a few dozen
shapes. Deleting digits, splitting and one set difference run at C speed (390 MB/s measured on 2
cores), while one regular expression over the same bytes made 18 MB/s. So only the first lines of
each *new* shape are looked at, by a list of telling words, and kept with their neighbourhood.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20
WHOLE_LINES = 10_000  # a log up to this long is kept whole
WHOLE_BYTES = 4 << 20
HEAD, TAIL = 400, 3_000
BEFORE, AFTER = 40, 25  # neighbourhood of a telling line: a traceback's frames, a message's rest
MAX_KEPT = 24_000
MAX_SHAPES = 200_000
REPEATS = 3  # kept occurrences of one telling shape in one chunk: the first ones and the last
SAMPLES = 8  # step lines kept of a chunk
EVERY_CHUNK = 256  # chunks that are all sampled; of later ones every fourth is
KNOWN = 60  # occurrences of one telling shape after which only the last of a chunk is kept
MAX_LINE = 4_096

# A line that carries one of these may matter. Wide on purpose: a needless hit costs one kept line.
_WORDS = """
rror xcept raceback ailed ailure FAILED arning WARN FATAL atal illed KILL Xid NVRM oom OOM
denied refused imeout annot an't nable ismatch issing nvalid ndefined nan NaN inf non-
finite bort SIG ignal exit dumped ecompil flex_attention lock idle starv queue wait resum
Resum estart ttempt done Done inish omplete unning heckpoint ckpt Assertion orrupt truncat
ncomplete nterrupt hang hung stuck skip empty expected quota ead-only ermission libcuda
NVML driver Terminated Hangup Broken closed reset terminate what() fault throttl slow
ommand tmux pct lxc ssh dflashctl evicted shutdown reboot eager fall unused ignored
"""
_PHRASES = (
    "out of",
    "imed out",
    "ot found",
    "o such",
    "ould not",
    "FX ",
    "no space",
    "No space",
    "graph break",
)
TELLING = tuple(word.encode() for word in (*_WORDS.split(), *_PHRASES))
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


class _Chunk:
    """Some whole lines; they are split only if somebody asks."""

    def __init__(self, data: bytes, base: int) -> None:
        self.data = data
        self.base = base
        """Lines before it: line ``i`` has number ``base + i + 1``."""
        self.shapes = data.translate(None, DIGITS).split(b"\n")

    @cached_property
    def lines(self) -> list[bytes]:
        return self.data.split(b"\n")

    def __len__(self) -> int:
        return len(self.shapes)


def _joined(buffered: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces that end at a line's end; a line without end is cut at a chunk's length."""
    carry = b""
    for piece in chain(buffered, rest):
        cut = piece.rfind(b"\n")
        if cut >= 0:
            yield carry + piece[:cut]
            carry = piece[cut + 1 :]
        else:
            carry += piece
            if len(carry) >= CHUNK:
                yield carry
                carry = b""
    if carry:
        yield carry


class _Shapes:
    """The state of one pass over a long log."""

    def __init__(self) -> None:
        self.scan = Scan(whole=False)
        self.seen: set[bytes] = set()
        self.telling: set[bytes] = set()
        self.step_shapes: set[bytes] = set()
        self.recent: deque[_Chunk] = deque(maxlen=3)
        self.after = 0  # keep lines up to this number: the rest of a neighbourhood

    def run(self, pieces: Iterator[bytes]) -> Scan:
        for index, data in enumerate(pieces):
            chunk = _Chunk(data, self.scan.total)
            self._chunk(chunk, sample=index < EVERY_CHUNK or index % 4 == 0)
        for number, line in self._last(TAIL):
            self.scan.lines.setdefault(number, _clip(line))
        self.scan.lines = dict(sorted(self.scan.lines.items()))
        return self.scan

    def _chunk(self, chunk: _Chunk, sample: bool) -> None:
        base = chunk.base
        present = set(chunk.shapes)
        fresh = present - self.seen
        if len(self.seen) > MAX_SHAPES:
            self.seen.clear()
        self.seen |= fresh
        self._classify(fresh)
        for number in range(base + 1, min(self.after, base + len(chunk)) + 1):
            self._keep(number, chunk.lines[number - base - 1])
        if base < HEAD:
            for i, line in enumerate(islice(chunk.lines, max(0, HEAD - base))):
                self._keep(base + i + 1, line)
        wanted = present & self.telling
        if wanted:
            self._telling(chunk, wanted)
        if self.step_shapes and sample:
            self._sample(chunk)
        self.recent.append(chunk)
        self.scan.total += len(chunk)

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

    def _telling(self, chunk: _Chunk, wanted: set[bytes]) -> None:
        places: dict[bytes, list[int]] = {}
        for i, shape in enumerate(chunk.shapes):
            if shape in wanted:
                places.setdefault(shape, []).append(i)
        for shape, where in places.items():
            self.scan.work += 1
            known = self.scan.counts.get(shape, 0)
            if len(self.scan.counts) < MAX_SHAPES:
                self.scan.counts[shape] = known + len(where)
            if known > KNOWN or len(self.scan.lines) > MAX_KEPT:
                if len(self.scan.lines) <= 2 * MAX_KEPT:
                    self._keep(chunk.base + where[-1] + 1, chunk.lines[where[-1]])
                continue
            for i in {*where[:REPEATS], where[-1]}:
                self._window(chunk, i)

    def _window(self, chunk: _Chunk, i: int) -> None:
        for k in range(max(0, i - BEFORE), min(len(chunk), i + AFTER + 1)):
            self._keep(chunk.base + k + 1, chunk.lines[k])
        if i < BEFORE:  # the neighbourhood began in the chunk before
            for j, line in self._last(BEFORE - i):
                self._keep(j, line)
        self.after = max(self.after, chunk.base + i + 1 + AFTER)

    def _last(self, count: int) -> Iterator[tuple[int, bytes]]:
        """The last ``count`` lines of the chunks before, newest first."""
        for chunk in reversed(self.recent):
            lines = chunk.lines
            for i in range(len(lines) - 1, max(-1, len(lines) - 1 - count), -1):
                yield chunk.base + i + 1, lines[i]
            count -= len(lines)
            if count <= 0:
                return

    def _sample(self, chunk: _Chunk) -> None:
        stride = max(1, len(chunk) // SAMPLES)
        for start in range(0, len(chunk), stride):
            for i in range(start, min(start + 40, start + stride, len(chunk))):
                if chunk.shapes[i] in self.step_shapes:
                    self._keep(chunk.base + i + 1, chunk.lines[i])
                    self.scan.steps.add(chunk.base + i + 1)
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
