"""``dflashctl watch``."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from orchestrator.channel import AgentChannel
from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Runs
from orchestrator.cli.session import Session, open_session
from orchestrator.errors import ContainerNotRunning, UnreachableError, UsageError
from orchestrator.run import RunRef, RunSummary
from orchestrator.watch import Alert, Watcher


def watch(
    runs: Runs = None,
    host: HostOption = None,
    ct: CtOption = None,
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between looks.")] = 5.0,
    webhook: Annotated[
        str | None, typer.Option("--webhook", metavar="URL", help="POST each alert there as JSON.")
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Poll a run until its end: state changes, lost throughput, no answer.

    Exits 0 if it finished or was stopped, 1 if it failed. No answer is never taken for failure.
    """
    if webhook and not webhook.startswith(("http://", "https://")):
        raise UsageError(f"--webhook {webhook} is no http:// or https:// address")
    with open_session(inventory) as session:
        ref = session.one_run(runs, host, ct)
        raise typer.Exit(_watch(session, ref, every, webhook, as_json))


def _watch(session: Session, ref: RunRef, every: float, webhook: str | None, as_json: bool) -> int:
    channel: AgentChannel = session.fleet.container(ref.target)
    run_id = ref.run_id or str(channel.call("run.status", lines=0)["run_id"])
    watcher = Watcher()
    place = {"run_id": run_id, "host": ref.target.host.name, "ct": ref.target.ct}
    while True:
        run: RunSummary | None = None
        try:
            run = RunSummary.model_validate(channel.call("run.status", run_id=run_id, lines=0))
            alerts = watcher.reading(run)
        except (UnreachableError, ContainerNotRunning) as error:
            alerts = watcher.unreachable(error.what)
            session.fleet.drop(channel)
        for alert in alerts:
            _tell(alert, place, run, ref, webhook, as_json)
        if run is not None and run.is_over:
            return run.verdict
        time.sleep(every)
        if run is None:
            channel = _again(session, ref, channel)


def _again(session: Session, ref: RunRef, old: AgentChannel) -> AgentChannel:
    """A new channel, or the dead one where there is none to be had: its next call fails at once."""
    try:
        return session.fleet.container(ref.target)
    except UnreachableError:
        return old


def _tell(
    alert: Alert,
    place: dict[str, Any],
    run: RunSummary | None,
    ref: RunRef,
    webhook: str | None,
    as_json: bool,
) -> None:
    state = run.as_json(ref.target) if run else {**place, "state": "unreachable"}
    body = {**state, "alert": alert.kind, "text": alert.text, **alert.fields}
    if as_json:
        output.emit(body)
    else:
        output.say(f"{time.strftime('%H:%M:%S')} {place['run_id']} {alert.text}")
    if webhook:
        _post(webhook, body)


def _post(url: str, body: dict[str, Any]) -> None:
    data = json.dumps(body, default=str).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10):
            pass
    except (urllib.error.URLError, TimeoutError) as error:
        output.notice(f"the webhook did not take the alert: {error}")
