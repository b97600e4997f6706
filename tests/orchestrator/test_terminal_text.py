"""Nothing that came out of a container steers the terminal; colours only where they are wanted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli import output
from orchestrator.diag.finding import Finding, Quote, Report
from orchestrator.diag.report import render
from orchestrator.report.page import RunRecord
from orchestrator.report.page import render as page
from orchestrator.terminal_text import Stream, clean_bytes, fit, fit_name, plain, shown

ROOT = Path(__file__).parents[2]
HOSTILE = {
    "clears the screen": "\x1b[2J\x1b[H",
    "moves up": "\x1b[3A",
    "retitles the window": "\x1b]0;owned\x07",
    "retitles, other ending": "\x1b]2;owned\x1b\\",
    "asks the terminal to answer": "\x1b[6n\x1b[c\x1bP+q544e\x1b\\",
    "writes the clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "resets the terminal": "\x1bc",
    "other character set": "\x1b(0\x0e",
    "alternate screen": "\x1b[?1049h",
    "eight bits": "\x9b2J\x9d0;owned\x9c",
    "bell and backspaces": "\x07\x08\x08\x7f",
    "form feed": "\x0b\x0c",
    "turns writing round": "\u202e\u2066",
    "colour": "\x1b[31;1m",
}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("sequence", HOSTILE.values(), ids=HOSTILE.keys())
def test_only_the_words_are_left(sequence: str) -> None:
    assert plain(f"loss {sequence}8.03") == "loss 8.03"


@given(st.text(st.characters(max_codepoint=0x2070), max_size=60))
def test_no_text_at_all_keeps_a_control(text: str) -> None:
    assert not CONTROL.search(plain(text))
    assert not CONTROL.search(shown(text, colour=True).replace("\x1b[", ""))


@given(st.text(st.sampled_from("\x1b[]PX012;mJH\x07\\\x9b\x9d\n\r a"), max_size=60))
def test_what_is_cleaned_once_is_clean(text: str) -> None:
    assert plain(plain(text)) == plain(text)
    left = re.sub(r"\x1b\[[0-9;:]*m", "", shown(text, colour=True))
    assert "\x1b" not in left


def test_colours_stay_where_they_are_wanted_and_end_with_their_line() -> None:
    line = "\x1b[31mred\x1b[2J still\nplain"
    assert shown(line, colour=True) == "\x1b[31mred still\x1b[0m\nplain"
    assert shown(line, colour=False) == "red still\nplain"


def test_words_of_a_string_that_never_ends_are_shown() -> None:
    assert plain("\x1b]0;CUDA out of memory\nnext") == "0;CUDA out of memory\nnext"


def test_of_an_overwritten_line_the_last_state_is_left() -> None:
    assert plain("10%\r50%\r100%\r\ndone\r") == "100%\ndone"


def test_a_bar_keeps_its_carriage_return() -> None:
    assert clean_bytes(b"50%\x1b[K\r", colour=False) == b"50%\r"


def test_what_is_no_utf8_stays_except_controls_in_eight_bits() -> None:
    assert clean_bytes(b"caf\xe9 \x9b2J \xe2\x96\x88", colour=False) == (b"caf\xe9 2J \xe2\x96\x88")


def test_long_hostile_lines_take_no_quadratic_time() -> None:
    for piece in ("\x1b]0;", "\x9d", "\x1b[", "\x1b[31m", "a\r", "\x1bP+"):
        plain(piece * 100_000)
        shown(piece * 100_000, colour=True)


@given(st.data())
def test_a_stream_shows_the_same_wherever_it_is_cut(data: st.DataObject) -> None:
    text = "step 1 \x1b[2Jcafé\x1b]0;t\x1b\\ \x1b(B█ \x1b[1;31mred\n"
    whole = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    stream = Stream(colour=False)
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert b"".join(map(stream.feed, pieces)).decode() == "step 1 café █ red\n"


@pytest.mark.parametrize("write", ["say", "notice"])
def test_whatever_a_verb_prints_is_clean(write: str, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(output, write)("\x1b]0;owned\x07run \x1b[31mred")
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "run red" in out + err


def test_a_table_keeps_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with output.Table(("RUN", 6), ("STATE", 8)) as table:
        table.row("\x1b[31mr1\x1b[0m", "\x1b[2Jup")
    assert capsys.readouterr().out.splitlines() == ["RUN    STATE", "r1     up"]


def test_diag_report_and_top_show_words_only() -> None:
    bad = "\x1b[2J\x1b]0;x\x07Error: out of memory"
    quote = Quote("train.log", 3, bad)
    found = Finding("mem.cuda_oom", "fatal", 0.9, bad, [quote], remedy=f"less\n{bad}")
    text = render(Report([found]), colour=False)
    assert "\x1b" not in text and text.count("Error: out of memory") == 3
    html = page(RunRecord({"run_id": "r"}, findings=[found.as_dict()], last_lines=[bad]))
    assert "\x1b" not in html
    assert fit(bad, 30) == "Error: out of memory"
    assert fit_name(bad, 30) == "Error: out of memory"


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "xterm"}])
def test_colour_is_for_terminals_that_want_it(variables: dict[str, str]) -> None:
    """On a real pseudo-terminal, which `script` lends."""
    program = "from orchestrator.cli import output; output.say('\\x1b[31mred\\x1b[2J')"
    done = subprocess.run(
        ["script", "-qec", f'{sys.executable} -c "{program}"', "/dev/null"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TERM": "xterm", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = variables == {"TERM": "xterm"}
    assert done.stdout.strip() == ("\x1b[31mred\x1b[0m" if wanted else "red")
