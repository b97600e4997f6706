"""One raw line of a log to a clean ``Line``: colours, carriage returns, rank prefixes, time stamps.

Everything that a terminal, a launcher or a logger adds round the words is taken off here, once, so
that the rules see only the words and know from which rank, thread and second they came.
"""

from __future__ import annotations

import re
from calendar import timegm
from dataclasses import dataclass

from orchestrator.terminal_text import shown

_RANK = re.compile(
    r"^\s*(?:"
    r"\[(?:rank|Rank|RANK|default|trainer|worker|proc|local_rank)[ _:=]?(\d+)\]\s*:?[ ]?"
    r"|\[\d+,(\d+)\]<std(?:out|err)>:[ ]?"  # mpirun --tag-output
    r"|\((?:rank|Rank|RANK)[ :=]?(\d+)\)[: ][ ]?"
    r"|(?:rank|Rank|RANK)[ _]?(\d+)\s?[:|][ ]"
    r"|(\d{1,4}):[ ](?=Traceback |  File |\S+Error\b|\[E|\[W|\[rank)"  # srun --label
    r")"
)
# torch's own way of writing a rank inside the message, kept in the text.
_INNER_RANK = re.compile(r"\[(?:PG [^\]]{0,60}|)\s?Rank (\d+)\]|^\[rank(\d+)\]:")
_TAG = re.compile(
    r"^\[((?!(?i:debug|info|warn|warning|error|critical|fatal|rank\d*|errno|"
    r"y/n)\])[A-Za-z][\w.:-]{0,24})\]:?"
    r"[ ](?=.)"
)
_QUIET_TAG = re.compile(
    r"^(?:cfg|conf|config|args|argv|flags|env|cmd|options|settings|usage|help|hint)$"
)
_MONTH_NAMES = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec"
_MONTHS = {name: i for i, name in enumerate(_MONTH_NAMES.split(), 1)}
_ISO = re.compile(
    r"^[\[(]?(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,]\d+)?"
    r"(?:Z| ?UTC|[+-]\d\d:?\d\d)?[\])]?[ ,:|-]*"
)
_GLOG = re.compile(
    r"^\[?[VIWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.\d+(?:\s+\d+)? ([\w./<>-]+:\d+)\] ?"
    r"(?:\[[\w/!]+\] )?"
)
_CLOCK = re.compile(r"^\[?(\d\d):(\d\d):(\d\d)(?:[.,]\d+)?\]?(?=[ |:])[ |:]*")
_SYSLOG = re.compile(
    r"^(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d) "
)
_WEEKDAY = re.compile(
    r"^\[?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) "
    r"(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(\d{1,2}) "
    r"(\d\d):(\d\d):(\d\d)(?: \w{2,5})? (\d{4})\]? ?"
)
_JSON_TIME = re.compile(
    r'"(?:t|ts|time|timestamp|at)": ?(?:"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)'
    r"|(\d{9,10}(?:\.\d+)?))"
)
# Lines that state what will be done or with what: their words are no events.
_QUIET = re.compile(
    r"^\s*(?:"
    r"\++ |\$ |> |# |--?[A-Za-z][\w-]*(?:[ =]|$)|export [A-Z_]+=|set -|alias |"
    r"\[?(?:cfg|conf|config|configuration|args|arguments|argv|flags|options|settings|env|environ"
    r"|environment|cmd|command|usage|hparams|hyperparameters|profile|help|tip|hint|note|docs?)\]?"
    r"\s?[:=>\]]|Namespace\(|\w*(?:Config|Arguments|Args|Options|Settings)\(|"
    r"(?:NCCL|TORCH|CUDA|OMP|HF|PYTORCH|TRITON|PYTHON|WANDB|TOKENIZERS|LD|LC|MASTER|DFLASH)"
    r"[A-Z_]*_?[A-Z]+=|[a-z][\w.-]*\s?=\s?\S+\s*$|"
    r"(?:torchrun|python3?|accelerate|deepspeed|bash|sh|srun|mpirun|uv|exec) (?!.*(?:: not found"
    r"|[Ee]rror|command not found))[-\w./=: ]*(?: --?\w|\.py|\.sh)"
    r")"
)
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Failed|Interrupt|Exit|Timeout|Warning|"
    r"Closed)\b"
)
DEFAULT_YEAR = 2000


@dataclass(frozen=True, slots=True)
class Line:
    """One line as the rules see it."""

    number: int
    """1-based, in the file or probe that ``source`` names."""
    text: str
    """Without colours, rank prefix and time stamp; a glog header's file stays in ``where``."""
    source: str = "log"
    rank: int | None = None
    tag: str = ""
    """Thread or process name in brackets before the words, such as ``drafter-2``."""
    where: str = ""
    """``file.py:123`` of a glog header."""
    time: float | None = None
    """Seconds since the epoch, by the writer's clock; ``DEFAULT_YEAR`` if the stamp has no year."""
    day_time: float | None = None
    """Seconds since midnight, known also where the date is not."""
    quiet: bool = False
    """A flag, an echoed command, a config dump: what is planned, not what happened."""
    raw: str = ""
    """As a person saw it (without colours); for quoting."""
    lane: int | None = None
    """The rank that the launcher's prefix names (``rank`` may also come from the words)."""

    @property
    def stream(self) -> tuple[int | None, str]:
        """Lines of one stream are in order among themselves; those of several interleave."""
        return (self.lane, self.tag)


