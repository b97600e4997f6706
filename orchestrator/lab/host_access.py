"""What can be done with a lab that is up: its host by namespaces or by SSH, and its containers."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import NotFoundError, RefusedError
from orchestrator.lab.layout import PROGRAMS, Layout
from orchestrator.lab.processes import Process, boot_id, children
from orchestrator.lab.requirements import CLEAN_ENV
from orchestrator.lab.spec import LabSpec


def join_argv(layout: Layout, state_id: str, groups: Sequence[str]) -> list[str]:
    """The beginning of every command that the lab starts outside of SSH."""
    return ["/bin/sh", str(PROGRAMS / "host-join"), str(layout.state), state_id, *groups, "--"]


class HostAccess:
    """The host of one lab, known by its state file: any process may use it."""

    def __init__(self, spec: LabSpec | None = None) -> None:
        self.spec = spec or LabSpec()
        self.layout = Layout(self.spec.root)

    def state(self) -> dict[str, Any]:
        """The state file; empty if there is none or it was cut off by a crash."""
        try:
            data = json.loads(self.layout.state.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        except PermissionError:
            raise RefusedError(
                "the lab's state is readable by root only", next_step="run it again with sudo"
            ) from None
        return data if isinstance(data, dict) else {}

    @property
    def sshd(self) -> Process | None:
        """The host's main process, if it is the one that this lab started."""
        state = self.state()
        if state.get("boot_id") != boot_id() or "sshd" not in state:
            return None
        process = Process(**state["sshd"])
        return process if process.alive else None

    def host_argv(self, argv: Sequence[str]) -> list[str]:
        """``argv`` as a process on the lab's host, beside sshd; no connection is made."""
        sshd = self.sshd
        if sshd is None:
            raise NotFoundError("the lab is not up", next_step="dflashctl lab up")
        state = self.state()
        join = join_argv(self.layout, state["id"], state["host_cgroups"])
        enter = ["nsenter", "--target", str(sshd.pid), "--mount", "--uts", "--cgroup", "--"]
        return [*join, *enter, *argv]

    def host(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run it; ``options`` are those of subprocess.run."""
        merged: dict[str, Any] = {"capture_output": True, "text": True, "env": CLEAN_ENV}
        return subprocess.run(self.host_argv(argv), **(merged | options), check=False)

    def pct(self, *args: str | int) -> str:
        """``pct`` on the host, without SSH; its output. Raises RefusedError when it fails."""
        done = self.host(["pct", *map(str, args)], stdin=subprocess.DEVNULL)
        if done.returncode:
            raise RefusedError(
                f"pct {args[0]}: {done.stderr.strip()}",
                next_step="`dflashctl lab status` says what its containers do",
                host="lab",
            )
        return done.stdout

    def ssh_argv(self, *command: str, port: int | None = None) -> list[str]:
        """OpenSSH's client with the lab's key; ``port`` is that of a proxy in front of sshd."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": "10",
            "HostKeyAlias": f"[127.0.0.1]:{self.spec.port}",
            "IdentitiesOnly": "yes",
            "IdentityFile": str(self.layout.user_key),
            "LogLevel": "ERROR",
            "Port": str(port or self.spec.port),
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": str(self.layout.known_hosts),
        }
        flags = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
        return ["ssh", "-F", "none", *flags, "root@127.0.0.1", *command]

    def ssh(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        merged: dict[str, Any] = {"capture_output": True, "text": True}
        if "input" not in options:
            merged["stdin"] = subprocess.DEVNULL
        return subprocess.run(self.ssh_argv(*command), **(merged | options), check=False)

    def sessions(self) -> list[int]:
        """Server-side sshd processes, one a connection: kill one to cut it from the far side."""
        sshd = self.sshd
        return children(sshd.pid) if sshd else []

    def start(self, vmid: int) -> None:
        self.pct("start", vmid)

    def stop(self, vmid: int) -> None:
        self.pct("stop", vmid)

    def reboot(self, vmid: int) -> None:
        self.pct("reboot", vmid)

    def freeze(self, vmid: int) -> None:
        self.pct("suspend", vmid)

    def thaw(self, vmid: int) -> None:
        self.pct("resume", vmid)

    def init_pid(self, vmid: int) -> int:
        """The container's PID 1, as this machine numbers it."""
        for line in self.pct("status", vmid, "--verbose").splitlines():
            if line.startswith("pid: "):
                return int(line[5:])
        raise NotFoundError(
            "the container is not running",
            next_step=f"start it in the lab: pct start {vmid}",
            host="lab",
            ct=vmid,
        )

    def files(self, vmid: int) -> Path:
        """The running container's / as this machine can read and write it."""
        return Path(f"/proc/{self.init_pid(vmid)}/root")

    @contextlib.contextmanager
    def fault(self, name: str, value: str = "") -> Iterator[None]:
        """Switch on one of ``faults.py`` while the block runs."""
        path = self.layout.faults / name
        path.write_text(value)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
