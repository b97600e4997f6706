"""``dflashctl tail``."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from orchestrator.cli.ending import follow_runs
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Runs
from orchestrator.cli.session import open_session
from orchestrator.errors import UsageError
from orchestrator.follow import Start
from orchestrator.run import seconds


def tail(
    runs: Runs = None,
    host: HostOption = None,
    ct: CtOption = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f/-F", help="Follow until the run ends.")
    ] = True,
    lines: Annotated[
        int | None, typer.Option("-n", "--lines", min=0, help="Begin with the last N lines [10].")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Begin this long ago: 90s, 10m, 2h.")
    ] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", help="Only lines that match this expression.")
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="The steps alone, from metrics.jsonl.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow a run's log across dropped links.

    Ends with the run; exits 0 if it finished, 1 if it failed. Ctrl-C leaves the run alone. Of the
    log's control sequences only colours are shown, and only on a terminal; --json has them all.
    """
    if lines is not None and since is not None:
        raise UsageError("-n and --since were both given", next_step="leave out one of them")
    start = Start(since_s=seconds(since)) if since else Start(lines=10 if lines is None else lines)
    pattern = _pattern(grep)
    with open_session(inventory, as_json=as_json) as session:
        code = follow_runs(
            session,
            session.runs(runs, host, ct),
            start=start,
            follow=follow,
            metrics=metrics,
            grep=pattern,
            as_json=as_json,
        )
    raise typer.Exit(code)


def _pattern(text: str | None) -> re.Pattern[bytes] | None:
    try:
        return re.compile(text.encode()) if text is not None else None
    except re.error as error:
        raise UsageError(
            f"--grep {text!r} is no regular expression: {error}",
            next_step="escape its special characters: . * + ? [ ( | \\",
        ) from None
