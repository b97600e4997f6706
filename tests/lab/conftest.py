"""The `lab` fixture: a loopback Proxmox host of the test session's own."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from laptop import Cli, free_port

from orchestrator.lab import Container, Lab, LabSpec
from orchestrator.lab.cgroups import members
from orchestrator.lab.processes import Process
from orchestrator.lab.proxy import Proxy
from orchestrator.lab.requirements import missing, reason_to_skip
from orchestrator.lab.spec import DEFAULT_CONTAINERS

MIB = 1024 * 1024
MakeLab = Callable[..., Lab]


def own_start() -> int:
    own = Process.of(os.getpid())
    assert own is not None
    return own.start


def remove_orphans(base: Path) -> None:
    """Labs of test sessions that were killed: the folder names the session's process. One session
    at a time: those that start together find the same orphans."""
    with (base / "dfl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for folder in base.glob("dfl-*-*"):
            _, pid, start = folder.name.split("-")
            if not Process(int(pid), int(start)).alive:
                for root in folder.iterdir():
                    if root.suffix != ".lock":
                        Lab(LabSpec(root=root)).down()
                shutil.rmtree(folder)


@pytest.fixture(scope="session")
def make_lab() -> Iterator[MakeLab]:
    """``make_lab(containers, **LabSpec fields) -> Lab``, not yet up.

    Each has a folder and a port of its own and is taken down at the end. They lie below
    $DFLASHCTL_LAB_ROOT (default /var/tmp: on disk, and a short path) and never touch the user's
    own lab or inventory.
    """
    if reason := reason_to_skip():
        pytest.skip(reason)
    base = Path(os.environ.get("DFLASHCTL_LAB_ROOT", "/var/tmp"))
    base.mkdir(parents=True, exist_ok=True)
    remove_orphans(base)
    folder = base / f"dfl-{os.getpid()}-{own_start()}"
    folder.mkdir()
    numbers = itertools.count()
    labs: list[Lab] = []

    def make(containers: tuple[Container, ...] = DEFAULT_CONTAINERS, **options: object) -> Lab:
        spec = LabSpec(
            root=folder / str(next(numbers)),
            port=free_port(),
            containers=containers,
            **options,  # type: ignore[arg-type]
        )
        labs.append(Lab(spec))
        return labs[-1]

    yield make
    for lab in labs:
        lab.down()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def lab(make_lab: MakeLab) -> Lab:
    """Containers 200 and 201 running, 202 stopped. Tests leave it as they find it."""
    lab = make_lab()
    lab.up()
    return lab


@pytest.fixture(scope="session", params=["lxc", "unshare"])
def each_lab(request: pytest.FixtureRequest, make_lab: MakeLab, lab: Lab) -> Lab:
    """The same lab with either backend: what holds of one must hold of the other."""
    if packages := missing(request.param):
        pytest.skip(f"the {request.param} backend needs {', '.join(packages)}")
    if lab.state()["backend"] == request.param:
        return lab
    other = make_lab(backend=request.param)
    other.up()
    return other


def is_run_or_agent(pid: int) -> tuple[bool, bool]:
    process = Path("/proc", str(pid))
    try:
        run = b"DFLASH_RUN_" in (process / "environ").read_bytes()
        return run, b"\0-I\0-S\0-c\0" in (process / "cmdline").read_bytes()
    except OSError:
        return False, False


def left_running(lab: Lab) -> bool:
    """Whether a run lives in it, or an agent that may yet start one. To ask `ps` takes 0.5 s after
    each test, and most leave nothing."""
    one = lab.state()["cgroups"][:1]
    for _ in range(50):
        found = [is_run_or_agent(pid) for pid in members(map(Path, one))]
        if any(run for run, _ in found):
            return True
        if not any(agent for _, agent in found):
            return False
        time.sleep(0.02)  # the last call's own agents are about to end
    return True


@pytest.fixture
def cli(lab: Lab, tmp_path: Path) -> Cli:
    return Cli.at_home(tmp_path / "home", lab.inventory)


@pytest.fixture(scope="session")
def ill(make_lab: MakeLab) -> Lab:
    """Container 300 has little of everything, 301 no usable Python, 302 torch; 303 is sound; in 304
    no test starts a run."""
    lab = make_lab(
        containers=(
            Container(300, memory=3072 * MIB, shm=64 * MIB, workdir_size=1300 * MIB),
            Container(301, python="minimal"),
            Container(302, python="shared"),
            Container(303),
            Container(304),
        )
    )
    lab.up()
    return lab


@pytest.fixture
def ill_cli(ill: Lab, tmp_path: Path) -> Iterator[Cli]:
    """What a test leaves running or full is ended and emptied."""
    cli = Cli.at_home(tmp_path / "home", ill.inventory)
    yield cli
    ill.pct("exec", 300, "--", "sh", "-c", "rm -f /workspace/fill /dev/shm/fill")
    if left_running(ill):
        cli.end_runs(but={301})


@pytest.fixture
def proxied(lab: Lab, cli: Cli, tmp_path: Path) -> Iterator[Proxy]:
    """A proxy between ``cli`` and the lab's sshd; the host's key is checked as ever."""
    known = yaml.safe_load(lab.inventory.read_text())
    config = tmp_path / "ssh_config"
    config.write_text(f"HostKeyAlias [127.0.0.1]:{lab.spec.port}\n")
    with Proxy(lab.spec.port) as proxy:
        known["hosts"]["lab"] |= {"port": proxy.port, "ssh_config": str(config)}
        cli.inventory = tmp_path / "proxied.yaml"
        cli.inventory.write_text(yaml.safe_dump(known))
        yield proxy


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder to push, with nothing in it yet."""
    folder = tmp_path / "code"
    folder.mkdir()
    return folder


@pytest.fixture
def stopped_after(lab: Lab, cli: Cli) -> Iterator[None]:
    """Whatever a test leaves running in the containers is ended."""
    yield
    if left_running(lab):
        Cli(cli.home, lab.inventory).end_runs()
