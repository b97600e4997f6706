"""Text out of a container on its way to a terminal, which nothing in it may steer. Pure.

A log line can hold sequences that move the cursor, clear the screen, retitle the window or, on some
terminals, type words into the shell. Colours (SGR) pass where they are wanted; everything else of
ECMA-48 goes: CSI, OSC, DCS and other strings, single escapes, C0 and C1 controls. So do the signs
that turn the direction of writing round, which show one thing and mean another.
"""

from __future__ import annotations

import codecs
import re

_COLOUR = r"\x1b\[[0-9;:]*m"
# What is no UTF-8 is decoded to surrogates: 80 to 9F are the same controls in eight bits.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\udc80-\udc9f\u202a-\u202e\u2066-\u2069]")
_SEQUENCE = re.compile(
    rf"(?P<colour>{_COLOUR})"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    # A string of OSC, DCS, SOS, PM, APC; of one that does not end on its line the words are shown.
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])(?:[^\x07\x1b\x80-\x9f\n]*(?:\x07|\x1b\\|\x9c))?"
    r"|\x1b[ -/]*[0-~]?"
    rf"|{_CONTROL.pattern}"
)
# At the end of a piece: the next one may complete it.
_BEGUN = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\x9c\n]*\x1b?|[ -/]*)?\Z")
_COLOURED_LINE = re.compile(rf"^.*{_COLOUR}.*$", re.MULTILINE)
_C0 = bytes({*range(32), 127} - {*b"\t\n"})
_RESET = "\x1b[0m"
# Longer than any sequence that tells something; a broken one is not waited for.
_HELD = 4096


def plain(text: str) -> str:
    """Words, newlines and tabs. Of a line that was overwritten by ``\\r`` its last state."""
    return shown(_settled(text), colour=False)


def shown(text: str, *, colour: bool, bars: bool = False) -> str:
    """The same, with its colours if they are wanted; each line ends in the terminal's own.

    :param bars: keep ``\\r``, by which a progress bar overwrites its line.
    """
    if not _CONTROL.search(text):
        return text

    def kept(match: re.Match[str]) -> str:
        if match["colour"]:
            return match[0] if colour else ""
        return "\r" if bars and match[0] == "\r" else ""

    cleaned = _SEQUENCE.sub(kept, text)
    if not colour or "\x1b" not in cleaned:
        return cleaned
    return _COLOURED_LINE.sub(lambda line: _closed(line[0]), cleaned)


def fit(text: str, width: int) -> str:
    """Words of one line, cut with a dot-dot-dot."""
    text = plain(text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def fit_name(name: str, width: int) -> str:
    """A run id, a container's or a host's name keeps its end, which tells it from the others."""
    name = plain(name)
    if len(name) <= width:
        return name
    end = min(11, width // 2)
    return f"{name[: width - end - 1]}…{name[len(name) - end :]}"


def _closed(line: str) -> str:
    text = line.removesuffix("\r")
    return line if text.endswith(_RESET) else f"{text}{_RESET}{line[len(text) :]}"


def _settled(text: str) -> str:
    if "\r" not in text:
        return text
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


class Stream:
    """The output of a command, in pieces that may cut characters and sequences anywhere."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._held = ""

    def feed(self, piece: bytes) -> bytes:
        """What of it may be shown now."""
        text = self._held + self._decode(piece)
        begun = _BEGUN.search(text, max(0, len(text) - _HELD))
        cut = begun.start() if begun else len(text)
        self._held = text[cut:]
        return _encoded(shown(text[:cut], colour=self._colour, bars=True))


def clean_bytes(data: bytes, *, colour: bool) -> bytes:
    """:func:`shown` of whole lines as bytes, bars too; what is no UTF-8 stays what it was."""
    if data.isascii() and len(data.translate(None, _C0)) == len(data):
        return data  # Nearly every line: 100,000 a second and more are to pass.
    text = data.decode("utf-8", "surrogateescape")
    return _encoded(shown(text, colour=colour, bars=True))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def counted(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
