"""``dflashctl diag``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Runs
from orchestrator.cli.session import Session, open_session
from orchestrator.errors import RefusedError, RunNotFound, UsageError
from orchestrator.run import RunRef


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
    saved: Annotated[
        Path | None, typer.Option("--from", help="Read this saved bundle; reach nothing.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle", help="Write all that was seen there, secrets redacted; alone: read it."
        ),
    ] = None,
    addresses: Annotated[
        bool, typer.Option("--redact-addresses", help="With --bundle: hide addresses, too.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Name what is wrong, the evidence, and what to do.

    Exits 1 if something fatal was found, 3 if the host could not be reached.
    """
    if bundle is not None and bundle.is_file() and not (runs or host or ct or log or saved):
        saved, bundle = bundle, None  # a bundle that is there, and nothing to write into it
    if bundle is not None:
        from orchestrator.diag.bundle import check_packer

        check_packer(bundle)
    if log is not None or saved is not None or probes is not None:
        if runs or host:
            raise UsageError(
                "a run and a saved file were both given",
                next_step="leave out one of them: --log and --from reach nothing",
            )
        from orchestrator.diag.cli import offline

        raise typer.Exit(
            offline(log, probes, saved, as_json=as_json, save=bundle, addresses=addresses)
        )
    with open_session(inventory, patient=False, as_json=as_json) as session:
        refs = session.runs(runs, host, ct)
        if bundle is not None and len(refs) > 1:
            raise UsageError(
                f"--bundle with {len(refs)} runs", next_step="give one run id: one file each"
            )
        codes = [_live(session, ref, bundle, addresses, as_json) for ref in refs]
    raise typer.Exit(max(codes))


def _live(
    session: Session, ref: RunRef, bundle: Path | None, addresses: bool, as_json: bool
) -> int:
    # Some 40 modules of rules: only when they are wanted.
    from orchestrator.diag.cli import show
    from orchestrator.examine import examine

    try:
        found = examine(session.fleet, ref, bundle=bundle, addresses=addresses)
    except RunNotFound as error:
        if ref.run_id is not None or bundle is not None:
            raise
        return _nothing_ran(session, ref, error, as_json)
    if bundle is not None:
        output.notice(f"wrote {bundle}")
    place = found.place
    if as_json:
        output.emit({**place, **found.report.as_dict()})
    else:
        where = ref.target.name
        state = f": {place['state']}" if place.get("state") else ""
        # A container that was not asked may well have runs.
        nobody = "its runs are not known" if found.collected.error else "no run"
        run_id = place["run_id"]
        output.say(f"{run_id} on {where}{state}\n" if run_id else f"{where}: {nobody}\n")
        show(found.report, as_json=False)
    return 3 if found.unreachable else found.report.exit_code


def _nothing_ran(session: Session, ref: RunRef, error: RunNotFound, as_json: bool) -> int:
    """A container without a run: what `doctor` finds there may be why."""
    from orchestrator import preflight
    from orchestrator.cli.doctor import look, show

    found = look(session.fleet, preflight.MODULES, ref.target)
    if as_json:
        output.emit({**error.as_dict(), "findings": [], **found.as_json()})
    else:
        output.fail(session.fleet.named(error), as_json=False)
        output.say("what a launch there would find:")
        show(found)
    return RefusedError.exit_code if found.refused else error.exit_code