def strip_control(text: str) -> str:
    """Without colours, titles and control characters (tabs and carriage returns stay)."""
    return shown(text, colour=False, bars=True)


def overlays(text: str) -> list[str]:
    """The pieces between carriage returns, as drawn one over another; the last of equal bars only.

    Progress bars redraw hundreds of times: pieces that differ only in digits and blocks are one.
    """
    if "\r" not in text:
        return [text]
    kept: dict[str, str] = {}
    for piece in text.split("\r"):
        if piece.strip("\x00 \n"):
            shape = re.sub(r"[\d\W_]+", "", piece)
            kept.pop(shape, None)
            kept[shape] = piece
    return list(kept.values())


def read_lines(number: int, raw: bytes | str, source: str = "log") -> list[Line]:
    """One line of a file as the one or more lines that it drew."""
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    return [read_line(number, piece, source) for piece in overlays(text)]


def read_line(number: int, text: str, source: str = "log") -> Line:
    """One drawn line."""
    seen = strip_control(text).rstrip()
    rest, rank, tag, where = seen, None, "", ""
    time: float | None = None
    day_time: float | None = None
    for _ in range(4):  # prefixes come in any order: time, rank, thread, again time
        before = rest
        if (match := _RANK.match(rest)) is not None:
            rank = rank if rank is not None else int(next(g for g in match.groups() if g))
            rest = rest[match.end() :]
        if (match := _GLOG.match(rest)) is not None:
            where = match[6]
            time, day_time = _stamp(DEFAULT_YEAR, match[1], match[2], match[3], match[4], match[5])
            rest = rest[match.end() :]
        elif time is None and day_time is None:
            time, day_time, rest = _time_prefix(rest)
        if not tag and (match := _TAG.match(rest)) is not None:
            tag, rest = match[1], rest[match.end() :]
        if rest == before:
            break
    if time is None and day_time is None and rest[:1] == "{":
        time, day_time = _json_time(rest)
    lane = rank
    if rank is None and (match := _INNER_RANK.search(rest, 0, 200)) is not None:
        rank = int(match[1] or match[2])
    quiet = (
        _QUIET.match(rest) is not None or _QUIET_TAG.match(tag) is not None
    ) and _EXCEPTION.match(rest) is None
    return Line(number, rest, source, rank, tag, where, time, day_time, quiet, seen, lane)


def _time_prefix(text: str) -> tuple[float | None, float | None, str]:
    if (match := _ISO.match(text)) is not None:
        return (*_stamp(int(match[1]), *match.groups()[1:6]), text[match.end() :])
    if (match := _CLOCK.match(text)) is not None:
        day_time = int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3])
        return None, float(day_time), text[match.end() :]
    if (match := _SYSLOG.match(text)) is not None:
        month = _MONTHS[match[1]]
        stamp = _stamp(DEFAULT_YEAR, month, match[2], match[3], match[4], match[5])
        return (*stamp, text[match.end() :])
    if (match := _WEEKDAY.match(text)) is not None:  # dmesg -T
        month = _MONTHS[match[1]]
        stamp = _stamp(int(match[6]), month, match[2], match[3], match[4], match[5])
        return (*stamp, text[match.end() :])
    return None, None, text


def _json_time(text: str) -> tuple[float | None, float | None]:
    match = _JSON_TIME.search(text, 0, 400)
    if match is None:
        return None, None
    if match[7]:
        seconds = float(match[7])
        return seconds, seconds % 86400
    return _stamp(int(match[1]), *match.groups()[1:6])


def _stamp(
    year: int, month: str | int, day: str | int, hour: str, minute: str, second: str
) -> tuple[float | None, float | None]:
    clock = int(hour) * 3600 + int(minute) * 60 + int(second)
    if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31) or clock > 86460:
        return None, None
    return float(timegm((year, int(month), int(day), 0, 0, 0)) + clock), float(clock)


def parse_time(text: str) -> float | None:
    """Seconds since the epoch of a date in a probe's text: ISO, ``date``'s output, or a number."""
    text = text.strip()
    if re.fullmatch(r"\d{9,10}(?:\.\d+)?", text):
        return float(text)
    match = re.search(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d", text)
    if match is not None:
        return _time_prefix(match[0])[0]
    pattern = (  # `date`: Mon Sep  7 00:01:24 UTC 2026, or Mon 07 Sep 2026 12:01:24 AM UTC
        r"(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(\d{1,2}),? (\d\d):(\d\d):(\d\d)"
        r"(?: [A-Z]{2,5})? (\d{4})"
    )
    match = re.search(pattern, text)
    if match is not None:
        return _stamp(int(match[6]), _MONTHS[match[1]], match[2], match[3], match[4], match[5])[0]
    match = re.search(
        r"(\d{1,2}) (Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) (\d{4}) "
        r"(\d\d):(\d\d):(\d\d)(?: ([AP]M))?",
        text,
    )
    if match is not None:
        hour = int(match[4]) % 12 + (12 if match[7] == "PM" else 0) if match[7] else int(match[4])
        return _stamp(int(match[3]), _MONTHS[match[2]], match[1], str(hour), match[5], match[6])[0]
    return None
