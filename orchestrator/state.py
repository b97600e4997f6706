"""What this laptop remembers: which runs it launched and where. Never the truth, only a pointer."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from orchestrator.errors import UsageError
from orchestrator.paths import LaptopPaths
from orchestrator.private_file import read_json, write_private
from orchestrator.target import Target


def name_of(run_id: str) -> str:
    """What the run was called at its launch, without the ``-nRANK`` of a node among several."""
    return re.sub(r"(-n\d+)?-\d{8}-\d{6}-[0-9a-f]{4}$", "", run_id)


class RememberedRun(BaseModel):
    """A launched run and the container it lives in."""

    run_id: str
    target: Target
    launched: float
    """Seconds since the epoch, by this laptop's clock."""


class LaptopState:
    """Files of mode 0600 below a folder of mode 0700, each replaced by rename."""

    def __init__(self, laptop: LaptopPaths) -> None:
        self.paths = laptop
        self._lock = threading.Lock()

    def remember(self, run_id: str, target: Target) -> None:
        """Before the run starts: a laptop that dies now still knows where to look.

        :raises UsageError: it cannot be written.
        """
        run = RememberedRun(run_id=run_id, target=target, launched=time.time())
        try:
            write_private(self.paths.run(run_id), run.model_dump_json(exclude_unset=True))
            write_private(self.paths.newest_run, json.dumps({"run_id": run_id}))
        except OSError as error:
            raise UsageError(
                f"this machine cannot write down the run: {error.strerror}: {self.paths.runs}",
                next_step="make room there, make it writable, or set XDG_STATE_HOME",
                run_id=run_id,
            ) from None

    def forget(self, run_id: str) -> None:
        """A launch that was refused leaves no pointer behind."""
        # Where none can be written none can be removed: the refusal itself is what matters.
        with contextlib.suppress(OSError):
            self.paths.run(run_id).unlink(missing_ok=True)
            rest = sorted(self.runs(), key=lambda run: run.launched)
            if rest:
                write_private(self.paths.newest_run, json.dumps({"run_id": rest[-1].run_id}))
            else:
                self.paths.newest_run.unlink(missing_ok=True)

    def newest(self) -> RememberedRun | None:
        """The newest run launched from this laptop."""
        data = read_json(self.paths.newest_run)
        return self.find(str(data["run_id"])) if data and "run_id" in data else None

    def find(self, run_id: str) -> RememberedRun | None:
        return self._read(self.paths.run(run_id))

    def newest_named(self, name: str) -> RememberedRun | None:
        """The newest run that was launched from this laptop with ``--name NAME``."""
        named = [run for run in self.runs() if name_of(run.run_id) == name]
        return max(named, key=lambda run: run.launched, default=None)

    def runs(self) -> Iterator[RememberedRun]:
        for path in self.paths.runs.glob("*.json"):
            run = self._read(path)
            if run is not None:
                yield run

    def agent_of(self, place: str) -> str | None:
        """The hash of the agent that ``place`` was last seen to hold."""
        value = (read_json(self.paths.known_agents) or {}).get(place)
        return str(value) if value else None

    def know_agent(self, place: str, digest: str) -> None:
        # Fifty containers answer at once: none must write over what another has written.
        with self._lock:
            known = read_json(self.paths.known_agents) or {}
            if known.get(place) == digest:
                return
            # It only saves a question: a full disk or a home folder that is read-only is no reason
            # to give up a connection.
            with contextlib.suppress(OSError):
                text = json.dumps({**known, place: digest}, indent=0)
                write_private(self.paths.known_agents, text)

    def _read(self, path: Path) -> RememberedRun | None:
        data = read_json(path)
        try:
            return RememberedRun.model_validate(data) if data else None
        except ValidationError:
            # Of another version of this tool: the container still holds the truth.
            return None
