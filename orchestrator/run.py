"""Runs as the controller sees them: ids, summaries, and which run a verb means."""

from __future__ import annotations

import difflib
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from orchestrator.errors import (
    DflashctlError,
    NotFoundError,
    RunNotFound,
    UnreachableError,
    UsageError,
)
from orchestrator.fanout import each
from orchestrator.fleet import Fleet
from orchestrator.gpu_use import Cards, Looks
from orchestrator.inventory import NAME, Inventory
from orchestrator.state import LaptopState
from orchestrator.target import RUN_ID, Target, everything, resolve

ENDED = frozenset({"finished", "failed", "stopped"})


def new_run_id(name: str | None) -> str:
    """``<name>-<date>-<time>-<4 hex>``: made here, so that a repeated start means the same run.

    :raises UsageError: a name that is no file and session name.
    """
    name = name or "run"
    # tmux takes dots and colons in a session name for its own; 40 keeps `ps` within 80 columns.
    if not NAME.match(name) or "." in name or len(name) > 40:
        raise UsageError(
            f"{name!r} is no name for a run",
            next_step="use up to 40 letters, digits, dashes and underscores, no dash first",
        )
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{name}-{stamp}-{secrets.token_hex(2)}"


def group_id(run_id: str) -> str | None:
    """The id of the whole run, of which ``run_id`` names a node (``nodes.node_id``); None for one
    that names none."""
    match = re.fullmatch(r"(.+)-n\d+(-\d{8}-\d{6}-[0-9a-f]{4})", run_id)
    return match[1] + match[2] if match else None


class RunSummary(BaseModel):
    """What the agent says of a run. Newer agents may say more: that is kept."""

    model_config = ConfigDict(extra="allow")

    run_id: str
    name: str | None = None
    state: str
    reason: str | None = None
    created: float | None = None
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tau: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    idle_s: float | None = None
    last_lines: list[str] = []

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    @property
    def progress(self) -> str | None:
        """``120/400``; a program of one's own may not say of how many."""
        if self.step is None or not self.steps:
            return None if self.step is None else str(self.step)
        return f"{self.step}/{self.steps}"

    @property
    def verdict(self) -> int:
        """This tool's exit code for how the run ended: a requested stop is no failure."""
        return 1 if self.state == "failed" else 0

    def ending(self) -> str:
        """``failed: exit code 3`` or ``failed: signal 9``."""
        if self.signal:
            how = f"signal {self.signal}"
        elif self.exit_code is not None:
            how = f"exit code {self.exit_code}"
        else:
            how = ""
        parts = [part for part in (how, self.reason) if part and part != self.state]
        return self.state + (f": {', '.join(parts)}" if parts else "")

    def as_json(self, target: Target) -> dict[str, Any]:
        """The stable keys first, then whatever else the agent said."""
        stable = {
            "run_id": self.run_id,
            **target.place,
            "state": self.state,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "step": self.step,
            "tokens_per_s": self.tokens_per_s,
            "eta_s": self.eta_s,
        }
        return {**stable, **{k: v for k, v in self.model_dump().items() if k not in stable}}


@dataclass(frozen=True)
class RunRef:
    """A run and the container it lives in; without an id, the container's newest."""

    target: Target
    run_id: str | None

    @property
    def place(self) -> dict[str, Any]:
        """What names it in an error and in ``--json``."""
        return {"run_id": self.run_id, **self.target.place}

    @property
    def fields(self) -> dict[str, str]:
        """What names it in a request."""
        return {"run_id": self.run_id} if self.run_id else {}


@dataclass(frozen=True)
class Asked:
    """One container's answer, or why there is none."""

    target: Target
    runs: tuple[RunSummary, ...] = ()
    error: DflashctlError | None = None
    cards: Cards = field(default_factory=dict)
    """The GPUs of each run that lives, where they were asked for."""


def ask_all(
    fleet: Fleet, targets: Sequence[Target], looks: Looks | None = None, **fields: Any
) -> Iterable[Asked]:
    """``run.list`` of every container at once; answers in the order in which they come.

    :param looks: ask for the runs' GPUs too.

    A host that does not answer is one late :class:`Asked` with its error; it holds up nobody.
    """

    def ask(target: Target) -> Asked:
        channel = fleet.container(target)
        try:
            listing = channel.request("run.list", **fields)
            look = looks.begin(target, channel) if looks else None
            runs = tuple(RunSummary.model_validate(run) for run in listing.result()["runs"])
            return Asked(target, runs, cards=look.cards(runs) if look else {})
        finally:
            # Its place among the host's channels is wanted by the next container.
            channel.close()

    for target, found in each(fleet, targets, ask):
        yield Asked(target, error=found) if isinstance(found, DflashctlError) else found


