"""Tables and words at any width: nothing is cut that one copies, nothing runs over the edge."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.cli import output
from orchestrator.cli.runs import COLUMNS

SHORT = "run-20261130-021556-b7d4"
LONG = "a-name-of-forty-characters-exactly-so-it-is-20261130-024037-5557"[-61:]

At = Callable[..., list[str]]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> At:
    def rows(width: int | None, *rows: tuple[object, ...]) -> list[str]:
        monkeypatch.setattr(output, "terminal_width", lambda: width)
        with output.Table(*COLUMNS) as table:
            for cells in rows:
                table.row(*cells)
        return capsys.readouterr().out.splitlines()

    return rows


ROWS = (
    (SHORT, "lab-200", "training", "12345/20000", "20.2k", "33m05s", "8 100%"),
    (LONG, "a-very-long-container-name", "not running"),
)


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_line_runs_over_the_edge_and_every_run_id_is_whole(at: At, width: int) -> None:
    lines = at(width, *ROWS)
    assert all(len(line) <= width for line in lines)
    assert SHORT in lines[1] and "8 100%" in lines[1]
    assert any(line.startswith(LONG) for line in lines)


def test_a_run_id_too_long_for_its_column_stands_alone(at: At) -> None:
    lines = at(80, *ROWS)
    assert lines[2] == LONG
    assert lines[3].startswith(" " * 25) and "not running" in lines[3]
    assert len(at(120, *ROWS)) == 3


def test_containers_whose_names_differ_at_the_end_stay_apart(at: At) -> None:
    """Of one that does not answer there is nothing else to know it by."""
    lines = at(80, *[(None, f"train-node-{number:02}", "unreachable") for number in (1, 2)])
    assert "e-01 unreachable" in lines[1] and "e-02 unreachable" in lines[2]


def test_in_a_pipe_the_columns_are_as_wide_as_the_longest_cell_wherever_it_stands(at: At) -> None:
    for rows in (ROWS, ROWS[::-1]):
        header, *lines = at(None, *rows)
        assert len(lines) == 2
        words = [str(row[2]) for row in rows]
        places = [line.index(word) for line, word in zip(lines, words, strict=True)]
        assert set(places) == {header.index("STATE")}
    assert max(map(len, at(None, ROWS[0]))) <= 80


def test_what_came_into_a_pipe_before_something_went_wrong_is_read_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: None)
    with pytest.raises(KeyboardInterrupt), output.Table(*COLUMNS) as table:
        table.row(SHORT)
        raise KeyboardInterrupt
    assert SHORT in capsys.readouterr().out


def test_nothing_is_printed_for_no_rows(at: At) -> None:
    assert at(80) == []


def test_words_hang_below_themselves_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "running here already: " + LONG + " and more words that do not fit on it"
    monkeypatch.setattr(output, "terminal_width", lambda: 80)
    output.hang("  warning runs     ", text, 19)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("  warning runs     running here already:")
    assert all(line.startswith(" " * 19) and len(line) <= 80 for line in others)
    monkeypatch.setattr(output, "terminal_width", lambda: None)
    output.hang("  warning runs     ", text, 19)
    assert capsys.readouterr().out == f"  warning runs     {text}\n"
