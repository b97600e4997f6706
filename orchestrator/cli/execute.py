"""``dflashctl exec``."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from orchestrator import pct
from orchestrator.audit import audited
from orchestrator.channel import AgentChannel
from orchestrator.cli import output
from orchestrator.cli.app import COMMAND_KEY
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Targets
from orchestrator.cli.session import open_session
from orchestrator.errors import UsageError
from orchestrator.launch import Step, ssh_argv
from orchestrator.run import seconds
from orchestrator.target import Target


def execute(
    ctx: typer.Context,
    targets: Targets = None,
    host: HostOption = None,
    ct: CtOption = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", "-i", help="Hand this command's input on.")
    ] = False,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="End it after 90s, 10m, …")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be sent; reach nothing.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one command in a container: dflashctl exec TARGET -- COMMAND...

    The command's own exit code is this one's; 128+N where signal N ended it.
    """
    words: tuple[str, ...] = ctx.meta.get(COMMAND_KEY, ())
    if not words:
        raise UsageError("no command", next_step="dflashctl exec TARGET -- COMMAND...")
    fields: dict[str, Any] = {"command": list(words)}
    if timeout:
        fields["timeout_s"] = seconds(timeout)
    with open_session(inventory) as session:
        found = session.targets(targets, host, ct) or [session.one_target(targets, host, ct)]
        if dry_run:
            for target in found:
                _show_plan(target, fields, as_json)
            return
        codes = []
        for target in found:
            # The program alone: arguments may hold a secret.
            with audited(session.fleet, target, "exec", output.notice, program=words[0]) as line:
                channel = session.fleet.container(target)
                codes.append(_run(channel, target, fields, stdin, as_json))
                line["exit_code"] = codes[-1]
    raise typer.Exit(max(codes))


def _show_plan(target: Target, fields: dict[str, Any], as_json: bool) -> None:
    steps = [
        Step("ssh", pct.shell_line(ssh_argv(target))),
        Step("agent", f"exec {json.dumps(fields, ensure_ascii=False)}"),
    ]
    if as_json:
        shown = [{"to": step.label, "text": step.text} for step in steps]
        output.emit({"host": target.host.name, "ct": target.ct, "steps": shown})
        return
    for step in steps:
        output.say(step.line())


def _run(
    channel: AgentChannel, target: Target, fields: dict[str, Any], stdin: bool, as_json: bool
) -> int:
    extra = {"stdin": True, "more": True} if stdin else {}
    request = channel.request("exec", **fields, **extra)
    if stdin:
        threading.Thread(target=request.feed, args=(_input(),), daemon=True).start()
    heard = {"stdout": bytearray(), "stderr": bytearray()}
    show = {"stdout": output.shower(sys.stdout), "stderr": output.shower(sys.stderr)}
    for head, payload in request.frames():
        if "stream" not in head:
            continue
        if as_json:
            heard[head["stream"]] += payload
        else:
            show[head["stream"]](payload)
    answer = request.result()
    if as_json:
        text = {name: bytes(data).decode(errors="replace") for name, data in heard.items()}
        output.emit({"host": target.host.name, "ct": target.ct, **answer, **text})
    if answer.get("timed_out"):
        output.notice(f"{target.name}: the command was ended when its time was over")
    if answer.get("signal"):
        return 128 + int(answer["signal"])
    return int(answer.get("exit_code") or 0)


def _input() -> Iterator[bytes]:
    while piece := os.read(sys.stdin.fileno(), 1 << 16):
        yield piece
