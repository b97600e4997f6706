"""Whose run a verb that changes it means: your own, unless a colleague's is named by its id."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from orchestrator.errors import RefusedError
from orchestrator.fleet import Fleet, Notice
from orchestrator.inventory import Inventory
from orchestrator.launch import whoami
from orchestrator.reconnect import reconnecting
from orchestrator.run import ENDED, Asked, RunRef, RunSummary, absent, ask_all
from orchestrator.state import LaptopState
from orchestrator.target import Target, everything


def is_own(state: LaptopState, run_id: str, who: Any) -> bool:
    """Launched from here, or by the same user of the same machine."""
    return who == whoami() or state.find(run_id) is not None


def newest_own(fleet: Fleet, inventory: Inventory, state: LaptopState, verb: str) -> RunRef:
    """The newest run launched from this laptop, else the newest of this user's that lives.

    :raises RefusedError: only others' runs live.
    :raises RunNotFound: none does.
    """
    newest = state.newest()
    if newest is not None:
        return RunRef(newest.target, newest.run_id)
    own: list[tuple[float, RunRef]] = []
    others: list[tuple[Target, RunSummary]] = []
    silent: list[Asked] = []
    for asked in ask_all(fleet, everything(inventory), limit=1):
        if asked.error:
            silent.append(asked)
        for run in asked.runs:
            if run.is_over:
                continue
            if is_own(state, run.run_id, owner(run)):
                own.append((run.created or 0.0, RunRef(asked.target, run.run_id)))
            else:
                others.append((asked.target, run))
    if own:
        return max(own, key=lambda pair: pair[0])[1]
    if not others:
        raise absent(silent, "no run of yours lives")
    listed = "".join(f"\n    {run.run_id} of {owner(run)}, in {at.name}" for at, run in others)
    raise RefusedError(
        f"no run of yours lives; these do:{listed}",
        next_step=f"if you mean one of them, name it: dflashctl {verb} RUN",
    )


def pin(fleet: Fleet, state: LaptopState, ref: RunRef, verb: str, notice: Notice) -> RunRef:
    """``ref`` with its run id: the container's newest run, where it is yours or has ended.

    :raises RefusedError: it lives and is somebody else's.
    """
    if ref.run_id is not None:
        return ref
    with ExitStack() as opened:
        answer = reconnecting(
            fleet,
            lambda: opened.enter_context(fleet.container(ref.target)),
            lambda channel: channel.call("run.status", lines=0),
            notice,
        )
    run_id, who = str(answer["run_id"]), answer.get("who")
    if answer["state"] not in ENDED and not is_own(state, run_id, who):
        raise RefusedError(
            f"this run was launched by {who or 'nobody known'}, not by you ({whoami()})",
            next_step=f"if you mean it all the same: dflashctl {verb} {run_id}",
            **ref.target.place,
            run_id=run_id,
        )
    return RunRef(ref.target, run_id)


def owner(run: RunSummary) -> str:
    return str((run.model_extra or {}).get("who") or "nobody known")
