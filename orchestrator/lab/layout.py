"""Every path of a lab, below its root folder (root only, 0700)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "host"
"""Programs that run inside the lab: ``pct``, the host's and the containers' start scripts."""


@dataclass(frozen=True)
class Layout:
    root: Path

    @property
    def id(self) -> str:
        """Names what lies outside the root folder: cgroups and the bridge (IFNAMSIZ is 15)."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:8]

    @property
    def cgroup(self) -> str:
        return f"dflashctl-lab-{self.id}"

    @property
    def bridge(self) -> str:
        return f"dfl{self.id}"

    @property
    def lock(self) -> Path:
        """Beside the root, because ``down`` removes the root."""
        return self.root.with_name(self.root.name + ".lock")

    @property
    def state(self) -> Path:
        return self.root / "lab.json"

    @property
    def state_beside(self) -> Path:
        """Renamed to ``state`` when it is written."""
        return self.root / "lab.json.new"

    @property
    def ssh(self) -> Path:
        return self.root / "ssh"

    @property
    def host_key(self) -> Path:
        return self.ssh / "host_key"

    @property
    def user_key(self) -> Path:
        return self.ssh / "user_key"

    @property
    def known_hosts(self) -> Path:
        return self.ssh / "known_hosts"

    @property
    def authorized_keys(self) -> Path:
        return self.ssh / "authorized_keys"

    @property
    def sshd_config(self) -> Path:
        return self.ssh / "sshd_config"

    @property
    def sshd_log(self) -> Path:
        return self.ssh / "sshd.log"

    @property
    def host(self) -> Path:
        return self.root / "host"

    @property
    def layers(self) -> Path:
        """``up`` and ``work`` of every overlay, for the host and each container."""
        return self.root / "layers"

    @property
    def host_upper(self) -> Path:
        return self.layers / "host" / "up"

    @property
    def lower(self) -> Path:
        """Inside the host only: the machine's own /, the lower layer of every container."""
        return self.host / "lower"

    @property
    def python(self) -> Path:
        """Inside the host only: the interpreter that containers may share."""
        return self.host / "python"

    @property
    def driver(self) -> Path:
        """Mounts that the host takes over from the machine, a path a line."""
        return self.host / "driver"

    @property
    def pve(self) -> Path:
        """The host sees it at /etc/pve."""
        return self.root / "pve"

    @property
    def faults(self) -> Path:
        """Fault switches that ``pct`` reads: see ``faults.py``."""
        return self.root / "faults"

    def pve_conf(self, vmid: int) -> Path:
        return self.pve / "lxc" / f"{vmid}.conf"

    def lxc_config(self, vmid: int) -> Path:
        """What LXC reads; ``pct start`` writes it from ``lxc_base`` and the raw lxc.* lines."""
        return self.root / "lxc" / str(vmid) / "config"

    def lxc_base(self, vmid: int) -> Path:
        return self.root / "lxc" / str(vmid) / "base"

    def ct(self, vmid: int) -> Path:
        return self.root / "ct" / str(vmid)

    def upper(self, vmid: int) -> Path:
        """LXC expects ``work`` beside it."""
        return self.layers / str(vmid) / "up"

    def work(self, vmid: int) -> Path:
        return self.layers / str(vmid) / "work"

    def disk(self, vmid: int) -> Path:
        """The container's work folder, when it is on disk."""
        return self.ct(vmid) / "disk"
