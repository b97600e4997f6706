"""The lab's configuration files as text. Pure: nothing here touches the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.lab.cgroups import Hierarchies
from orchestrator.lab.layout import Layout
from orchestrator.lab.spec import MIB, Container, LabSpec

PROGRAMS_AT = "/usr/lib/dflashctl-lab"
"""Where the lab's own programs lie, on the host and in the containers."""
INIT = f"{PROGRAMS_AT}/ct-init"
NET_UP = f"{PROGRAMS_AT}/net-up"
SHARED_MOUNT = "/opt/dflash/python"
OWN_PYTHON = "/srv/python"


def sshd_config(layout: Layout, port: int, version: tuple[int, int]) -> str:
    """sshd as Proxmox has it (its own limits included), with keys and log of the lab.

    MaxSessions and MaxStartups stay at OpenSSH's defaults (10 and 10:30:100): the controller must
    live with them. ``version``: OpenSSH's; since 9.8 it shuts out for a while the address of a
    client whose session crashed, and here all clients share one address.
    """
    exempt = ["PerSourcePenaltyExemptList 127.0.0.1"] if version >= (9, 8) else []
    return "\n".join(
        [
            *exempt,
            f"Port {port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {layout.host_key}",
            f"AuthorizedKeysFile {layout.authorized_keys}",
            "PidFile none",
            "UsePAM no",
            "StrictModes no",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UseDNS no",
            "PrintMotd no",
            "PrintLastLog no",
            "AcceptEnv LANG LC_*",
            "AllowTcpForwarding yes",
            "Subsystem sftp internal-sftp",
            "",
        ]
    )


def address(network: str, index: int) -> str:
    """``network`` is a /24 prefix such as 10.213.7; the bridge has .1, containers from .10 on."""
    return f"{network}.{10 + index}"


def pve_config(
    ct: Container, *, ip: str | None, arch: str, memory: int, devices: Sequence[Path] = ()
) -> str:
    """/etc/pve/lxc/N.conf, with the keys that Proxmox writes for such a container.

    ``arch``: the machine's as Debian names it; ``memory``: the machine's in bytes, which stands
    there when the container has no limit of its own.
    """
    values: dict[str, Any] = {
        "arch": arch,
        "cores": 2,
        "hostname": ct.name,
        "memory": (ct.memory or memory) // MIB,
        "ostype": "debian",
        "rootfs": f"local-lvm:vm-{ct.vmid}-disk-0,size=8G",
        "swap": 0,
    }
    values |= {f"dev{number}": str(device) for number, device in enumerate(devices)}
    if ip:
        values["net0"] = f"name=eth0,bridge=vmbr0,ip={ip}/24,type=veth"
    return "".join(f"{key}: {value}\n" for key, value in sorted(values.items()))


def mounts(layout: Layout, spec: LabSpec, ct: Container) -> list[tuple[str, str, str, str]]:
    """(source, target without leading /, type, options) in the order of mounting."""
    result = [
        ("tmpfs", "tmp", "tmpfs", "rw,nosuid,nodev,mode=1777,create=dir"),
        ("tmpfs", "run", "tmpfs", "rw,nosuid,nodev,mode=755,size=64m,create=dir"),
        ("tmpfs", "dev/shm", "tmpfs", f"rw,nosuid,nodev,mode=1777,size={ct.shm},create=dir"),
    ]
    work = ct.workdir.lstrip("/")
    if ct.workdir_size:
        options = f"rw,nosuid,nodev,mode=755,size={ct.workdir_size},create=dir"
        result.append(("tmpfs", work, "tmpfs", options))
    else:
        result.append((str(layout.disk(ct.vmid)), work, "none", "bind,create=dir"))
    if ct.python == "shared" and spec.shared_python.is_dir():
        result.append((str(layout.python), SHARED_MOUNT.lstrip("/"), "none", "bind,ro,create=dir"))
    result += [(str(d), str(d).lstrip("/"), "none", "bind,create=file") for d in spec.devices]
    for path in spec.driver or ():
        create = "dir" if path.is_dir() else "file"
        result.append((str(path), str(path).lstrip("/"), "none", f"bind,ro,create={create}"))
    return [
        (_fstab(source), _fstab(target), kind, options) for source, target, kind, options in result
    ]


def _fstab(name: str) -> str:
    """A file's name as a field of fstab, which LXC reads, and ``ct-start`` likewise."""
    return name.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")


