"""Makes the folders and files of a lab, before anything runs."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import orchestrator
from orchestrator.errors import RefusedError
from orchestrator.lab import cgroups, overlay, render
from orchestrator.lab.layout import PROGRAMS, Layout
from orchestrator.lab.requirements import CLEAN_ENV, run, which
from orchestrator.lab.spec import Backend, Container, LabSpec

SHARED_STATE = Path("/var/lib/dflashctl")
NEVER_HIDDEN = tuple(Path(p) for p in ("/", "/opt", "/srv", "/var", "/var/lib", "/tmp", "/run"))


def private_paths(layout: Layout, spec: LabSpec) -> list[Path]:
    """What neither host nor containers may see of this machine, besides /root and /home.

    The checkout, the controller's virtual environment and the lab itself: a test that only works
    because a container can read them would prove nothing.
    """
    checkout = Path(orchestrator.__file__).parents[1]
    paths = [checkout, layout.root, SHARED_STATE, spec.shared_python]
    if sys.prefix != sys.base_prefix:
        paths.append(Path(sys.prefix))
    return overlay.outermost(p for p in paths if not _is_system(p.resolve()))


def _is_system(path: Path) -> bool:
    """Hiding it would take the machine's own programs away."""
    return path in NEVER_HIDDEN or path.is_relative_to("/usr") or Path("/usr").is_relative_to(path)


def make_keys(layout: Layout, port: int) -> None:
    layout.ssh.mkdir(mode=0o700)
    for key in (layout.host_key, layout.user_key):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "dflashctl-lab", "-f", str(key))
    public = layout.host_key.with_suffix(".pub").read_text()
    layout.known_hosts.write_text(f"[127.0.0.1]:{port} {public}")
    layout.authorized_keys.write_text(layout.user_key.with_suffix(".pub").read_text())
    layout.sshd_config.write_text(render.sshd_config(layout, port, sshd_version()))


def sshd_version() -> tuple[int, int]:
    """OpenSSH's; old ones know no -V but print the version with the usage."""
    done = subprocess.run(
        [which("sshd") or "sshd", "-V"], env=CLEAN_ENV, capture_output=True, text=True, check=False
    )
    match = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stdout + done.stderr)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def make_host(layout: Layout, spec: LabSpec, backend: Backend, groups: cgroups.Hierarchies) -> None:
    """The host's upper layer: pct, /etc/pve, an empty /root, and root's account."""
    for name in ("root", "lower", "python", "tmp"):
        (layout.host / name).mkdir(parents=True)
    layout.host_upper.mkdir(parents=True)
    layout.host_upper.with_name("work").mkdir()
    (layout.host / "tmp").chmod(0o1777)
    layout.driver.write_text("".join(f"{path}\n" for path in spec.driver or ()))
    layout.faults.mkdir()
    folder = layout.pve / "nodes" / spec.node / "lxc"
    folder.mkdir(parents=True)
    (layout.pve / "local").symlink_to(f"nodes/{spec.node}")
    (layout.pve / "lxc").symlink_to("local/lxc")

    upper = layout.host_upper
    for path in (Path("/root"), Path("/home"), Path("/etc/pve")):
        overlay.empty(upper, path)
    for path in private_paths(layout, spec):
        if path == SHARED_STATE or layout.root.is_relative_to(path):
            overlay.empty(upper, path)
        else:
            overlay.hide(upper, path)
    overlay.folder(upper, layout.root)
    (upper / ".machine").mkdir()
    for program in sorted(PROGRAMS.iterdir()):
        if program.suffix in (".pl", ""):
            overlay.write(upper, Path(render.PROGRAMS_AT) / program.name, program.read_text())
    overlay.write(upper, Path("/usr/sbin/pct"), (PROGRAMS / "pct").read_text(), 0o755)
    if backend == "lxc":
        attach = (PROGRAMS / "lxc-attach").read_text()
        overlay.write(upper, Path("/usr/local/bin/lxc-attach"), attach, 0o755)
    settings = render.host_settings(layout, spec, backend, groups)
    overlay.write(upper, Path("/etc/dflashctl-lab.conf"), settings)
    if groups.version == 1:
        # Without this LXC makes /lxc/N in the root of every other hierarchy, shared by all labs.
        used = f"lxc.cgroup.use = {','.join(cgroups.USED)}\n"
        overlay.write(upper, Path("/etc/lxc/lxc.conf"), used)
    # An account locked by "!" in the machine's shadow file is refused by sshd even with a key.
    others = [
        line
        for line in Path("/etc/passwd").read_text().splitlines()
        if not line.startswith("root:")
    ]
    accounts = "\n".join(["root:x:0:0:root:/root:/bin/bash", *others, ""])
    overlay.write(upper, Path("/etc/passwd"), accounts)
    overlay.write(upper, Path("/etc/shadow"), "root:*:19000:0:99999:7:::\n", 0o600)


