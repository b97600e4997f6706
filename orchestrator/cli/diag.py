"""``dflashctl diag``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Runs
from orchestrator.cli.session import Session, open_session
from orchestrator.collect import Collected, collect
from orchestrator.diag import Evidence, Finding, Report, diagnose
from orchestrator.errors import NotFoundError, UsageError
from orchestrator.run import RunRef

COLOURS = {"fatal": "31;1", "warning": "33", "info": "36"}


def diag(
    runs: Runs = None,
    host: HostOption = None,
    ct: CtOption = None,
    log: Annotated[
        Path | None, typer.Option("--log", help="Read this saved log; reach nothing.")
    ] = None,
    probes: Annotated[
        Path | None, typer.Option("--probes", help="With --log: saved probes, as JSON.")
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Name what is wrong, the evidence, and what to do.

    Exits 1 if something fatal was found, 3 if the host could not be reached.
    """
    if log is not None:
        report = diagnose(Evidence.from_log(_readable(log), _saved_probes(probes)))
        _print(report, {}, as_json)
        raise typer.Exit(report.exit_code)
    if probes is not None:
        raise UsageError("--probes without --log", next_step="add --log FILE")
    with open_session(inventory) as session:
        codes = [_live(session, ref, as_json) for ref in session.runs(runs, host, ct)]
    raise typer.Exit(max(codes))


def _live(session: Session, ref: RunRef, as_json: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="dflashctl-") as folder:
        found = collect(session.fleet, ref, Path(folder) / "train.log")
        report = diagnose(Evidence.from_log(found.log, found.probes))
    if found.error is not None and report.healthy:
        # Nothing that a rule knows: the error itself is the answer.
        raise found.error
    _print(report, _place(found), as_json)
    unreachable = found.error is not None and found.error.exit_code == 3
    return 3 if unreachable else report.exit_code


def _place(found: Collected) -> dict[str, Any]:
    target = found.ref.target
    if found.summary is not None:
        return found.summary.as_json(target)
    return {"run_id": found.ref.run_id, "host": target.host.name, "ct": target.ct}


def _readable(path: Path) -> Path:
    if not path.is_file():
        raise NotFoundError(f"--log {path}: no such file", next_step="give a saved log")
    return path


def _saved_probes(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--probes {path} cannot be read: {error}", next_step="give a file with a JSON object"
        ) from None
    if not isinstance(found, dict):
        raise UsageError(f"--probes {path} is no JSON object", next_step="names with their texts")
    return found


def _print(report: Report, place: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.emit({**place, **report.as_dict()})
        return
    if place.get("run_id"):
        state = f" ({place['state']})" if place.get("state") else ""
        output.say(f"{place['run_id']} on {place['host']}/{place['ct']}{state}")
    if report.healthy:
        output.say("nothing is wrong")
    for finding in report.findings:
        _tell(finding, "")
    for lines in list(report.context.values())[:1]:
        output.say("in the log:")
        for line in lines:
            output.say(f"  {line}")


def _tell(finding: Finding, indent: str) -> None:
    head = output.paint(f"{finding.severity}: {finding.code}", COLOURS[finding.severity])
    output.say(f"{indent}{head}  {finding.title}")
    for quote in finding.evidence[:3]:
        where = f"{quote.source}:{quote.line}" if quote.line else quote.source
        output.say(f"{indent}    {where}  {quote.text[:200]}")
    if not indent:
        for line in finding.remedy.splitlines():
            output.say(f"{indent}    → {line}")
    for follows in finding.consequences:
        _tell(follows, f"{indent}    therefore ")
