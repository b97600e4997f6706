"""`--help` of every verb, as it stands on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from orchestrator.cli.app import VERBS, build


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
