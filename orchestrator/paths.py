"""Every path on both sides, one class a side.

Remote paths are plain strings joined with ``/``: they may hold any byte (``surrogateescape``), and
the agent, which shares this module, starts some 10 ms sooner without ``pathlib``. Laptop paths are
``pathlib.Path``.
"""

from __future__ import annotations

import os
import posixpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_WORKDIR = "/workspace"
"""Where a container's work lies unless its inventory entry says otherwise."""

HOST_WORKDIR = "/var/lib"
"""The agent's workdir on a Proxmox host, so that everything there is under /var/lib/dflashctl."""

FOLDER = "dflashctl"


FLIGHT_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Where torch's flight recorder writes, by its present and its older name; the rank follows."""


class ContainerPaths:
    """The tree under ``<workdir>/dflashctl``, mode 0700. The agent on a host uses the same one."""

    def __init__(self, workdir: str = DEFAULT_WORKDIR) -> None:
        self.workdir = workdir
        self.root = posixpath.join(workdir, FOLDER)
        self.agent = posixpath.join(self.root, "agent")
        """``<hash>.pyz`` as it came, ``<hash>-<cache tag>.pyz`` compiled for one Python."""
        self.blobs = posixpath.join(self.root, "blobs")
        """Contents by sha256; a release is made of links to them."""
        self.releases = posixpath.join(self.root, "releases")
        """Pushed code: a tree, a record and a manifest each."""
        self.runs = posixpath.join(self.root, "runs")
        """One folder a run."""
        self.lock = posixpath.join(self.root, "lock")
        """flock: held shared while a release is built, exclusively while old ones are pruned."""

    def blob(self, digest: str) -> str:
        """One content."""
        return posixpath.join(self.blobs, digest[:2], digest)

    def release(self, release_id: str) -> str:
        """The code of one release: an immutable tree."""
        return posixpath.join(self.releases, release_id)

    def release_record(self, release_id: str) -> str:
        """What is known of it: manifest hash, time, size. Beside the tree, never in it."""
        return posixpath.join(self.releases, f"{release_id}.json")

    def release_manifest(self, release_id: str) -> str:
        """Path, mode and hash of each of its files."""
        return posixpath.join(self.releases, f"{release_id}.manifest")

    def run(self, run_id: str) -> RunPaths:
        """All of one run."""
        return RunPaths(posixpath.join(self.runs, run_id))


class RunPaths:
    """One run's folder in the container."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.run_id = posixpath.basename(root)
        self.record = posixpath.join(root, "run.json")
        """Who, when, release, git commit, command, cwd, names of environment variables, GPUs."""
        self.start = posixpath.join(root, "start.json")
        """What the supervisor needs to start the command, values of variables too; 0600."""
        self.secrets = posixpath.join(root, ".secrets")
        """Read once by the supervisor, then removed."""
        self.dirty_diff = posixpath.join(root, "dirty.diff")
        """What the pushed work tree had beyond its commit."""
        self.supervisor = posixpath.join(root, "supervisor.json")
        """Its PID, start time and boot id, the child's, and the tmux session: is the run alive?"""
        self.supervisor_log = posixpath.join(root, "supervisor.log")
        """The supervisor's own words: restarts, lost bytes, signals, its traceback if it fails."""
        self.heartbeat = posixpath.join(root, "heartbeat.json")
        """Rewritten while the supervisor lives."""
        self.stop = posixpath.join(root, "stop.json")
        """A request to stop: who, when, grace."""
        self.exit = posixpath.join(root, "exit.json")
        """The end: exit code or signal, reason, time, every attempt. Renamed into place."""
        self.log = posixpath.join(root, "train.log")
        """All that the command printed."""
        self.log_index = posixpath.join(root, "train.log.index")
        """One line for each second with output: time, inode, offset of the next line."""
        self.metrics = posixpath.join(root, "metrics.jsonl")
        """The trainer's steps."""
        self.events = posixpath.join(root, "events.jsonl")
        """What happened to the trainer beside its steps."""
        self.environment = posixpath.join(root, "environment.json")
        """The Python and CUDA environment that the run began with."""
        self.stacks = posixpath.join(root, "stacks")
        """Stacks of its threads, as diag took them."""
        self.flight_prefix = posixpath.join(self.stacks, "flight_rank_")
        """+ rank: torch's flight-recorder dump of its collectives, written when one times out."""
        self.checkpoints = posixpath.join(root, "checkpoints")
        """One folder each, whole or not there."""

    def rotated_log(self, number: int) -> str:
        """``train.log.1`` is the newest of the rotated ones."""
        return f"{self.log}.{number}"


class HostPaths(ContainerPaths):
    """The same tree on a Proxmox host, with what only a host holds."""

    def __init__(self, workdir: str = HOST_WORKDIR) -> None:
        super().__init__(workdir)
        self.leases = posixpath.join(self.root, "leases")
        """One file for each claimed GPU: run, who, when."""
        self.audit = posixpath.join(self.root, "audit.log")
        """One JSON line for each changing action: who, when, what, result; 0600."""

    def lease(self, gpu_uuid: str) -> str:
        """One claimed GPU."""
        return posixpath.join(self.leases, f"{gpu_uuid}.json")


class LaptopPaths:
    """Configuration, state and cache of one person, by the XDG habits.

    ``environment`` stands for ``os.environ`` (tests give their own).
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        from pathlib import Path

        variables = dict(os.environ) if environment is None else environment
        home = Path(variables.get("HOME") or Path.home())

        def base(variable: str, default: str) -> Path:
            value = variables.get(variable, "")
            # The XDG rule: a relative value is to be ignored.
            return Path(value) if value.startswith("/") else home / default

        self.config = base("XDG_CONFIG_HOME", ".config") / FOLDER
        """What you write."""
        self.state = base("XDG_STATE_HOME", ".local/state") / FOLDER
        """Mode 0700, files 0600: which runs were launched from here."""
        self.cache = base("XDG_CACHE_HOME", ".cache") / FOLDER
        """May be removed at any time."""
        self.own = (self.config, self.state, self.cache)
        """Nobody's code: no push takes them along."""
        chosen = variables.get("DFLASHCTL_INVENTORY", "")
        self.inventory = Path(chosen) if chosen else self.config / "inventory.yaml"
        """A file or a folder; ``$DFLASHCTL_INVENTORY`` overrides it."""
        self.inventory_folder = self.config / "inventory.d"
        """Read beside it; `inventory discover` and the lab write here."""
        self.playbooks = self.config / "playbooks"
        """Your own; they come before the shipped ones of the same name."""
        self.newest_run = self.state / "newest-run.json"
        """What verbs without a target mean."""
        self.runs = self.state / "runs"
        """Where each run that was launched from here lives."""
        self.known_agents = self.cache / "agents.json"
        """Which agent hash each container is believed to hold."""
        self.ways = self.cache / "ways.json"
        """What the inventory says of each container, for a connection that is begun at once."""
        self.digests = self.cache / "digests.json"
        """sha256 of local files by path, size, mtime and inode."""

    def run(self, run_id: str) -> Path:
        """What is remembered of one run (its target)."""
        return self.runs / f"{run_id}.json"
