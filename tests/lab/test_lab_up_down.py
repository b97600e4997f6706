"""`lab up`, `down`, `status`: what they make, and that nothing stays behind, after a crash too."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from laptop import until

import orchestrator
from orchestrator.errors import NotFoundError, RefusedError, UsageError
from orchestrator.lab import Container, Lab, LabSpec
from orchestrator.lab.cgroups import leftovers
from orchestrator.lab.host_access import join_argv
from orchestrator.lab.layout import Layout
from orchestrator.lab.network import free_network, ip
from orchestrator.lab.processes import Process

pytestmark = pytest.mark.lab

MakeLab = Callable[..., Lab]
ONE = (Container(200),)


def remains(layout: Layout) -> list[object]:
    """What there still is of a lab on this machine."""
    mounts = Path("/proc/self/mountinfo").read_text()
    bridge = ip("link", "show", layout.bridge).returncode == 0
    return [
        *leftovers(layout.cgroup),
        *([layout.root] if layout.root.exists() else []),
        *([layout.bridge] if bridge else []),
        *(["mount"] if str(layout.root) in mounts else []),
    ]


@pytest.fixture(params=["lxc", "unshare"])
def fresh(request: pytest.FixtureRequest, make_lab: MakeLab) -> Lab:
    """A small lab that is down."""
    return make_lab(ONE, backend=request.param)


def test_status_of_a_lab_that_is_up(lab: Lab) -> None:
    status = lab.status()
    assert status["up"] is True
    assert status["port"] == lab.spec.port
    states = {ct["ct"]: ct["state"] for ct in status["containers"]}
    assert states == {200: "running", 201: "running", 202: "stopped"}


def test_the_host_is_reached_by_ssh_with_its_key_checked(lab: Lab) -> None:
    assert lab.ssh("hostname; id -u").stdout.split() == ["pve1", "0"]


def test_a_wrong_key_of_the_host_is_refused(lab: Lab, tmp_path: Path) -> None:
    other = tmp_path / "known_hosts"
    key = lab.layout.user_key.with_suffix(".pub").read_text()
    other.write_text(f"[127.0.0.1]:{lab.spec.port} {key}")
    argv = [part.replace(str(lab.layout.known_hosts), str(other)) for part in lab.ssh_argv("true")]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


def test_one_connection_can_be_cut_from_the_far_side(lab: Lab) -> None:
    def connect() -> subprocess.Popen[str]:
        argv = lab.ssh_argv("echo ready; cat")
        pipe = subprocess.PIPE
        client = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert client.stdout and client.stdout.readline() == "ready\n"
        return client

    with connect() as kept:
        before = set(lab.sessions())
        with connect() as cut:
            (session,) = set(lab.sessions()) - before
            os.kill(session, signal.SIGKILL)
            assert cut.wait(timeout=20) == 255
        assert kept.communicate("still here", timeout=20) == ("still here", "")


def test_the_inventory_reaches_the_lab(lab: Lab) -> None:
    inventory = yaml.safe_load(lab.inventory.read_text())
    host = inventory["hosts"]["lab"]
    assert (host["address"], host["port"], host["user"]) == ("127.0.0.1", lab.spec.port, "root")
    assert host["host_keys"] == "strict"
    assert all(Path(host[key]).is_absolute() for key in ("identity_file", "known_hosts"))
    assert [ct["ct"] for ct in inventory["containers"].values()] == [200, 201, 202]


def test_a_second_up_leaves_everything_as_it_is(fresh: Lab) -> None:
    before = fresh.up()
    assert fresh.up() == before
    assert fresh.down() is True


def test_nothing_remains_after_down_and_a_second_down_finds_nothing(fresh: Lab) -> None:
    fresh.up()
    fresh.host(["pct", "exec", "200", "--", "tmux", "new-session", "-d", "sleep", "4100"])
    assert fresh.down() is True
    assert remains(fresh.layout) == []
    assert fresh.down() is False
    assert not fresh.layout.lock.exists()
    with pytest.raises(NotFoundError, match="not up"):
        fresh.pct("list")


def test_down_ends_frozen_containers_and_open_sessions(fresh: Lab) -> None:
    fresh.up()
    with subprocess.Popen(fresh.ssh_argv("sleep 4101"), stdin=subprocess.DEVNULL) as client:
        until = time.monotonic() + 20
        while not fresh.sessions() and time.monotonic() < until:
            time.sleep(0.01)
        fresh.freeze(200)
        fresh.down()
        assert client.wait(timeout=20) == 255
    assert remains(fresh.layout) == []


def test_up_after_the_hosts_sshd_was_killed(fresh: Lab) -> None:
    fresh.up()
    sshd = fresh.sshd
    assert sshd is not None
    os.kill(sshd.pid, signal.SIGKILL)
    while sshd.alive:
        time.sleep(0.005)
    assert fresh.status()["up"] is False
    fresh.up()
    assert fresh.pct("status", 200) == "status: running\n"
    fresh.down()
    assert remains(fresh.layout) == []


def test_down_finds_everything_when_the_state_file_was_cut_off(fresh: Lab) -> None:
    fresh.up()
    fresh.layout.state.write_text('{"cgro')
    assert fresh.down() is True
    assert remains(fresh.layout) == []


def test_the_state_of_an_earlier_boot_names_no_process_of_this_one(make_lab: MakeLab) -> None:
    lab = make_lab(ONE)
    own = Process.of(os.getpid())
    assert own is not None
    lab.layout.root.mkdir(parents=True)
    state = {"boot_id": "another", "cgroups": ["/nosuch"], "sshd": own.as_dict()}
    lab.layout.state.write_text(json.dumps(state))
    assert lab.sshd is None
    assert lab.down() is True
    assert remains(lab.layout) == []


@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.3])
def test_up_killed_half_way_is_cleaned_by_the_next(make_lab: MakeLab, seconds: float) -> None:
    lab = make_lab(ONE)
    script = (
        "import sys, pathlib; from orchestrator.lab import *; print(1, flush=True);"
        "Lab(LabSpec(pathlib.Path(sys.argv[1]), int(sys.argv[2]), (Container(200),))).up()"
    )
    argv = [sys.executable, "-c", script, str(lab.layout.root), str(lab.spec.port)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(seconds)
        child.kill()
    lab.up()
    assert lab.pct("status", 200) == "status: running\n"
    lab.down()
    assert remains(lab.layout) == []


def test_what_a_killed_up_has_left_starts_nothing_in_the_next_lab(lab: Lab) -> None:
    def join(state_id: str) -> str:
        argv = [*join_argv(lab.layout, state_id, []), "echo", "started"]
        return subprocess.run(argv, capture_output=True, text=True).stdout

    assert join("of-the-one-before") == ""
    assert join(lab.state()["id"]) == "started\n"


def test_a_port_that_is_taken_names_its_holder_and_leaves_nothing(make_lab: MakeLab) -> None:
    lab = make_lab(ONE)
    with (
        socket.create_server(("127.0.0.1", lab.spec.port)),
        pytest.raises(
            RefusedError, match=f"taken by another program .*pid {os.getpid()}"
        ) as caught,
    ):
        lab.up()
    assert "--port" in caught.value.next_step
    assert remains(lab.layout) == []


def test_a_failed_start_leaves_nothing(make_lab: MakeLab) -> None:
    lab = make_lab((Container(200, workdir="/proc/nosuch"),))
    with pytest.raises(RefusedError, match="container 200 did not start"):
        lab.up()
    assert remains(lab.layout) == []


@pytest.mark.parametrize("lacking", ["sys_admin", "mknod"])
def test_a_root_that_may_not_do_all_of_it_is_told_so_and_leaves_nothing(
    make_lab: MakeLab, lacking: str
) -> None:
    lab = make_lab(ONE)
    command = ["lab", "up", "--root", lab.layout.root, "--port", lab.spec.port]
    argv = ["setpriv", f"--bounding-set=-{lacking}", f"--inh-caps=-{lacking}", sys.executable]
    argv += ["-m", "orchestrator.cli", *map(str, command), "--backend", "unshare"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    assert "Operation not permitted" in done.stderr and "next: " in done.stderr
    assert "Traceback" not in done.stderr
    assert remains(lab.layout) == []


def test_a_folder_that_is_no_labs_is_left_alone(make_lab: MakeLab) -> None:
    lab = make_lab(ONE)
    lab.layout.root.mkdir(parents=True)
    precious = lab.layout.root / "precious"
    precious.touch()
    with pytest.raises(UsageError, match="no lab of ours"):
        lab.up()
    assert precious.exists()
    precious.unlink()
    lab.layout.root.rmdir()


def test_a_container_starts_though_its_last_boots_network_is_not_down_yet(
    make_lab: MakeLab,
) -> None:
    """The kernel takes it down in its own time, and one machine's all in one queue."""
    lab = make_lab((Container(200),), backend="unshare")
    lab.up()
    links = ip("-o", "link", "show", "master", lab.layout.bridge).stdout
    (name,) = re.findall(r"^\d+: (\S+?)@", links, re.MULTILINE)
    lab.stop(200)
    until(lambda: ip("link", "show", name).returncode)
    assert ip("link", "add", name, "type", "veth").returncode == 0
    lab.start(200)
    assert "eth0" in lab.pct("exec", 200, "--", "ip", "link")


