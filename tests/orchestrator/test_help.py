"""`--help` of every verb, as it stands on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from orchestrator.cli.app import HABITS, VERBS, build


def verbs() -> Iterator[list[str]]:
    command = typer.main.get_command(build())
    for name in VERBS:
        verb = command.get_command(None, name)  # type: ignore[attr-defined]
        yield [name]
        yield from ([name, part] for part in getattr(verb, "commands", ()))


@pytest.mark.parametrize("words", list(verbs()), ids=" ".join)
def test_it_fits_80_columns_without_colour(words: list[str]) -> None:
    environment = {"COLUMNS": "80", "NO_COLOR": "1"}
    done = CliRunner().invoke(build(), [*words, "--help"], env=environment)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 80
    # A metavar with brackets of its own gets a second pair.
    assert "[[" not in done.output and "\x1b" not in done.output


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("logs", "; here it is 'tail'"),
        ("list", "; here it is 'ps'"),
        ("kill", "; here it is 'stop'"),
        ("lanch", "; did you mean 'launch'?"),
        ("frobnicate", ""),
    ],
)
def test_a_verb_of_other_tools_leads_to_ours(typed: str, said: str) -> None:
    done = CliRunner().invoke(build(), [typed], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert done.exit_code == 2
    assert f"No such verb {typed!r}{said}\n" in done.output


def test_what_other_tools_call_a_verb_is_none_of_ours() -> None:
    assert set(HABITS.values()) <= set(VERBS) and not set(HABITS) & set(VERBS)


def test_to_check_an_empty_inventory_says_how_to_fill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASHCTL_INVENTORY", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    done = CliRunner().invoke(build(), ["inventory", "check"])
    assert done.exit_code == 0 and "dflashctl init writes an inventory" in done.output
