"""The lab's configuration files, as text; no lab is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.lab import Container, LabSpec, files
from orchestrator.lab.cgroups import find
from orchestrator.lab.layout import Layout
from orchestrator.lab.mounts import on_overlay
from orchestrator.lab.overlay import outermost
from orchestrator.lab.render import address, inventory, lxc_config, pve_config, sshd_config
from orchestrator.lab.spec import nvidia_nodes

ROOT = Path("/var/lib/dflashctl/lab")
LAYOUT = Layout(ROOT)
SPEC = LabSpec(root=ROOT)


def test_newer_sshd_must_not_shut_out_the_loopback_address() -> None:
    assert "PerSourcePenaltyExemptList 127.0.0.1" in sshd_config(LAYOUT, 20022, (10, 0))
    assert "PerSource" not in sshd_config(LAYOUT, 20022, (9, 2))


def test_only_the_key_of_the_lab_opens_it() -> None:
    lines = sshd_config(LAYOUT, 20022, (9, 2)).splitlines()
    assert "ListenAddress 127.0.0.1" in lines
    assert "PasswordAuthentication no" in lines
    assert f"AuthorizedKeysFile {ROOT}/ssh/authorized_keys" in lines


def test_the_configuration_proxmox_would_write() -> None:
    ct = Container(200, memory=2 << 30)
    assert pve_config(ct, ip="10.213.7.10", arch="amd64", memory=8 << 30) == (
        "arch: amd64\n"
        "cores: 2\n"
        "hostname: ct200\n"
        "memory: 2048\n"
        "net0: name=eth0,bridge=vmbr0,ip=10.213.7.10/24,type=veth\n"
        "ostype: debian\n"
        "rootfs: local-lvm:vm-200-disk-0,size=8G\n"
        "swap: 0\n"
    )
    assert "memory: 8192\n" in pve_config(Container(201), ip=None, arch="amd64", memory=8 << 30)


def lxc_lines(ct: Container, *, ip: str | None, relative: bool) -> list[str]:
    text = lxc_config(LAYOUT, SPEC, ct, ip=ip, memory={}, relative_cgroup=relative)
    return text.splitlines()


def test_a_container_for_lxc() -> None:
    lines = lxc_lines(Container(200, workdir_size=4096), ip="10.213.7.10", relative=True)
    assert f"lxc.rootfs.path = overlay:{ROOT}/host/lower:{ROOT}/layers/200/up" in lines
    assert "lxc.cgroup.dir.container = lxc/200" in lines
    assert f"lxc.net.0.link = {LAYOUT.bridge}" in lines
    assert any(line.startswith("lxc.mount.entry = tmpfs workspace tmpfs") for line in lines)


def test_without_a_network_a_container_has_only_lo() -> None:
    assert "lxc.net.0.type = empty" in lxc_lines(Container(200), ip=None, relative=False)


def test_the_inventory_names_each_containers_interpreter() -> None:
    pythons = {name: ct["python"] for name, ct in inventory(LAYOUT, SPEC)["containers"].items()}
    assert pythons == {
        "lab-200": "/opt/dflash/python/bin/python",
        "lab-201": "/srv/python/bin/python",
        "lab-202": "/usr/bin/python3",
    }


def test_the_machines_gpus_are_in_the_inventory_by_index(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia-caps").mkdir()
    devices = nvidia_nodes(tmp_path)
    assert [d.name for d in devices] == ["nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl"]
    spec = LabSpec(root=ROOT, devices=devices)
    assert inventory(LAYOUT, spec)["containers"]["lab-200"]["gpus"] == [0, 1]
    assert inventory(LAYOUT, LabSpec(root=ROOT, devices=()))["containers"]["lab-200"]["gpus"] == []


def test_addresses_count_from_10() -> None:
    assert address("10.213.7", 0) == "10.213.7.10"


def test_names_outside_the_folder_fit_the_kernels_limit() -> None:
    assert len(LAYOUT.bridge) <= 15
    assert LAYOUT.bridge != Layout(Path("/elsewhere")).bridge


V1 = """9:name=systemd:/
8:pids:/
6:freezer:/
4:memory:/some/session
1:cpu:/
0::/
"""


def test_on_version_1_groups_lie_below_the_callers_own(tmp_path: Path) -> None:
    for name in ("pids", "freezer", "memory", "cpu", "unified"):
        (tmp_path / name).mkdir()
    found = find("lab", V1, tmp_path)
    assert found.version == 1
    assert found.groups == (
        tmp_path / "pids/lab",
        tmp_path / "freezer/lab",
        tmp_path / "memory/some/session/lab",
        tmp_path / "unified/lab",
    )


def test_on_version_2_the_group_lies_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    found = find("lab", "0::/user.slice\n", tmp_path)
    assert (found.version, found.groups) == (2, (tmp_path / "lab",))
    assert found.of_host == (tmp_path / "lab/host",)


def test_an_overlay_below_the_folder_is_seen_and_one_beside_it_is_not() -> None:
    mountinfo = (
        "20 1 8:1 / / rw - ext4 /dev/sda rw\n"
        "21 20 0:3 / /var/lib/docker/x rw - overlay overlay rw\n"
        "22 20 0:4 / /data rw - overlay overlay rw\n"
    )
    assert not on_overlay(Path("/var/lib/dflashctl/lab"), mountinfo)
    assert on_overlay(Path("/data/lab"), mountinfo)
    assert not on_overlay(Path("/database"), mountinfo)
    spaced = mountinfo.replace("/data", r"/my\040data")
    assert on_overlay(Path("/my data/lab"), spaced)


def test_what_lies_below_a_hidden_folder_need_not_be_hidden(tmp_path: Path) -> None:
    inner, other = tmp_path / "a" / "b", tmp_path / "ab"
    assert outermost([inner, tmp_path / "a", other]) == [tmp_path / "a", other]


@pytest.mark.skipif(os.geteuid() != 0, reason="layers have the owners of what lies below")
def test_an_own_pythons_library_is_beside_the_program_where_the_systems_is_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "elsewhere" / "python3.12"
    link = tmp_path / "bin" / "python3"
    link.parent.mkdir()
    link.symlink_to(program)
    monkeypatch.setattr(files, "system_python", lambda: link)
    files.make_own_python(tmp_path)
    own = tmp_path / "srv" / "python"
    assert (own / "bin" / "python").readlink() == link
    assert (own / "pyvenv.cfg").read_text() == f"home = {program.parent}\n"
