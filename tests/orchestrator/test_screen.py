"""How log bytes look on a terminal, in a pipe, under a prefix or a filter."""

from __future__ import annotations

import io
import re

from orchestrator.screen import BAR_EVERY_S, LogScreen


def shown(
    *pieces: bytes,
    terminal: bool = False,
    prefix: str = "",
    grep: bytes | None = None,
    seconds_between: float = 0.0,
) -> bytes:
    out = io.BytesIO()
    now = [0.0]
    screen = LogScreen(
        out,
        terminal=terminal,
        prefix=prefix,
        grep=re.compile(grep) if grep else None,
        clock=lambda: now[0],
    )
    for piece in pieces:
        screen.write(piece)
        now[0] += seconds_between
    return out.getvalue()


def test_plain_lines_pass_untouched() -> None:
    assert shown(b"one\ntwo\n", b"\xff\xfe\n") == b"one\ntwo\n\xff\xfe\n"


def test_a_bar_overwrites_itself_on_a_terminal() -> None:
    assert shown(b"10%\r", b"20%\r", terminal=True) == b"10%\r20%\r"


def test_a_pipe_gets_the_last_state_of_a_bar() -> None:
    assert shown(b"\r10%\r20%\r", b"done\n") == b"done\n"
    assert shown(b"10%\r", b"20%\r", b"\n", b"next\n") == b"20%\nnext\n"


def test_a_bar_that_moves_for_long_is_no_silence_in_a_pipe() -> None:
    pieces = [b"1%\r", b"2%\r", b"3%\r", b"4%\r", b"5%\r"]
    said = shown(*pieces, seconds_between=BAR_EVERY_S / 2)
    assert said == b"3%\n5%\n"


def test_windows_line_ends_are_line_ends() -> None:
    assert shown(b"a\r\nb\r\n", prefix="x ") == b"x a\nx b\n"


def test_each_line_of_several_runs_is_marked() -> None:
    assert shown(b"a\nb\n", prefix="r1 | ") == b"r1 | a\nr1 | b\n"
    bar = shown(b"1%\r", prefix="r1 | ", terminal=True)
    assert bar == b"r1 | 1%\x1b[K\r"


def test_a_filter_keeps_only_what_matches() -> None:
    assert shown(b"a 1\nb 2\na 3\n", grep=rb"^a") == b"a 1\na 3\n"
