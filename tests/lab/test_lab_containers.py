"""What a lab's containers are, and what they cannot see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import orchestrator
from orchestrator.lab import Container, Lab
from orchestrator.lab.requirements import missing

pytestmark = pytest.mark.lab

MIB = 1024 * 1024
MakeLab = Callable[..., Lab]
KMSG = Path("/dev/kmsg")
"""A device that no container has of itself."""


def inside(lab: Lab, vmid: int, script: str) -> str:
    return lab.pct("exec", vmid, "--", "sh", "-c", script)


@pytest.fixture(scope="module", params=["lxc", "unshare"])
def odd_lab(
    request: pytest.FixtureRequest, make_lab: MakeLab, tmp_path_factory: pytest.TempPathFactory
) -> Lab:
    """210 is small; 211 has python3-minimal; 212 has no tmux; 213 the shared interpreter."""
    if packages := missing(request.param):
        pytest.skip(f"the {request.param} backend needs {', '.join(packages)}")
    shared = tmp_path_factory.mktemp("shared")
    (shared / "bin").mkdir()
    (shared / "bin" / "python").symlink_to("/usr/bin/python3")
    (shared / "pyvenv.cfg").write_text("home = /usr/bin\n")
    lab = make_lab(
        (
            Container(210, memory=64 * MIB, shm=2 * MIB, workdir_size=1 * MIB, hostname="small"),
            Container(211, python="minimal"),
            Container(212, tmux=False, workdir="/data/train"),
            Container(213, python="shared"),
        ),
        backend=request.param,
        shared_python=shared,
        devices=(KMSG,),
    )
    lab.up()
    return lab


# --- masks ---------------------------------------------------------------------------------------


def private() -> list[Path]:
    checkout = Path(orchestrator.__file__).parents[1]
    prefix = [Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
    return [checkout, *prefix, Path("/var/lib/dflashctl")]


def test_the_checkout_the_controllers_python_and_the_lab_are_not_there(each_lab: Lab) -> None:
    for path in [*private(), each_lab.layout.root]:
        for vmid in (200, 201):
            assert inside(each_lab, vmid, f"test -e {path} || echo hidden") == "hidden\n"


def test_root_and_home_are_the_containers_own(odd_lab: Lab) -> None:
    assert inside(odd_lab, 212, "ls -A /root /home") == "/home:\n\n/root:\n"
    inside(odd_lab, 210, "echo own > /root/file")
    assert inside(odd_lab, 212, "ls -A /root") == ""
    inside(odd_lab, 210, "rm /root/file")
    assert inside(odd_lab, 212, "stat -c %a /root") == "700\n"


def test_the_host_has_a_root_of_its_own_too(odd_lab: Lab) -> None:
    script = "pwd; ls -A ~; test -e /var/lib/dflashctl/python && echo seen"
    assert odd_lab.ssh(script).stdout == "/root\n"
    checkout = Path(orchestrator.__file__).parents[1]
    assert odd_lab.host(["test", "-e", str(checkout)]).returncode == 1


def test_what_a_container_writes_stays_in_it(each_lab: Lab) -> None:
    inside(each_lab, 200, "echo x > /usr/local/marker; mv /etc/services /etc/moved")
    assert not Path("/usr/local/marker").exists()
    assert Path("/etc/services").exists()
    assert inside(each_lab, 201, "test -e /usr/local/marker || echo absent") == "absent\n"
    inside(each_lab, 200, "rm /usr/local/marker; mv /etc/moved /etc/services")


# --- interpreters and programs -------------------------------------------------------------------


def test_201_has_an_interpreter_of_its_own(each_lab: Lab) -> None:
    python = "/srv/python/bin/python"
    assert inside(each_lab, 201, f"{python} -c 'import sys; print(sys.prefix)'") == "/srv/python\n"
    assert inside(each_lab, 200, f"test -e {python} || echo absent") == "absent\n"


def test_every_container_has_git_tmux_and_python3(each_lab: Lab) -> None:
    for vmid in (200, 201):
        inside(each_lab, vmid, "command -v git && command -v tmux && python3 -c 'import json'")


def test_the_shared_interpreter_is_read_only(odd_lab: Lab) -> None:
    script = "import sys; print(sys.prefix)"
    assert inside(odd_lab, 213, f"/opt/dflash/python/bin/python -c '{script}'") == (
        "/opt/dflash/python\n"
    )
    done = odd_lab.host(["pct", "exec", "213", "--", "touch", "/opt/dflash/python/x"])
    assert "Read-only file system" in done.stderr


def test_python3_minimal_starts_but_has_no_json(odd_lab: Lab) -> None:
    assert inside(odd_lab, 211, "python3 -c 'import os, sys; print(1)'") == "1\n"
    done = odd_lab.host(["pct", "exec", "211", "--", "python3", "-c", "import json"])
    assert "No module named 'json'" in done.stderr


def test_a_container_without_tmux(odd_lab: Lab) -> None:
    assert inside(odd_lab, 212, "command -v tmux || echo none") == "none\n"


# --- limits --------------------------------------------------------------------------------------


def test_the_work_folder_is_where_and_as_big_as_asked(odd_lab: Lab) -> None:
    done = odd_lab.host(
        ["pct", "exec", "210", "--", "sh", "-c", "head -c 2M /dev/zero > /workspace/big"]
    )
    assert "No space left on device" in done.stderr
    size = inside(odd_lab, 210, "rm /workspace/big; df -B1 --output=size /workspace | tail -1")
    assert int(size) == 1 * MIB
    assert inside(odd_lab, 212, "test -d /data/train && echo yes") == "yes\n"


def test_a_device_is_passed_through_as_proxmox_does(odd_lab: Lab) -> None:
    number = f"{os.major(KMSG.stat().st_rdev):x}:{os.minor(KMSG.stat().st_rdev):x}"
    assert inside(odd_lab, 213, f"stat -c %t:%T {KMSG}") == f"{number}\n"
    assert f"dev0: {KMSG}\n" in odd_lab.pct("config", 213)


def test_shared_memory_is_as_big_as_asked(odd_lab: Lab) -> None:
    size = inside(odd_lab, 210, "df -B1 --output=size /dev/shm | tail -1")
    assert int(size) == 2 * MIB


def test_the_memory_limit_kills_and_is_counted(odd_lab: Lab) -> None:
    if not odd_lab.state()["memory_limits"]:
        pytest.skip("this machine has no memory controller")
    script = "x = bytearray(200 * 2**20)"
    done = odd_lab.host(["pct", "exec", "210", "--", "python3", "-c", script])
    assert done.returncode == 128 + 9
    seen = "/sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events"
    counters = inside(odd_lab, 210, f"cat {seen} 2>/dev/null; true")
    assert re.search(r"^oom_kill [1-9]", counters, re.MULTILINE)


# --- identity and network ------------------------------------------------------------------------


def test_hostnames_and_boot_ids_are_their_own(each_lab: Lab) -> None:
    boot_id = "cat /proc/sys/kernel/random/boot_id"
    ids = {inside(each_lab, vmid, boot_id) for vmid in (200, 201)}
    assert len({*ids, Path("/proc/sys/kernel/random/boot_id").read_text()}) == 3
    assert inside(each_lab, 201, "hostname") == "ct201\n"


def test_processes_are_their_own(each_lab: Lab) -> None:
    init = "/usr/lib/dflashctl-lab/ct-init"
    assert init in inside(each_lab, 200, "tr '\\0' ' ' < /proc/1/cmdline")


SERVE = """
import socket
server = socket.create_server(('', 9999))
print('ready', flush=True)
end, peer = server.accept()
end.sendall(peer[0].encode())
"""
ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], 9999)).recv(99).decode())"


@pytest.mark.parametrize(("client", "server"), [(201, 200), (200, 200)])
def test_containers_reach_one_another_and_themselves(
    each_lab: Lab, client: int, server: int
) -> None:
    addresses = {ct["ct"]: ct["address"] for ct in each_lab.status()["containers"]}
    target = addresses[server] if client != server else "127.0.0.1"
    argv = each_lab.host_argv(["pct", "exec", str(server), "--", "python3", "-c", SERVE])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        peer = each_lab.pct("exec", client, "--", "python3", "-c", ASK, target)
    assert peer.strip() == (addresses[client] if client != server else "127.0.0.1")


def test_there_is_no_way_out(each_lab: Lab) -> None:
    assert "default" not in inside(each_lab, 200, "ip route")
