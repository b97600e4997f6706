"""Manifests: every file name survives, every hostile path is refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from agent_peer import interpreters
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.agent.manifest import Entry, dump, parse, release_id
from orchestrator.agent.protocol import AgentError

DIGEST = "ab" * 32
ODD_NAMES = [
    "plain.py",
    "with space",
    "new\nline",
    "tab\there",
    "-rf",
    "quote'\"`$(id)",
    "ünïcödé-文",
    os.fsdecode(b"not-utf8-\xff\xfe"),
    "*?[a]",
    "~",
    "a" * 255,
    "#",
]

NAME = st.binary(min_size=1, max_size=8).filter(
    lambda raw: b"/" not in raw and b"\0" not in raw and raw not in (b".", b"..")
)
PATHS = st.lists(st.lists(NAME, min_size=1, max_size=3).map(b"/".join), unique=True, max_size=6)


def without_clashes(paths: list[bytes]) -> list[str]:
    """Leaves that do not lie below one another, as a real folder has them."""
    kept: list[bytes] = []
    for path in paths:
        if not any(a.startswith(b + b"/") for one in kept for a, b in ((path, one), (one, path))):
            kept.append(path)
    return [os.fsdecode(path) for path in kept]


@given(PATHS.map(without_clashes))
def test_any_name_that_a_file_can_have_survives(names: list[str]) -> None:
    entries = [Entry("f", name, DIGEST, 3, bool(len(name) % 2)) for name in names]
    found = parse(dump(entries))
    assert sorted(found) == sorted(entries)
    assert dump(found) == dump(entries)


def test_odd_names_links_and_folders_survive() -> None:
    entries = [Entry("f", name, DIGEST, 0) for name in ODD_NAMES]
    entries += [Entry("l", "link", target="../outside\n"), Entry("d", "empty folder")]
    assert sorted(parse(dump(entries))) == sorted(entries)


def test_the_order_of_the_files_does_not_change_the_release() -> None:
    one, two = Entry("f", "a", DIGEST, 1), Entry("f", "b", DIGEST, 1)
    assert release_id(dump([one, two])) == release_id(dump([two, one]))


HOSTILE = {
    "absolute": ["f", "/etc/passwd", DIGEST, 1, 0],
    "parent": ["f", "../x", DIGEST, 1, 0],
    "parent inside": ["f", "a/../../x", DIGEST, 1, 0],
    "parent as a folder": ["d", ".."],
    "dot": ["f", "./x", DIGEST, 1, 0],
    "empty part": ["f", "a//x", DIGEST, 1, 0],
    "trailing slash": ["d", "a/"],
    "empty": ["f", "", DIGEST, 1, 0],
    "NUL": ["f", "a\0b", DIGEST, 1, 0],
    "no such code point": ["f", "\ud800", DIGEST, 1, 0],
    "long name": ["f", "a" * 256, DIGEST, 1, 0],
    "long path": ["f", "/".join(["a" * 200] * 20), DIGEST, 1, 0],
    "no digest": ["f", "x", "../../etc/passwd", 1, 0],
    "negative size": ["f", "x", DIGEST, -1, 0],
    "size is a bool": ["f", "x", DIGEST, "1", 0],
    "mode": ["f", "x", DIGEST, 1, 4755],
    "kind": ["b", "x"],
    "empty link": ["l", "x", ""],
    "link with NUL": ["l", "x", "a\0b"],
    "not a list": {"f": "x"},
    "too long": ["d", "x", "y"],
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_line_is_refused_by_its_number(line: object) -> None:
    with pytest.raises(AgentError) as caught:
        parse(json.dumps(["d", "!"]).encode() + b"\n" + json.dumps(line).encode() + b"\n")
    assert caught.value.kind == "release.manifest"
    assert caught.value.detail["line"] == 2


TOGETHER = {
    "below a link": [["l", "a", "/etc"], ["f", "a/passwd", DIGEST, 1, 0]],
    "below a file": [["f", "a", DIGEST, 1, 0], ["f", "a/b", DIGEST, 1, 0]],
    "below a link, another between": [["l", "a", "/"], ["d", "a.b"], ["f", "a/c", DIGEST, 1, 0]],
    "twice": [["f", "a", DIGEST, 1, 0], ["l", "a", "b"]],
    "out of order": [["f", "b", DIGEST, 1, 0], ["f", "a", DIGEST, 1, 0]],
    "one content, two sizes": [["f", "a", DIGEST, 1, 0], ["f", "b", DIGEST, 2, 0]],
}


@pytest.mark.parametrize("lines", TOGETHER.values(), ids=TOGETHER.keys())
def test_lines_that_are_hostile_together_are_refused(lines: list[object]) -> None:
    with pytest.raises(AgentError) as caught:
        parse("".join(json.dumps(line) + "\n" for line in lines).encode())
    assert caught.value.kind == "release.manifest"


def test_deeply_nested_json_is_refused_not_fatal() -> None:
    with pytest.raises(AgentError):
        parse(b"[" * 100_000)


def test_both_sides_run_on_python_3_10() -> None:
    found = interpreters("3.10")
    if not found:
        pytest.skip("no Python 3.10 here")
    code = 'from orchestrator.agent.manifest import parse; print(len(parse(b\'["d", "x"]\')))'
    root = Path(__file__).parents[3]
    assert subprocess.check_output([found[0], "-c", code], cwd=root).strip() == b"1"
