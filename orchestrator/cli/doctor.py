"""``dflashctl doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator import preflight
from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Targets
from orchestrator.cli.session import open_session
from orchestrator.errors import DflashctlError


def doctor(
    targets: Targets = None,
    host: HostOption = None,
    ct: CtOption = None,
    trainer: Annotated[
        bool,
        typer.Option("--trainer/--no-trainer", help="Also look for what --config FILE needs."),
    ] = True,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check everything a launch needs; start nothing. Exits 4 if a launch would be refused."""
    code = 0
    with open_session(inventory) as session:
        for target in session.targets(targets, host, ct) or [session.one_target(targets, host, ct)]:
            try:
                channel = session.fleet.container(target)
                modules = preflight.MODULES if trainer else ()
                fields = preflight.request_fields(target, modules, None)
                asked = channel.request("preflight", **fields)
                hello = channel.hello()
                checks = preflight.read(asked.result(), target)
            except DflashctlError as error:
                output.fail(error, as_json=as_json)
                code = max(code, error.exit_code)
                continue
            refused = preflight.refusal(checks, target)
            code = max(code, refused.exit_code if refused else 0)
            if as_json:
                place = {"host": target.host.name, "ct": target.ct, "ready": refused is None}
                output.emit({**place, "agent": hello, "checks": [c.as_json() for c in checks]})
                continue
            output.say(f"{target.name}: {hello['hostname']}, Python {hello['python']}")
            for check in checks:
                _show(check)
    raise typer.Exit(code)


def _show(check: preflight.Check) -> None:
    if check.ok:
        mark = output.paint("ok     ", "32")
    elif check.required:
        mark = output.paint("FAILED ", "31;1")
    else:
        mark = output.paint("warning", "33")
    output.say(f"  {mark} {check.name:<8} {check.text}")
    if check.next_step:
        output.say(f"          next: {check.next_step}")
