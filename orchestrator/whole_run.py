"""A run on several containers is one run: what is asked of one node is meant for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import DflashctlError
from orchestrator.fleet import Fleet, Notice
from orchestrator.inventory import Inventory
from orchestrator.run import RunRef, choose, group_id
from orchestrator.state import LaptopState


def with_siblings(
    fleet: Fleet,
    inventory: Inventory,
    state: LaptopState,
    refs: Sequence[RunRef],
    notice: Notice,
) -> list[RunRef]:
    """``refs``, and the other nodes of each that is one of several. A run whose id says that it is
    alone costs no question."""
    found = list(refs)
    known = {ref.run_id for ref in refs if ref.run_id}
    for ref in refs:
        if ref.run_id is not None and group_id(ref.run_id) is None:
            continue
        own, siblings = node_ids(fleet, state, ref)
        known |= {own} if own else set()
        missing = [run_id for run_id in siblings if run_id not in known]
        known |= set(missing)
        for run_id in missing:
            try:
                found += choose(fleet, inventory, state, [run_id], None, None)
            except DflashctlError as error:
                notice(f"{run_id}, another node of {own}, was not found: {error.what}")
    return found


def node_ids(fleet: Fleet, state: LaptopState, ref: RunRef) -> tuple[str | None, list[str]]:
    """(its own id, the ids of all nodes of its run): by the run's record, else by what was launched
    from this laptop. Empty for a run on one container."""
    try:
        with fleet.container(ref.target) as channel:
            answer = channel.call("run.status", lines=0, **ref.fields)
    except DflashctlError:
        # Whoever goes on with it will say what is wrong there; the others are reached all the same.
        if ref.run_id is None:
            return None, []
        group = group_id(ref.run_id)
        launched = sorted(run.run_id for run in state.runs())
        return ref.run_id, [run_id for run_id in launched if group_id(run_id) == group]
    record = answer.get("record") or {}
    nodes = record.get("nodes") or (record.get("meta") or {}).get("nodes") or {}
    return str(answer["run_id"]), [str(run_id) for run_id in nodes.get("run_ids") or []]
