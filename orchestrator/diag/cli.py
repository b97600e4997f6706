"""The offline half of ``dflashctl diag``: a saved log, saved probes, a bundle."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from orchestrator.cli.output import wants_colour
from orchestrator.diag.bundle import read_bundle, write_bundle
from orchestrator.diag.diagnosis import diagnose
from orchestrator.diag.evidence import Evidence
from orchestrator.diag.finding import Report
from orchestrator.diag.report import render
from orchestrator.errors import NotFoundError, UsageError
from orchestrator.laptop_path import did_you_mean, laptop_path


def offline(
    log: Path | None = None,
    probes: Path | None = None,
    bundle: Path | None = None,
    *,
    as_json: bool = False,
    save: Path | None = None,
    addresses: bool = False,
) -> int:
    """Diagnose what was saved and print it; the exit code, 1 if something fatal was found.

    ``bundle`` is read instead of ``log`` and ``probes``; ``save`` writes one of what was read.
    """
    evidence, values = read_saved(log, probes, bundle)
    report = diagnose(evidence)
    if save is not None:
        write_bundle(save, log=log, probes=values, report=report, addresses=addresses)
    show(report, as_json=as_json)
    return report.exit_code


def read_saved(
    log: Path | None, probes: Path | None = None, bundle: Path | None = None
) -> tuple[Evidence, dict[str, Any]]:
    """Evidence from files; ``NotFoundError`` or ``UsageError`` if they are not there or no such."""
    if bundle is not None:
        bundle = laptop_path(bundle)
        _must_be_there("--from", bundle, "give a file that `dflashctl diag --bundle FILE` wrote")
        held = read_bundle(bundle)
        return Evidence.from_text(held.log, held.probes), held.probes
    if log is not None:
        log = laptop_path(log)
        _must_be_there("--log", log, "give a saved log, such as `dflashctl pull` brings")
        if probes is None and log.stat().st_size == 0:
            raise UsageError(
                f"--log {log} is empty: nothing can be read from it",
                next_step="ask the container why the run said nothing: dflashctl diag RUN",
            )
    values = read_probes(probes)
    return Evidence.from_log(log, values), values


def _must_be_there(option: str, path: Path, next_step: str) -> None:
    """In the words of the option that the user gave."""
    if path.is_file():
        return
    if path.is_dir():
        raise NotFoundError(f"{option} {path}: that is a folder", next_step=next_step)
    raise NotFoundError(f"{option} {path}: no such file{did_you_mean(path)}", next_step=next_step)


def read_probes(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    path = laptop_path(path)
    _must_be_there("--probes", path, "give a file of saved probes: JSON, name to text")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(
            f"--probes {path} is not JSON: {error}", next_step="give a JSON object: name to text"
        ) from None
    if not isinstance(values, dict):
        raise UsageError(
            f"--probes {path} is no JSON object", next_step="give names with their texts"
        )
    return values


def show(report: Report, *, as_json: bool) -> None:
    """JSON on one line, else text as wide as the terminal."""
    if as_json:
        print(json.dumps(report.as_dict(), ensure_ascii=True), flush=True)
        return
    width = min(get_terminal_size().columns, 120) if sys.stdout.isatty() else 80
    print(render(report, width=width, colour=wants_colour(sys.stdout)), end="", flush=True)