def make_container(
    layout: Layout,
    spec: LabSpec,
    ct: Container,
    *,
    ip: str | None,
    groups: cgroups.Hierarchies,
    limits: bool,
    private: list[Path],
) -> None:
    """Upper layer and configuration of one container."""
    upper = layout.upper(ct.vmid)
    for path in (upper, layout.work(ct.vmid), layout.disk(ct.vmid)):
        path.mkdir(parents=True)
    if ct.python == "shared":
        overlay.empty(upper, Path(render.SHARED_MOUNT))
    for path in (Path("/root"), Path("/home")):
        overlay.empty(upper, path)
    for path in private:
        overlay.hide(upper, path)
    for name in ("ct-init", "net-up"):
        target = Path(render.PROGRAMS_AT) / name
        overlay.write(upper, target, (PROGRAMS / name).read_text(), 0o755)
    overlay.write(upper, Path("/etc/hostname"), f"{ct.name}\n")
    if not ct.tmux:
        for folder in ("/usr/bin", "/usr/local/bin"):
            overlay.hide(upper, Path(folder) / "tmux")
    if ct.python == "own":
        make_own_python(upper)
    elif ct.python == "minimal":
        for path in beyond_minimal():
            overlay.hide(upper, path)
    layout.lxc_base(ct.vmid).parent.mkdir(parents=True)
    text = render.lxc_config(
        layout,
        spec,
        ct,
        ip=ip,
        memory=cgroups.memory_keys(groups, ct.memory if limits else 0),
        relative_cgroup=groups.version == 1,
    )
    layout.lxc_base(ct.vmid).write_text(text)
    boot = render.boot_spec(layout, spec, ct, ip=ip, hierarchies=groups.names)
    (layout.ct(ct.vmid) / "boot").write_text(boot)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    conf = render.pve_config(ct, ip=ip, arch=arch, memory=memory, devices=spec.devices)
    layout.pve_conf(ct.vmid).write_text(conf)


def system_python() -> Path:
    """The machine's own interpreter, as a container sees it."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if Path(path).exists():
            return Path(path)
    raise RefusedError(
        "the lab's containers need a python3 of the system; missing: python3",
        next_step="apt install python3",
    )


def make_own_python(upper: Path) -> None:
    """A virtual environment without packages: a link and a file are all that one is."""
    home = system_python()
    binaries = overlay.folder(upper, Path(render.OWN_PYTHON) / "bin")
    for name in ("python", "python3"):
        (binaries / name).symlink_to(home)
    # Its library is beside the program itself, not beside a link to it.
    where = home.resolve().parent
    overlay.write(upper, Path(render.OWN_PYTHON) / "pyvenv.cfg", f"home = {where}\n")


def beyond_minimal() -> list[Path]:
    """Parts of the standard library that Debian's python3-minimal does not have."""
    version = system_python().resolve().name  # python3.11
    library = Path("/usr/lib") / version
    listed = [Path(f"/var/lib/dpkg/info/lib{version}-minimal{arch}.list") for arch in _arch()]
    for path in listed:
        if path.exists():
            kept = {Path(line) for line in path.read_text().splitlines()}
            return [p for p in sorted(library.iterdir()) if p not in kept]
    return [library / "json"]


def _arch() -> list[str]:
    return ["", *(f":{arch}" for arch in ("amd64", "arm64"))]
