"""Literals that let an expression be tried on few lines: none may be lost by it."""

from __future__ import annotations

import re

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.diag import Evidence
from orchestrator.diag.search import Text, alternatives, needles
from orchestrator.diag.text import read_lines


def text(*lines: str) -> Text:
    return Text([li for n, raw in enumerate(lines, 1) for li in read_lines(n, raw.encode())])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("out of memory", {"out of memory"}),
        ("CUDA error: (\\d+)", {"CUDA error: "}),
        ("(?:oomed|killed) by", {"killed", "oomed"}),  # the longest of the shortest
        ("(?:CUDA|GPU) error", {" error"}),
        ("colou?r", {"colo"}),
        ("(?:maybe)?(?:never)*", set()),
        ("(?:a|\\d) b", {" b"}),
        ("xy{2}z+", {"x"}),
        ("[abc]d\\.e", {"d.e"}),
        ("left|right", {"left", "right"}),
        ("left|\\d+", set()),
        ("(?<!not )found(?! here)", {"found"}),
    ],
)
def test_literals_of_an_expression(pattern: str, expected: set[str]) -> None:
    assert needles(pattern) == expected


def test_numbered_groups_are_not_split_apart() -> None:
    assert alternatives("a(1)|b(2)") == ["a(1)|b(2)"]
    assert alternatives("a(?:1|2)|b") == ["a(?:1|2)", "b"]
    assert alternatives(r"a\(1|b[(]2") == [r"a\(1", "b[(]2"]


PIECES = st.sampled_from(
    [
        *(
            "a",
            "bc",
            "d",
            r"\d",
            r"\.",
            "[ab]",
            ".",
            "(?:ab|c)",
            "(bc|d)",
            "(?:a|)",
            "x?",
            "(?:bc)*",
        ),
        *("d+", "a{2}", "(?:ab){0,2}", "|", r"\b", "c*?", "(?!d)", "[^a]"),
    ]
)


@given(
    st.lists(PIECES, min_size=1, max_size=5), st.lists(st.text("abcdx1. ", max_size=8), max_size=6)
)
@examples(300)
def test_the_same_lines_are_found_as_without_literals(pieces: list[str], lines: list[str]) -> None:
    pattern = "".join(pieces)
    made = text(*lines)

    found = {hit.line.number for hit in made.search([pattern])}

    assert found == {li.number for li in made.lines if re.search(pattern, li.text)}


def test_case_is_folded_where_the_expression_says_so() -> None:
    made = text("Back-Pressure on the ring", "no such thing")

    assert [h.line.number for h in made.search(["(?i)back-?pressure"])] == [1]
    assert made.search(["back-?pressure"]) == []


def test_an_exception_is_quoted_rather_than_the_line_of_source_that_raised_it() -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "/w/train.py", line 8, in __getitem__\n'
        '    raise ValueError(f"sample {i}: token ids out of range: {top} >= {rows}")\n'
        "ValueError: sample 37: token ids out of range: 151999 >= 151936\n"
    )
    assert [h.line.number for h in Evidence.from_text(log).search("token ids out of range")] == [4]
    cut = log.rsplit("ValueError:", 1)[0]
    assert [h.line.number for h in Evidence.from_text(cut).search("token ids out of range")] == [3]