def choose(
    fleet: Fleet,
    inventory: Inventory,
    state: LaptopState,
    words: Sequence[str],
    host: str | None,
    ct: int | None,
) -> list[RunRef]:
    """The runs that ``words`` (run ids, inventory names, groups) and ``--host --ct`` mean.

    Nothing given: the newest run launched from this laptop, else the newest in the inventory. A
    word that the inventory does not know may be what ``launch --name`` was given: the newest so
    called, but of this laptop's only, for ``stop`` must not mean a colleague's by it.

    :raises RunNotFound: an id nobody knows, or no run at all.
    """
    known = {*inventory.containers, *inventory.groups()}
    words = [word if word in known else _id_of_name(state, word) or word for word in words]
    ids = [word for word in words if RUN_ID.match(word)]
    names = [word for word in words if not RUN_ID.match(word)]
    try:
        targets = resolve(inventory, names, host, ct)
    except NotFoundError as error:
        raise _neither(fleet, inventory, state, names, error) from None
    if ids and len(targets) == 1:
        return [RunRef(targets[0], run_id) for run_id in ids]
    refs = [RunRef(target, None) for target in targets]
    refs += [ref for run_id in ids for ref in _locate(fleet, inventory, state, run_id)]
    if refs:
        return refs
    newest = state.newest()
    if newest is not None:
        return [RunRef(newest.target, newest.run_id)]
    return [_newest_of(fleet, everything(inventory))]


def _id_of_name(state: LaptopState, name: str) -> str | None:
    newest = state.newest_named(name)
    return (group_id(newest.run_id) or newest.run_id) if newest else None


def _neither(
    fleet: Fleet,
    inventory: Inventory,
    state: LaptopState,
    names: Sequence[str],
    error: NotFoundError,
) -> NotFoundError:
    """A word that is no container: perhaps the beginning of a run's id, which nobody types out."""
    wrong = next((name for name in names if repr(name) in error.what), names[0])
    near = nearest_run(wrong, [run.run_id for run in state.runs()])
    if not near and "did you mean" not in error.what:
        # A slip in a container's name needs no question to all of them.
        answers = ask_all(fleet, everything(inventory))
        near = nearest_run(wrong, [run.run_id for asked in answers for run in asked.runs])
    what = f"no run, container or group is called {wrong!r}{near}" if near else error.what
    return NotFoundError(
        what,
        next_step="give a whole run id of `dflashctl ps`, a name of `dflashctl inventory list`, or "
        "--host H --ct N",
    )


def nearest_run(wrong: str, ids: Iterable[str]) -> str:
    """``; did you mean train-…?``: the newest that begins so, else the one most like it."""
    known = sorted(set(ids), key=lambda run_id: run_id.split("-")[-3:], reverse=True)
    close = [run_id for run_id in known if run_id.startswith(wrong)]
    close = close or difflib.get_close_matches(wrong, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


def _locate(fleet: Fleet, inventory: Inventory, state: LaptopState, run_id: str) -> list[RunRef]:
    """The run, or all nodes of the run on several containers that ``run_id`` names as a whole."""
    known = state.find(run_id)
    if known is not None:
        return [RunRef(known.target, run_id)]
    nodes = [run for run in state.runs() if group_id(run.run_id) == run_id]
    if nodes:
        return [RunRef(n.target, n.run_id) for n in sorted(nodes, key=lambda run: run.run_id)]
    silent: list[Asked] = []
    found: list[RunRef] = []
    known_ids = [run.run_id for run in state.runs()]
    for asked in ask_all(fleet, everything(inventory)):
        known_ids += [run.run_id for run in asked.runs]
        if any(run.run_id == run_id for run in asked.runs):
            return [RunRef(asked.target, run_id)]
        found += [
            RunRef(asked.target, run.run_id) for run in asked.runs if group_id(run.run_id) == run_id
        ]
        if asked.error:
            silent.append(asked)
    if found:
        return found
    near = nearest_run(run_id, known_ids)
    raise _absent(silent)(
        f"no container of the inventory has it{_unasked(silent)}{near}",
        next_step="`dflashctl ps` lists the runs; --host H --ct N looks outside the inventory",
        run_id=run_id,
    )


def _newest_of(fleet: Fleet, targets: Sequence[Target]) -> RunRef:
    newest: tuple[float, RunRef] | None = None
    silent: list[Asked] = []
    for asked in ask_all(fleet, targets, limit=1):
        if asked.error:
            silent.append(asked)
        for run in asked.runs:
            age = run.created or 0.0
            if newest is None or age > newest[0]:
                newest = (age, RunRef(asked.target, run.run_id))
    if newest is not None:
        return newest[1]
    raise absent(silent, "no run was launched from this laptop, and the inventory has none")


def absent(silent: list[Asked], what: str) -> DflashctlError:
    """There is no run, as far as those tell that answered."""
    return _absent(silent)(
        f"{what}{_unasked(silent)}", next_step="start one: dflashctl launch --host H --ct N"
    )


def _absent(silent: list[Asked]) -> type[DflashctlError]:
    """A container that cannot be reached may have it: then nobody knows that it is absent."""
    unreachable = any(isinstance(asked.error, UnreachableError) for asked in silent)
    return UnreachableError if unreachable else RunNotFound


def _unasked(silent: list[Asked]) -> str:
    names = sorted(asked.target.name for asked in silent)
    return f" (no answer from {', '.join(names)})" if names else ""


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """``90``, ``90s``, ``10m``, ``2h``, ``1d`` in seconds.

    :raises UsageError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not match:
        raise UsageError(f"{text!r} is no duration", next_step="give for example 90s, 10m, 2h, 1d")
    return float(match[1]) * _UNITS[match[2] or "s"]
