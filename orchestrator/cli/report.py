"""``dflashctl report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Runs
from orchestrator.cli.session import open_session
from orchestrator.examine import examine
from orchestrator.laptop_path import laptop_path, writing
from orchestrator.report.gather import gather
from orchestrator.report.page import render
from orchestrator.run import RunRef


def report(
    runs: Runs = None,
    host: HostOption = None,
    ct: CtOption = None,
    file: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to; default: ./RUN.html.", show_default=False),
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run as one self-contained HTML page: curves, events, findings, last lines."""
    with open_session(inventory, patient=False, as_json=as_json) as session:
        ref = session.one_run(runs, host, ct)
        channel = session.fleet.container(ref.target)
        run_id = str(channel.call("run.status", lines=0, **ref.fields)["run_id"])
        # "The newest" is fixed once: a later launch is another run.
        ref = RunRef(ref.target, run_id)
        report = examine(session.fleet, ref).report
        record = gather(channel, ref, [finding.as_dict() for finding in report.findings])
    path = laptop_path(file or f"{run_id}.html")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(record), encoding="utf-8")
    if as_json:
        place = {key: record.summary[key] for key in ("run_id", "host", "ct", "state")}
        count = len(record.steps) or len(record.logged)
        output.emit({**place, "file": str(path), "steps": count})
        return
    told = f"{len(record.steps)} steps, {len(record.events)} events"
    if record.logged:
        told = f"{len(record.logged)} steps of its log: it wrote no metrics.jsonl"
    output.say(f"wrote {path} ({told})")
    if not record.steps and not record.logged:
        output.notice(
            "no curves: the run wrote no metrics.jsonl into its folder ($DFLASH_RUN_DIR), and no "
            "line of its log tells a step with its loss or rate"
        )
