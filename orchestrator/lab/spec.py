"""What a lab consists of, as plain data: one host and its containers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from orchestrator.errors import UsageError

Backend = Literal["lxc", "unshare"]
Interpreter = Literal["shared", "own", "minimal", "host"]

MIB = 1024 * 1024
DEFAULT_ROOT = Path("/var/lib/dflashctl/lab")
DEFAULT_PORT = 20022
SHARED_PYTHON = Path("/var/lib/dflashctl/python")
"""A virtual environment with torch, made once on the machine; see ``Container.python``."""


@dataclass(frozen=True)
class Container:
    """One container. Sizes are bytes.

    ``python``: which interpreter the inventory names.
      shared   the lab's ``shared_python``, read-only at /opt/dflash/python, if it exists
      own      a bare virtual environment at /srv/python, with no packages
      minimal  /usr/bin/python3 without ``json`` and all else that Debian's python3-minimal lacks
      host     /usr/bin/python3 as the machine has it
    """

    vmid: int
    running: bool = True
    python: Interpreter = "host"
    memory: int = 0
    """Limit of the memory cgroup; 0 means none."""
    shm: int = 1024 * MIB
    workdir: str = "/workspace"
    workdir_size: int = 0
    """A tmpfs of that size, to be filled by tests; 0 means a folder on the lab's own disk."""
    tmux: bool = True
    hostname: str = ""

    def __post_init__(self) -> None:
        if not 100 <= self.vmid <= 999_999_999:
            raise UsageError(
                f"{self.vmid} is no container number",
                next_step="give one from 100 to 999999999, as Proxmox numbers them",
            )
        if not self.workdir.startswith("/") or self.workdir == "/":
            raise UsageError(
                f"container {self.vmid}: workdir {self.workdir!r} is not absolute",
                next_step="give a path from / on, such as /workspace",
            )

    @property
    def name(self) -> str:
        return self.hostname or f"ct{self.vmid}"


DEFAULT_CONTAINERS = (
    Container(200, python="shared"),
    Container(201, python="own"),
    Container(202, running=False),
)


def nvidia_nodes(folder: Path = Path("/dev")) -> tuple[Path, ...]:
    """The machine's GPUs and what else their driver opens; nothing without a driver."""
    return tuple(sorted(path for path in folder.glob("nvidia*") if not path.is_dir()))


@dataclass(frozen=True)
class LabSpec:
    root: Path = DEFAULT_ROOT
    port: int = DEFAULT_PORT
    containers: tuple[Container, ...] = DEFAULT_CONTAINERS
    backend: Backend | None = None
    """None takes LXC where it is installed, else unshare."""
    network: bool = True
    """A bridge and one veth with an address per container; without it containers have only lo."""
    shared_python: Path = SHARED_PYTHON
    inventory: Path | None = None
    """Where to write the inventory; None means ``root/inventory.yaml``."""
    node: str = "pve1"
    pct_delay: float = 0.0
    """Seconds of computing that each ``pct`` call costs first; the real one takes 0.5 to 0.97."""
    devices: tuple[Path, ...] = field(default_factory=nvidia_nodes)
    """Nodes that all containers share with this machine, as ``devN:`` passes them on Proxmox."""
    driver: tuple[Path, ...] | None = None
    """Mounts below / that host and containers see too, read-only: those that hold the devices'
    driver. None finds them (``driver.py``)."""

    @property
    def gpus(self) -> list[int]:
        """Indices, as nvidia-smi counts them."""
        cards = [d for d in self.devices if re.fullmatch(r"nvidia\d+", d.name)]
        return list(range(len(cards)))

    def __post_init__(self) -> None:
        numbers = [c.vmid for c in self.containers]
        if len(set(numbers)) != len(numbers):
            raise UsageError(
                f"container numbers are not unique: {sorted(numbers)}",
                next_step="give each container a number of its own",
            )
        if len(numbers) > 200:
            raise UsageError(
                f"{len(numbers)} containers do not fit into the lab's one /24 network",
                next_step="ask for at most 200",
            )
        if not self.root.is_absolute():
            raise UsageError(
                f"lab folder {self.root} is not absolute",
                next_step="give the whole path, from / on",
            )
        # The LXC command socket is abstract and named by path: sun_path holds 107 bytes, above
        # that LXC hashes the name and `pct` no longer finds it in /proc/net/unix.
        if len(str(self.root)) > 70:
            raise UsageError(
                f"lab folder {self.root} is longer than 70 characters",
                next_step="give a shorter path: LXC's sockets are named by it",
            )
        if not 1 <= self.port <= 65535:
            raise UsageError(
                f"port {self.port} is not a port", next_step="give one from 1 to 65535"
            )


def parse_containers(text: str) -> tuple[Container, ...]:
    """``200,201,202:stopped`` → containers; 200 gets the shared interpreter, 201 its own."""
    result = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(:stopped)?\s*", part)
        if not match:
            raise UsageError(
                f"container list: {part!r} is not NUMBER or NUMBER:stopped",
                next_step="write for example 200,201,202:stopped",
            )
        vmid = int(match[1])
        by_number = {c.vmid: c for c in DEFAULT_CONTAINERS}
        python: Interpreter = by_number[vmid].python if vmid in by_number else "host"
        result.append(Container(vmid, running=not match[2], python=python))
    return tuple(result)
