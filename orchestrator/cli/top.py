"""``dflashctl top``."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from orchestrator.alarm import DROP
from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Targets
from orchestrator.cli.session import open_session
from orchestrator.target import Target
from orchestrator.top import BARS, PLAIN_BARS, Board, Line, frame, state_text

if TYPE_CHECKING:
    from rich.text import Text

FRAME_S = 0.5
FIRST_S = 20.0


def top(
    targets: Targets = None,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every run live: state, step, tokens a second, ETA, GPU use, alarms.

    Ctrl-C leaves. Into a pipe, and with --json, it prints how things stand once.
    """
    with open_session(inventory, ask=False, patient=False, quiet=True) as session:
        chosen = session.targets_or_all(targets, host, ct)
        board = Board(session.fleet, chosen, drop=DROP)
        board.start()
        try:
            if as_json:
                board.wait_for_all(FIRST_S)
                output.emit(
                    {
                        "runs": _as_json(board, chosen),
                        "alarms": [alarm.line() for alarm in board.alarms],
                    }
                )
            elif output.redraws(sys.stdout):
                _live(board)
            else:
                board.wait_for_all(FIRST_S)
                for line in _frame(board):
                    output.say(line.text)
        finally:
            board.stop()


def _as_json(board: Board, targets: list[Target]) -> list[dict[str, Any]]:
    """A run a row; a container without one, or that does not answer, has no run id."""
    by_name = {target.name: target for target in targets}
    found = []
    for row in board.rows:
        target, summary = by_name[row.where], row.watched.summary
        place = {"run_id": None, **target.place}
        known = summary.as_json(target) if summary else {**place, "state": state_text(row)}
        found.append({**known, "gpu": row.gpu})
    return found


def _frame(board: Board) -> list[Line]:
    # The original: rich's stands in for it while the screen is live.
    encoding = getattr(sys.__stdout__, "encoding", None) or ""
    unicode = encoding.lower().replace("-", "") == "utf8"
    return frame(
        board.rows,
        board.alarms,
        shutil.get_terminal_size().columns,
        time.strftime("%H:%M:%S"),
        bars=BARS if unicode else PLAIN_BARS,
    )


def _live(board: Board) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_styled(_frame(board), console.height), refresh=True)
            board.wait(FRAME_S)


def _styled(lines: list[Line], height: int) -> Text:
    from rich.text import Text

    shown = lines if len(lines) <= height else [*lines[: height - 1], Line("…")]
    text = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(shown):
        part = Text(("\n" if number else "") + line.text)
        for start, end, style in line.styles:
            shift = 1 if number else 0
            part.stylize(style, start + shift, end + shift)
        text.append_text(part)
    return text
