"""What every verb begins with: the inventory, the laptop's state, and a fleet to reach out with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator import head_start
from orchestrator import inventory as inventories
from orchestrator import target as targets
from orchestrator.cli import output
from orchestrator.errors import DflashctlError, UsageError
from orchestrator.fleet import Fleet, Notice
from orchestrator.inventory import Inventory
from orchestrator.inventory_files import files_of, stamp
from orchestrator.laptop_path import laptop_path
from orchestrator.paths import LaptopPaths
from orchestrator.run import RunRef, choose
from orchestrator.state import LaptopState
from orchestrator.target import Target


@dataclass
class Session:
    """One call of the command line."""

    laptop: LaptopPaths
    inventory: Inventory
    state: LaptopState
    fleet: Fleet

    def targets(
        self, names: Sequence[str] | None, host: str | None, ct: int | None
    ) -> list[Target]:
        """The containers named; empty where none was."""
        found = targets.resolve(self.inventory, names or (), host, ct)
        self.fleet.expect(found)
        return found

    def some_targets(
        self, names: Sequence[str] | None, host: str | None, ct: int | None
    ) -> list[Target]:
        """:raises UsageError: none was named."""
        found = self.targets(names, host, ct)
        if not found:
            raise self._unclear("no container was named")
        return found

    def targets_or_all(
        self, names: Sequence[str] | None, host: str | None, ct: int | None
    ) -> list[Target]:
        """The containers named; else all of the inventory; else that of the newest run.

        :raises UsageError: there is none of them.
        """
        found = self.targets(names, host, ct) or targets.everything(self.inventory)
        if not found and (newest := self.state.newest()) is not None:
            found = [newest.target]
        if not found:
            raise UsageError(
                "the inventory is empty, and no container was named",
                next_step="give --host H --ct N, write an inventory (dflashctl init), or try all "
                "of it without Proxmox (dflashctl lab up)",
            )
        return found

    def one_target(self, names: Sequence[str] | None, host: str | None, ct: int | None) -> Target:
        """:raises UsageError: none or several were named."""
        found = self.targets(names, host, ct)
        if len(found) == 1:
            return found[0]
        what = "no container was named" if not found else f"{len(found)} containers were named"
        raise self._unclear(f"{what}, and this verb takes one")

    def _unclear(self, what: str) -> UsageError:
        known = ", ".join(self.inventory.containers) or "none yet: dflashctl init writes one"
        return UsageError(what, next_step=f"give --host H --ct N, or an inventory name ({known})")

    def runs(self, words: Sequence[str] | None, host: str | None, ct: int | None) -> list[RunRef]:
        found = choose(self.fleet, self.inventory, self.state, words or (), host, ct)
        self.fleet.expect([ref.target for ref in found])
        return found

    def runs_to_change(
        self, words: Sequence[str] | None, host: str | None, ct: int | None, verb: str
    ) -> list[RunRef]:
        """As ``runs``, but where nothing is named only a run of this user's own."""
        from orchestrator.own_runs import newest_own

        if words or host is not None or ct is not None:
            return self.runs(words, host, ct)
        return [newest_own(self.fleet, self.inventory, self.state, verb)]

    def pinned(self, ref: RunRef, verb: str) -> RunRef:
        """The host notes a refusal as it would the deed.

        :raises RefusedError: it was named by its container, and is somebody else's.
        """
        from orchestrator.audit import audited
        from orchestrator.own_runs import pin

        try:
            return pin(self.fleet, self.state, ref, verb, output.notice)
        except DflashctlError as error:
            with audited(self.fleet, ref.target, verb, output.notice, run_id=error.run_id):
                raise

    def with_siblings(self, refs: Sequence[RunRef]) -> list[RunRef]:
        """``refs``, and the other nodes of those that run on several containers."""
        from orchestrator.whole_run import with_siblings

        found = with_siblings(self.fleet, self.inventory, self.state, refs, output.notice)
        self.fleet.expect([ref.target for ref in found])
        return found

    def one_run(self, words: Sequence[str] | None, host: str | None, ct: int | None) -> RunRef:
        """:raises UsageError: several runs were named."""
        return _one(self.runs(words, host, ct))

    def one_run_to_change(
        self, words: Sequence[str] | None, host: str | None, ct: int | None, verb: str
    ) -> RunRef:
        """:raises RefusedError: it is somebody else's and was not named by its id."""
        return self.pinned(_one(self.runs_to_change(words, host, ct, verb)), verb)


def _one(found: list[RunRef]) -> RunRef:
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} runs were named, and this verb takes one",
            next_step="give one run id; `dflashctl ps` lists them",
        )
    return found[0]


@contextmanager
def open_session(
    inventory: Path | None,
    *,
    ask: bool = True,
    patient: bool = True,
    quiet: bool = False,
    as_json: bool = False,
) -> Iterator[Session]:
    """Read the inventory; close every connection at the end.

    :param inventory: ``--inventory`` or ``$DFLASHCTL_INVENTORY``.
    :param patient: wait for a frozen container, which may thaw; else say at once that it is.
    :param quiet: say nothing while it works: the whole screen is drawn.
    :param as_json: nobody sits there who would want to know what is waited for.
    """
    laptop = LaptopPaths()
    state = LaptopState(laptop)
    source = laptop_path(inventory) if inventory else None
    files = stamp(files_of(source, laptop))
    known = inventories.load(source, laptop)
    head_start.remember(laptop, files, known)
    silence: Notice = lambda text: None  # noqa: E731
    notice = silence if quiet else output.notice
    waiting = silence if quiet or as_json else output.waiting
    with Fleet(state, ask=ask, patient=patient, notice=notice, waiting=waiting) as fleet:
        try:
            yield Session(laptop, known, state, fleet)
        except DflashctlError as error:
            fleet.named(error)
            raise