def test_two_labs_do_not_meet(lab: Lab, make_lab: MakeLab) -> None:
    other = make_lab(ONE)
    other.up()
    other.stop(200)
    assert other.pct("status", 200) == "status: stopped\n"
    assert lab.pct("status", 200) == "status: running\n"
    other.down()
    assert lab.pct("exec", 200, "--", "echo", "still here") == "still here\n"


ON_OVERLAY = """
set -e
mount -t tmpfs tmpfs {base}
mkdir {base}/lower {base}/up {base}/work {base}/over
mount -t overlay overlay -o lowerdir={base}/lower,upperdir={base}/up,workdir={base}/work {base}/over
export DFLASHCTL_LAB_ROOT={base}/over/lab
cli() {{ {python} -m orchestrator.cli lab "$@" >/dev/null; }}
cli up --port {port} --containers 200
nsenter -t $(cat {base}/over/lab/lab.json | sed -n 's/.*"pid": \\([0-9]*\\).*/\\1/p') -m \
    pct exec 200 -- sh -c 'echo works > /root/x; cat /root/x; test -e {checkout} || echo hidden'
cli down
grep -c {base}/over/lab /proc/self/mountinfo || true
ls {base}/over
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path below /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="dfl-", dir="/tmp"))
    yield folder
    folder.rmdir()


def test_a_folder_on_an_overlay_as_in_docker(make_lab: MakeLab, short: Path) -> None:
    script = ON_OVERLAY.format(
        base=short,
        port=make_lab(ONE).spec.port,
        python=sys.executable,
        checkout=Path(orchestrator.__file__).parents[1],
    )
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stdout) == (0, "works\nhidden\n0\n"), done.stderr


@pytest.mark.slow
def test_fifty_containers(make_lab: MakeLab) -> None:
    lab = make_lab(tuple(Container(300 + n) for n in range(50)), network=False)
    lab.up()
    assert [ct["state"] for ct in lab.status()["containers"]] == ["running"] * 50
    lab.down()
    assert remains(lab.layout) == []


def test_a_path_too_long_for_lxc_is_refused() -> None:
    with pytest.raises(UsageError, match="longer than 70"):
        LabSpec(root=Path("/" + "x" * 80))


def test_the_network_avoids_those_that_are_routed() -> None:
    assert free_network(7, "default via 10.0.0.1 dev eth0\n") == "10.213.7"
    assert free_network(7, "10.213.7.0/24 dev x\n10.213.8.1 dev y\n") == "10.213.9"
    assert free_network(7, "10.0.0.0/8 dev vpn\n") is None
