"""A report as text for a terminal: cause, evidence, what to do, what followed from it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

from orchestrator.diag.codes import CODES
from orchestrator.diag.finding import Finding, Quote, Report
from orchestrator.terminal_text import plain

COLOURS = {"fatal": "31;1", "warning": "33", "info": "36"}
SHOWN = 4  # pieces of evidence of one finding; all of them are in the JSON


def render(report: Report, *, width: int = 80, colour: bool = False) -> str:
    """Lines of at most ``width`` characters (commands of the remedy are never broken)."""
    return "\n".join(_lines(report, max(width, 40), colour)) + "\n"


def _lines(report: Report, width: int, colour: bool) -> Iterator[str]:
    serious = [f for f in report.findings if f.severity != "info"]
    remarks = [f for f in report.findings if f.severity == "info"]
    if report.healthy:
        # Not "nothing is wrong": a hang of three minutes is not named yet.
        yield "Nothing wrong was found."
    for index, finding in enumerate(serious):
        if index:
            yield ""
        yield from _finding(finding, width, colour)
        if index == 0:
            yield from _context(report, finding, width)
    if remarks:
        yield ""
        yield "For the record:"
        for finding in remarks:
            yield from _wrap(f"{finding.code}: {finding.title}", "  · ", width)


def _finding(finding: Finding, width: int, colour: bool) -> Iterator[str]:
    meaning = CODES.get(finding.code, "")
    head = f"{finding.severity.upper()} {finding.code}"
    tail = f"  {meaning}  ({finding.confidence:.0%} sure)"
    if len(head) + len(tail) > width:
        tail = f"  ({finding.confidence:.0%} sure)"
    yield paint(head, COLOURS[finding.severity], colour) + tail
    yield from _wrap(finding.title, "  ", width)
    for quote in finding.evidence[:SHOWN]:
        yield from _quote(quote, width)
    if finding.remedy:
        yield paint("  what to do", "1", colour)
        for step in plain(finding.remedy).splitlines():
            yield from _step(step, width)
    for effect in finding.consequences:
        yield from _wrap(f"{effect.code}: {effect.title}", "  therefore ", width)


_COMMAND = re.compile(
    r"(?:sudo |[A-Z_]+=\S+ )*(?:dflashctl|pct|python[\d.]*|\S*/python\S*|torchrun|"
    r"nvidia-smi|dmesg|echo|export|cat|ls|rm|mv|find|grep|apt|pip|lxc-\S+|systemctl|ssh\S*|sed|df|"
    r"du|ss|kill|pkill|tmux|chmod|getent|journalctl) "
)


def _step(step: str, width: int) -> Iterable[str]:
    """Prose is wrapped; a command stays whole, so that it can be copied."""
    return [f"    {step}"] if _COMMAND.match(step) else _wrap(step, "    ", width)


def _quote(quote: Quote, width: int) -> Iterator[str]:
    where = quote.source.removeprefix("probe:")
    place = f"{where}:{quote.line}" if quote.line is not None else where
    text = f"{place}  {plain(quote.text)}"
    room = width - 6
    first, *others = textwrap.wrap(text, room, break_on_hyphens=False, drop_whitespace=False)
    yield f"  │ {first.rstrip()}"
    if others:  # one more line: the telling end of an error is often at its end
        rest = "".join(others).lstrip()
        yield "  │   " + (rest if len(rest) <= room else f"… {_ending(rest, room - 2)}")


def _ending(text: str, room: int) -> str:
    """The last of its words, as many as there is room for."""
    cut = text[-room:]
    return cut.partition(" ")[2] or cut


def _context(report: Report, finding: Finding, width: int) -> Iterator[str]:
    lines = report.context.get(f"{finding.code}:{finding.position}", ())
    if lines:
        yield "  in the log"
        for line in lines:
            text = plain(line).expandtabs(4)
            yield "  " + (text if len(text) <= width - 2 else text[: width - 3] + "…")


def _wrap(text: str, indent: str, width: int) -> Iterable[str]:
    hanging = " " * len(indent)
    return textwrap.wrap(
        plain(text), width, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False
    )


def paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text
