"""A live run, diagnosed: what the verb, the report page and playbooks share."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.collect import Collected, collect
from orchestrator.diag import Evidence, Report, diagnose
from orchestrator.diag.bundle import write_bundle
from orchestrator.diag.evidence import NO_CONFIG
from orchestrator.diag.place import KEY as PLACE
from orchestrator.diag.place import Place
from orchestrator.errors import DflashctlError, UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.route import find_route
from orchestrator.run import RunRef


@dataclass(frozen=True)
class Examined:
    collected: Collected
    report: Report

    @property
    def place(self) -> dict[str, Any]:
        """Which run it is and how it stands, by the stable keys."""
        ref, summary = self.collected.ref, self.collected.summary
        return {
            **ref.place,
            **(summary.as_json(ref.target) if summary else {}),
        }

    @property
    def unreachable(self) -> bool:
        return isinstance(self.collected.error, UnreachableError)


def examine(
    fleet: Fleet, ref: RunRef, *, bundle: Path | None = None, addresses: bool = False
) -> Examined:
    """Collect and diagnose; with ``bundle`` write there all that was seen, secrets redacted.

    :param addresses: hide addresses in the bundle, too.
    :raises DflashctlError: the container could not be asked, and no rule knows why.
    """
    # The first diagnosis of a process takes 0.3 s longer: while the machines answer it is free.
    threading.Thread(target=_prepare, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="dflashctl-") as folder:
        found = collect(fleet, ref, Path(folder) / "train.log")
        found.probes[PLACE] = _asked_of(ref)
        found.probes |= _about(found)
        done = Examined(found, diagnose(Evidence.from_log(found.log, found.probes)))
        if found.error is not None and done.report.healthy:
            # Nothing that a rule knows: the error itself is the answer, and a bundle would lie.
            raise found.error
        if bundle is not None:
            bundle.parent.mkdir(parents=True, exist_ok=True)
            write_bundle(
                bundle,
                log=found.log,
                probes=found.probes,
                report=done.report,
                about={"written": time.time(), "place": done.place},
                records=found.records,
                addresses=addresses,
            )
    return done


def _about(found: Collected) -> dict[str, str]:
    """What remedies need to know of a run: its name, its interpreter, and whether it is our
    trainer's."""
    record = found.records.get("run.json")
    if not record:
        return {}
    python = found.ref.target.settings.python
    about = {"run_config": str(record.get("config") or NO_CONFIG), "run_python": python}
    if found.summary is not None:
        about["run_name"] = found.summary.run_id
    return about


def _asked_of(ref: RunRef) -> dict[str, Any]:
    """What a remedy names: the host as ssh reaches it, the container as dflashctl's verbs take
    it."""
    host, settings = ref.target.host, ref.target.host.settings
    port, user = settings.port, settings.user
    # Without a readable ssh config the inventory alone has to do.
    with contextlib.suppress(DflashctlError):
        route = find_route(host)
        port, user = route.port, route.user
    place = Place(
        host=host.name,
        address=host.address,
        port=port,
        user=user,
        ssh_config=str(settings.ssh_config) if settings.ssh_config else None,
        container=ref.target.arguments,
        python=ref.target.settings.python,
    )
    return place.model_dump()


def _prepare() -> None:
    diagnose(Evidence.from_text("step 1/2 | loss 1.0", {"run_state": "training"}))
