"""``dflashctl doctor``."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from orchestrator import lease, preflight
from orchestrator.channel import AgentChannel
from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Targets
from orchestrator.cli.session import open_session
from orchestrator.errors import DflashctlError, NotFoundError, RefusedError
from orchestrator.fanout import each
from orchestrator.fleet import Fleet
from orchestrator.request import Request
from orchestrator.target import Target


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
    """Check everything a launch needs; start nothing. Exits 4 if a launch would be refused:
    also where a run lives in the container or has its GPUs, which `launch --force` passes over."""
    code = 0
    with open_session(inventory, patient=False, as_json=as_json) as session:
        chosen = session.some_targets(targets, host, ct)
        modules = preflight.MODULES if trainer else ()
        for _, found in each(session.fleet, chosen, partial(look, session.fleet, modules)):
            if isinstance(found, DflashctlError):
                output.fail(found, as_json=as_json)
                code = max(code, found.exit_code)
                continue
            code = max(code, RefusedError.exit_code if found.refused else 0)
            if as_json:
                output.emit(found.as_json())
            else:
                show(found)
    raise typer.Exit(code)


@dataclass(frozen=True)
class Looked:
    """What a launch in a container would find."""

    target: Target
    hello: dict[str, Any]
    checks: list[preflight.Check]

    @property
    def refused(self) -> bool:
        return preflight.blocked(self.checks)

    def as_json(self) -> dict[str, Any]:
        place = {**self.target.place, "ready": not self.refused}
        return {**place, "agent": self.hello, "checks": [c.as_json() for c in self.checks]}


def show(found: Looked) -> None:
    """For a person."""
    hello = found.hello
    output.say(f"{found.target.name}: {hello['hostname']}, Python {hello['python']}")
    for check in found.checks:
        _show(check)


def look(fleet: Fleet, modules: tuple[str, ...], target: Target) -> Looked:
    """:raises DflashctlError: the container cannot be asked."""
    with fleet.container(target) as channel:
        fields = preflight.request_fields(target, modules, None)
        asked = channel.request("preflight", **fields)
        spy = _asks_py_spy(channel, target.settings.python)
        answer = asked.result()
        checks = preflight.read(answer, target)
        if gpus := lease.wanted(answer["checks"], target):
            # Who has them only the host knows; a host that is not reached is told elsewhere.
            with contextlib.suppress(DflashctlError):
                checks.append(preflight.leases(lease.held(fleet.host(target.host), gpus)))
        seen = _answers(spy)
        if not seen:
            host = target.host
            with contextlib.suppress(DflashctlError):
                seen = _answers(_asks_py_spy(fleet.host(host), host.settings.python))
        return Looked(target, channel.hello(), [*checks, preflight.stacks(seen, target)])


def _asks_py_spy(channel: AgentChannel, python: str) -> Request:
    return channel.request("exec", command=["py-spy", "--version"], python=python, timeout_s=5)


def _answers(asked: Request) -> bool:
    """A program that is not there is an error frame."""
    try:
        for _ in asked.frames():
            pass
        return bool(asked.result()["exit_code"] == 0)
    except (NotFoundError, RefusedError):
        return False


def _show(check: preflight.Check) -> None:
    if check.ok:
        mark = output.paint("ok     ", "32")
    elif check.required:
        mark = output.paint("FAILED ", "31;1")
    else:
        mark = output.paint("warning", "33")
    output.hang(f"  {mark} {check.name:<8} ", check.text, 19)
    if check.next_step:
        output.say(f"          next: {check.next_step}")
