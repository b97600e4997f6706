"""``dflashctl watch``."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer

from orchestrator import alarm
from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Runs
from orchestrator.cli.session import open_session
from orchestrator.run import seconds
from orchestrator.terminal_text import plain
from orchestrator.watch import Report, Watch
from orchestrator.webhook import Webhook


def watch(
    runs: Runs = None,
    host: HostOption = None,
    ct: CtOption = None,
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="Between looks.")] = "10s",
    drop: Annotated[
        float, typer.Option("--drop", min=0.01, max=1.0, help="Fall in throughput that alarms.")
    ] = alarm.DROP,
    stall: Annotated[
        str | None,
        typer.Option(
            "--stall", metavar="TIME", help="Silence between steps that counts as a stall."
        ),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            "--webhook",
            metavar="URL",
            envvar="DFLASHCTL_WEBHOOK",
            show_envvar=True,
            help="POST each notice there as JSON.",
        ),
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Poll runs until their end: changes of state, lost throughput, stalls, no answer.

    Exits 0 if all finished or were stopped, 1 if one failed. No answer is never taken for failure.
    """
    hook = Webhook(webhook, output.notice) if webhook else None
    with open_session(inventory, patient=False, as_json=as_json) as session:
        watched = Watch(
            session.fleet,
            session.runs(runs, host, ct),
            drop=drop,
            every_s=max(seconds(every), 0.2),
            stall_s=seconds(stall) if stall else None,
        )
        standing = _Standing(watched.reports, live=output.redraws(sys.stdout) and not as_json)
        try:
            for report in watched.run():
                standing.clear()
                for notice in report.notices:
                    body = report.as_dict(notice)
                    if as_json:
                        output.emit(body)
                    else:
                        text = body["text"]
                        shown = output.paint(text, "33") if notice.is_alarm else text
                        output.say(f"{time.strftime('%H:%M:%S')} {shown}")
                    if hook:
                        hook.send(body)
                standing.show()
        finally:
            standing.clear()
            if hook:
                hook.close()
    raise typer.Exit(alarm.verdict([report.watched for report in watched.reports]))


class _Standing:
    """The line below the notices that says how things stand, on a terminal only."""

    def __init__(self, reports: Sequence[Report], *, live: bool) -> None:
        self._reports = reports
        self._live = live

    def show(self) -> None:
        if self._live:
            width = shutil.get_terminal_size().columns
            print(plain(self._text())[: width - 1], end="", flush=True)

    def clear(self) -> None:
        if self._live:
            print(output.CLEAR, end="", flush=True)

    def _text(self) -> str:
        if len(self._reports) == 1:
            return alarm.status_line(self._reports[0].watched)
        states = Counter(alarm.state_words(report.watched) for report in self._reports)
        return ", ".join(f"{count} {state}" for state, count in states.items())
