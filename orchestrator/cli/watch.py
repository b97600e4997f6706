"""``dflashctl watch``."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Annotated

import typer

from orchestrator.alarm import DROP, Notice, status_line, verdict
from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Runs
from orchestrator.cli.session import open_session
from orchestrator.run import seconds
from orchestrator.watch import EVERY_S, Report, Watch
from orchestrator.webhook import Webhook


def watch(
    runs: Runs = None,
    host: HostOption = None,
    ct: CtOption = None,
    every: Annotated[
        float, typer.Option("--every", min=0.2, metavar="SECONDS", help="Time between questions.")
    ] = EVERY_S,
    drop: Annotated[
        int,
        typer.Option("--drop", min=1, max=99, metavar="PERCENT", help="Lost throughput to tell."),
    ] = round(DROP * 100),
    stall: Annotated[
        str | None,
        typer.Option(
            "--stall",
            metavar="TIME",
            help="Silence that is a stall: 90s, 10m. Default: by the run's phase and pace.",
            show_default=False,
        ),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            "--webhook",
            metavar="URL",
            envvar="DFLASHCTL_WEBHOOK",
            help="POST each line there as JSON.",
            show_default=False,
        ),
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch runs until they have ended; tell each change of state and each alarm.

    An alarm is throughput that fell against the run's own recent best or is below its
    predecessor's, a stall, a restart, or no answer. No answer is never taken for a failure.

    Exits 0 when all finished or were stopped, 1 if one failed, 3 if none could be reached.
    """
    hook = Webhook(webhook, output.notice) if webhook else None
    try:
        with open_session(inventory, ask=False) as session:
            watched = Watch(
                session.fleet,
                session.runs(runs, host, ct),
                every_s=every,
                drop=drop / 100,
                stall_s=seconds(stall) if stall else None,
            )
            screen = _Screen(watched.reports, as_json)
            for report in watched.run():
                for notice in report.notices:
                    screen.tell(report, notice)
                    if hook:
                        hook.send(report.as_dict(notice))
                screen.refresh()
            screen.close()
            raise typer.Exit(verdict([report.watched for report in watched.reports]))
    finally:
        if hook:
            hook.close()


class _Screen:
    """A line for each notice and, on a terminal, one below them that says how things stand."""

    def __init__(self, reports: list[Report], as_json: bool) -> None:
        self._reports = reports
        self._as_json = as_json
        self._live = sys.stdout.isatty() and not as_json

    def tell(self, report: Report, notice: Notice) -> None:
        if self._as_json:
            output.emit(report.as_dict(notice))
            return
        self._clear()
        name = report.ref.run_id or report.ref.target.name
        text = output.paint(notice.text, "33;1") if notice.is_alarm else notice.text
        output.say(f"{time.strftime('%H:%M:%S')} {name}: {text}")

    def refresh(self) -> None:
        if self._live:
            width = _columns()
            print(f"\r\x1b[K{self._standing()[: width - 1]}", end="", flush=True)

    def close(self) -> None:
        self._clear()

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", flush=True)

    def _standing(self) -> str:
        if len(self._reports) == 1:
            return status_line(self._reports[0].watched)
        states = [report.watched.state for report in self._reports]
        return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _columns() -> int:
    return shutil.get_terminal_size().columns