def lxc_config(
    layout: Layout,
    spec: LabSpec,
    ct: Container,
    *,
    ip: str | None,
    memory: Mapping[str, str],
    relative_cgroup: bool,
) -> str:
    """One container for LXC.

    ``memory``: the memory limit as LXC keys (version 1 or 2), empty where there is no such
    controller. ``relative_cgroup``: on version 1 the container's cgroup lies below that of
    ``lxc-start``; on version 2 no group may hold both processes and children, so the path counts
    from the root there.
    """
    lines = [
        f"lxc.uts.name = {ct.name}",
        f"lxc.rootfs.path = overlay:{layout.lower}:{layout.upper(ct.vmid)}",
        "lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed:force",
        # Without a maximum LXC mounts no devpts of its own, and then tmux has no terminals.
        "lxc.pty.max = 1024",
        "lxc.tty.max = 0",
        f"lxc.cgroup.relative = {int(relative_cgroup)}",
        f"lxc.cgroup.dir.container = lxc/{ct.vmid}",
        "lxc.cgroup.dir.container.inner = ns",
        f"lxc.cgroup.dir.monitor = lxc.monitor/{ct.vmid}",
        f"lxc.init.cmd = {INIT}",
        f"lxc.hook.start = {NET_UP}",
        "lxc.signal.halt = SIGTERM",
        "lxc.apparmor.profile = unconfined",
        # Proxmox drops these too; the device list of cgroups is left alone.
        "lxc.cap.drop = mac_admin mac_override sys_time sys_module sys_rawio",
    ]
    lines += [f"{key} = {value}" for key, value in memory.items()]
    lines += [
        f"lxc.mount.entry = {source} {target} {kind} {options} 0 0"
        for source, target, kind, options in mounts(layout, spec, ct)
    ]
    if ip:
        lines += [
            "lxc.net.0.type = veth",
            f"lxc.net.0.link = {layout.bridge}",
            "lxc.net.0.name = eth0",
            f"lxc.net.0.ipv4.address = {ip}/24",
            "lxc.net.0.flags = up",
        ]
    else:
        lines.append("lxc.net.0.type = empty")
    return "\n".join([*lines, ""])


def boot_spec(
    layout: Layout, spec: LabSpec, ct: Container, *, ip: str | None, hierarchies: Sequence[str]
) -> str:
    """The same container for the unshare backend: one ``key value…`` a line."""
    lines = [
        f"hostname {ct.name}",
        f"lower {layout.lower}",
        f"upper {layout.upper(ct.vmid)}",
        f"work {layout.work(ct.vmid)}",
        f"root {layout.ct(ct.vmid) / 'root'}",
        f"memory {ct.memory}",
        f"hierarchies {' '.join(hierarchies)}",
    ]
    lines += [f"mount {' '.join(entry)}" for entry in mounts(layout, spec, ct)]
    if ip:
        lines += [f"bridge {layout.bridge}", f"address {ip}/24"]
    return "\n".join([*lines, ""])


def host_settings(layout: Layout, spec: LabSpec, backend: str, groups: Hierarchies) -> str:
    """/etc/dflashctl-lab.conf of the host: how ``pct`` finds the lab."""
    lines = [f"root {layout.root}", f"backend {backend}", f"node {spec.node}"]
    lines += [f"group {path}" for path in groups.seen_by_host]
    return "\n".join([*lines, ""])


def inventory(layout: Layout, spec: LabSpec) -> dict[str, Any]:
    """The controller's inventory of this lab (a mapping for YAML)."""
    return {
        "hosts": {
            "lab": {
                "address": "127.0.0.1",
                "port": spec.port,
                "user": "root",
                "identity_file": str(layout.user_key),
                "known_hosts": str(layout.known_hosts),
                "host_keys": "strict",
            }
        },
        "containers": {
            f"lab-{ct.vmid}": {
                "host": "lab",
                "ct": ct.vmid,
                "workdir": ct.workdir,
                "python": python_path(ct),
                "gpus": spec.gpus,
                "groups": ["lab"],
            }
            for ct in spec.containers
        },
    }


def python_path(ct: Container) -> str:
    """The interpreter that the inventory names for this container."""
    if ct.python == "shared":
        return f"{SHARED_MOUNT}/bin/python"
    if ct.python == "own":
        return f"{OWN_PYTHON}/bin/python"
    return "/usr/bin/python3"
