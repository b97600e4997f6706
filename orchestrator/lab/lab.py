"""The lab: a Proxmox host on this machine, up, down and in between."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import RefusedError, UsageError
from orchestrator.lab import cgroups, driver, files, network, render, requirements
from orchestrator.lab.faults import PCT_DELAY
from orchestrator.lab.host_access import HostAccess, join_argv
from orchestrator.lab.layout import PROGRAMS
from orchestrator.lab.mounts import mountinfo, mounts_below, on_overlay
from orchestrator.lab.processes import Process, boot_id, listener
from orchestrator.lab.requirements import CLEAN_ENV
from orchestrator.lab.spec import Backend

START_LIMIT_S = 20.0
STARTS_AT_ONCE = 4


class ContainerStartFailed(RefusedError):
    """``pct start`` failed while the lab came up."""


class Lab(HostAccess):
    """One lab, known by its root folder; any process may take it over from its state file."""

    # --- up and down ---------------------------------------------------------------------------

    def up(self, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
        """Start host and containers; a lab that is up already stays as it is.

        Raises RefusedError when something is missing, the port is taken, or a start fails (then
        nothing is left behind). Returns ``status()``.
        """
        asked = self.spec.backend or os.environ.get("DFLASHCTL_LAB_BACKEND")
        backend = requirements.choose_backend(asked)
        requirements.check(backend)
        with self._locked():
            if self.sshd is not None:
                progress("the lab is up already")
                return self.status()
            self._clean()
            if holder := listener(self.spec.port):
                raise RefusedError(
                    f"port {self.spec.port} is taken by another program ({holder})",
                    next_step="choose another with --port, or end that program",
                )
            try:
                self._start_or_clean(backend, progress)
            except ContainerStartFailed as error:
                if asked or backend != "lxc":
                    raise
                # Installed is not working: some kernels and outer containers refuse LXC.
                progress(f"lxc does not work here ({error.what}); trying unshare")
                self._start_or_clean("unshare", progress)
            return self.status()

    def _start_or_clean(self, backend: Backend, progress: Callable[[str], None]) -> None:
        try:
            self._start(backend, progress)
        except OSError as error:
            self._clean()
            raise RefusedError(
                f"the lab cannot be made here: {error}",
                next_step="it needs a root that may mount and make device nodes, and folders that"
                " can be written: `docker run --privileged`, for example",
            ) from error
        except BaseException:
            self._clean()
            raise

    def _start(self, backend: Backend, progress: Callable[[str], None]) -> None:
        layout, spec = self.layout, self.spec
        if spec.driver is None:
            spec = replace(spec, driver=driver.mounts_here(spec.devices))
        layout.root.mkdir(parents=True, mode=0o700)
        groups = cgroups.find(layout.cgroup)
        state: dict[str, Any] = {
            "backend": backend,
            "boot_id": boot_id(),
            "id": secrets.token_hex(8),
            "cgroups": [str(group) for group in groups.groups],
            "host_cgroups": [str(group) for group in groups.of_host],
            "inventory": str(self.inventory),
            "port": spec.port,
        }
        self._write_state(state)  # before anything that `down` would have to find
        cgroups.make(groups)
        prefix = network.make_bridge(layout.bridge, int(layout.id, 16)) if spec.network else None
        addresses = {
            ct.vmid: render.address(prefix, index) if prefix else None
            for index, ct in enumerate(spec.containers)
        }
        progress(f"the host: sshd on 127.0.0.1:{spec.port}")
        files.make_keys(layout, spec.port)
        layout.layers.mkdir()
        if on_overlay(layout.root, mountinfo()):
            requirements.run("mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(layout.layers))
        files.make_host(layout, spec, backend, groups)
        sshd = self._start_host(groups)
        limits = cgroups.can_limit(groups)
        private = files.private_paths(layout, spec)
        for ct in spec.containers:
            files.make_container(
                layout,
                spec,
                ct,
                ip=addresses[ct.vmid],
                groups=groups,
                limits=limits,
                private=private,
            )
        state |= {
            "sshd": sshd.as_dict(),
            "memory_limits": limits,
            "network": f"{prefix}.0/24" if prefix else None,
            "addresses": {str(vmid): address for vmid, address in addresses.items()},
            "spec": json.loads(json.dumps(asdict(spec), default=str)),
        }
        self._write_state(state)
        numbers = [ct.vmid for ct in spec.containers if ct.running]
        progress(f"containers ({backend}): starting {', '.join(map(str, numbers)) or 'none'}")
        self._start_containers(numbers)
        if spec.pct_delay:
            (layout.faults / PCT_DELAY).write_text(str(spec.pct_delay))
        self._write_inventory()

    def down(self, progress: Callable[[str], None] = lambda line: None) -> bool:
        """End everything and remove it; returns whether there was anything."""
        if os.geteuid() != 0:
            raise RefusedError("only root can take the lab down", next_step="run it with sudo")
        with self._locked():
            found = self._clean()
        self.layout.lock.unlink(missing_ok=True)
        progress("the lab is down" if found else "there was no lab")
        return found

    def _clean(self) -> bool:
        """Remove whatever there is of this lab: whole, half-made, or of an older boot."""
        layout, state = self.layout, self.state()
        groups = [Path(group) for group in state.get("cgroups", [])]
        if not groups:
            groups = cgroups.leftovers(layout.cgroup)
        stubborn = cgroups.end(groups)
        if stubborn:
            raise RefusedError(
                f"processes of the lab do not end: {sorted(stubborn)}",
                next_step="look at them with ps (state D: a hung device), then try again",
            )
        self._reap(state)
        network.remove_bridge(layout.bridge)
        Path(state.get("inventory", self.inventory)).unlink(missing_ok=True)
        found = layout.root.exists()
        if found:
            self._remove_root()
        return found or bool(groups)

    def _remove_root(self) -> None:
        """Only a folder that is a lab's, and never across a mount."""
        root = self.layout.root
        found = {path.name for path in root.iterdir()}
        if found - {self.layout.state_beside.name} and not self.layout.state.exists():
            raise UsageError(
                f"{root} is not empty and is no lab of ours",
                next_step="remove it by hand, or choose another folder with DFLASHCTL_LAB_ROOT",
            )
        for point in mounts_below(root):
            if point != self.layout.layers:
                raise RefusedError(
                    f"something is mounted below {root}: {point}", next_step=f"umount {point}"
                )
            requirements.run("umount", "--lazy", str(point))
        for path in sorted(root.iterdir()):
            if path != self.layout.state:  # last: what is half removed is still known as ours
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(root)

    @staticmethod
    def _reap(state: dict[str, Any]) -> None:
        """The sshd that this very process started is a zombie until it is waited for."""
        if "sshd" in state:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(state["sshd"]["pid"], os.WNOHANG)

    def _start_host(self, groups: cgroups.Hierarchies) -> Process:
        layout = self.layout
        log = layout.host / "start.log"
        argv = join_argv(layout, self.state()["id"], [str(group) for group in groups.groups])
        argv += ["unshare", "--mount", "--uts", "--propagation", "private"]
        argv += ["/bin/sh", str(PROGRAMS / "host-start"), str(layout.root), self.spec.node]
        argv += [str(self.spec.shared_python), *groups.names]
        with log.open("wb") as output:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=CLEAN_ENV,
                start_new_session=True,
            )
        until = time.monotonic() + START_LIMIT_S
        while not self._answers():
            if child.poll() is not None or time.monotonic() > until:
                detail = log.read_text().strip()
                if layout.sshd_log.exists():
                    detail = f"{detail}\n{layout.sshd_log.read_text()}".strip()
                # mount(8) ends what it says with a pointer to dmesg.
                reasons = [line for line in detail.splitlines() if "dmesg(1)" not in line]
                raise RefusedError(
                    "the lab's host did not start: " + (reasons or ["no reason given"])[-1],
                    next_step="if that program is broken here, install it again; if it was refused,"
                    " this machine forbids namespaces or overlay mounts (an unprivileged container"
                    " does)",
                )
            time.sleep(0.005)
        sshd = Process.of(child.pid)
        if sshd is None:
            raise RefusedError(
                "the lab's sshd ended at once",
                next_step="try again: something ended it as it came up",
            )
        child.returncode = 0  # it outlives this object on purpose
        return sshd

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.spec.port), timeout=5) as link:
                return link.recv(4) == b"SSH-"
        except OSError:
            return False

    def _start_containers(self, numbers: Sequence[int]) -> None:
        waiting = list(numbers)
        running: list[tuple[int, subprocess.Popen[str]]] = []
        while waiting or running:
            while waiting and len(running) < STARTS_AT_ONCE:
                vmid = waiting.pop(0)
                argv = self.host_argv(["pct", "start", str(vmid)])
                child = subprocess.Popen(
                    argv,
                    env=CLEAN_ENV,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                running.append((vmid, child))
            vmid, child = running.pop(0)
            out, _ = child.communicate()
            if child.returncode:
                for _, other in running:
                    other.communicate()
                detail = out.strip() or f"exit code {child.returncode}"
                raise ContainerStartFailed(
                    f"container {vmid} did not start: {detail}",
                    next_step="try the other backend: dflashctl lab up --backend unshare (or lxc)",
                    host="lab",
                    ct=vmid,
                )

    def _write_inventory(self) -> None:
        data = render.inventory(self.layout, self.spec)
        self.inventory.parent.mkdir(parents=True, exist_ok=True)
        self.inventory.write_text(yaml.safe_dump(data, sort_keys=False))

    # --- state -----------------------------------------------------------------------------------

    @property
    def inventory(self) -> Path:
        return self.spec.inventory or self.layout.root / "inventory.yaml"

    def _write_state(self, state: dict[str, Any]) -> None:
        beside = self.layout.state_beside
        beside.write_text(json.dumps(state, indent=1))
        beside.replace(self.layout.state)

    def status(self) -> dict[str, Any]:
        """Stable keys, for --json: up, root, port, backend, inventory, containers, …"""
        state, sshd = self.state(), self.sshd
        result: dict[str, Any] = {
            "up": sshd is not None,
            "root": str(self.layout.root),
            "port": state.get("port"),
            "backend": state.get("backend"),
            "memory_limits": state.get("memory_limits"),
            "network": state.get("network"),
            "inventory": state.get("inventory"),
            "sshd_pid": sshd.pid if sshd else None,
            "containers": [],
        }
        if sshd:
            listed = self.host(["pct", "list"]).stdout.splitlines()[1:]
            result["containers"] = [
                {
                    "ct": int(line[:10]),
                    "state": line[11:21].strip(),
                    "name": line[35:].strip(),
                    "address": state["addresses"].get(line[:10].strip()),
                }
                for line in listed
            ]
        return result

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One `up` or `down` at a time."""
        self.layout.lock.parent.mkdir(parents=True, exist_ok=True)
        with self.layout.lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
