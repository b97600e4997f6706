"""The agent's error kinds as this tool's own errors. Pure."""

from __future__ import annotations

from typing import Any

from orchestrator.agent.protocol import AgentError
from orchestrator.errors import (
    DflashctlError,
    ExecFailed,
    NotFoundError,
    RefusedError,
    RunFailed,
    RunNotFound,
    TransferError,
    UsageError,
)

# kind → class and next step. The agent's own message says what happened.
_KINDS: dict[str, tuple[type[DflashctlError], str]] = {
    "run.not_found": (RunNotFound, "`dflashctl ps` lists the runs"),
    "run.busy": (
        RefusedError,
        "follow it (dflashctl tail RUN), stop it if it is yours to stop (dflashctl stop RUN), or "
        "launch beside it: --force",
    ),
    "run.conflict": (RefusedError, "launch again: each launch makes a run id of its own"),
    "run.log_link": (RefusedError, "give --log another path inside the container"),
    "run.not_started": (RunFailed, "`dflashctl diag` says why"),
    "tmux.missing": (RefusedError, "install it in the container: apt install tmux"),
    "tmux.failed": (RefusedError, "`dflashctl doctor` looks at tmux and its socket"),
    "lease.held": (RefusedError, "wait for that run, stop it, or choose other GPUs"),
    "command.not_found": (
        NotFoundError,
        "is it installed there, beside the inventory's `python` or on the PATH? "
        "dflashctl exec NAME -- python -m pip install …, or -- apt-get install …",
    ),
    "file.not_found": (NotFoundError, "check the path; a relative one is below the run's folder"),
    "file.unusable": (
        RefusedError,
        "look at that path in the container, or set its `workdir` in the inventory",
    ),
    "request.invalid": (UsageError, "give it as `dflashctl VERB --help` says"),
    "release.not_found": (NotFoundError, "push it again: dflashctl push"),
    "release.corrupt": (TransferError, "push again; what was there before is untouched"),
    "release.missing": (TransferError, "push again; what was there before is untouched"),
    "release.manifest": (RefusedError, "rename or leave out that file (.dflashignore)"),
    "pull.changed": (TransferError, "pull again: the file was being written"),
    "disk.full": (TransferError, "free some space there: `dflashctl doctor TARGET` names the disk"),
    "disk.readonly": (
        TransferError,
        "remount it writable, or set `workdir` of the container in the inventory",
    ),
    "agent.corrupt": (TransferError, "try again: the agent's program was damaged on its way"),
    "agent.store": (TransferError, "free some space in the container's workdir, /dev/shm or /tmp"),
}


def explain(error: dict[str, Any], *, host: str, ct: int | None) -> DflashctlError:
    """An error frame as an exception; ``__cause__`` holds the :class:`AgentError` with its kind."""
    kind = str(error.get("kind", "internal"))
    detail = error.get("detail") or {}
    message = str(error.get("message") or kind)
    cause = AgentError(kind, message, **{str(k): v for k, v in detail.items()})
    found = _KINDS.get(kind)
    if found is None:
        made: DflashctlError = ExecFailed(
            f"the agent failed ({kind}): {message}{_trace(detail)}",
            next_step="`dflashctl doctor` checks the container; this may be a fault of dflashctl",
            host=host,
            ct=ct,
        )
    else:
        cls, next_step = found
        made = cls(message, next_step=next_step, host=host, ct=ct)
    made.__cause__ = cause
    return made


def kind_of(error: BaseException) -> str | None:
    """The agent's error kind behind an exception, or None."""
    cause = error.__cause__
    return cause.kind if isinstance(cause, AgentError) else None


def _trace(detail: dict[str, Any]) -> str:
    lines = str(detail.get("traceback") or "").strip().splitlines()
    return "".join(f"\n    {line}" for line in lines[-12:])
