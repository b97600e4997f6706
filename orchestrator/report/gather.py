"""From a live run to what the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator import logged_steps
from orchestrator.channel import AgentChannel
from orchestrator.environment import remote
from orchestrator.environment.lock import Environment
from orchestrator.errors import NotFoundError, UsageError
from orchestrator.report.page import RunRecord
from orchestrator.run import RunRef, RunSummary
from orchestrator.run_files import read_lines, read_metrics
from trainer.telemetry import EVENTS_FILE, read_events

LAST_LINES = 60


def gather(
    channel: AgentChannel, ref: RunRef, findings: Sequence[dict[str, Any]] = ()
) -> RunRecord:
    """Everything the page needs; of a run that writes no metrics the log's steps."""
    status = channel.call("run.status", lines=LAST_LINES, **ref.fields)
    run_id = str(status["run_id"])
    summary = RunSummary.model_validate(status)
    manifest = dict(status.get("record") or {})
    environment = _environment(channel, ref, run_id)
    if environment is not None:
        manifest["environment"] = facts(environment)
    steps = read_metrics(channel, run_id, None)
    return RunRecord(
        summary=summary.as_json(ref.target),
        where=ref.target.in_full,
        manifest=manifest,
        steps=steps,
        logged=() if steps else logged_steps.ask(channel, run_id),
        events=list(read_events(read_lines(channel, run_id, EVENTS_FILE, None))),
        findings=findings,
        last_lines=summary.last_lines,
    )


def _environment(channel: AgentChannel, ref: RunRef, run_id: str) -> Environment | None:
    try:
        return remote.recorded(channel, ref.target, run_id)
    except (NotFoundError, UsageError):
        return None


def facts(environment: Environment) -> dict[str, str]:
    """The few lines of an environment that a reader asks for; `env diff` has the rest."""
    torch, driver = environment.torch, environment.driver
    found = {
        "python": environment.python.version,
        "torch": torch.version if torch else "not installed",
        "cuda": (torch.cuda if torch else None) or "none",
        "driver": driver.version if driver else "none",
        "gpus": ", ".join(gpu.name for gpu in environment.gpus) or "none",
        "system": f"{environment.system.os}, {environment.system.kernel}",
    }
    for name in ("transformers", "triton", "safetensors"):
        if name in environment.packages:
            found[name] = environment.packages[name]
    return found
