"""A host's own words, read into an inventory: ``inventory discover`` against a real ``pct``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from laptop import Cli

from orchestrator.lab import Container, Lab

pytestmark = pytest.mark.lab

DRIVER = "/proc/driver/nvidia/gpus"
CARD = r"Model: NVIDIA H200\nGPU UUID: GPU-%s\nDevice Minor: %s\n"


@pytest.fixture
def passing(make_lab: Callable[..., Lab]) -> Lab:
    """A host with two cards and three containers: 500 is passed both as ``devN``, 501 the second as
    a mount, 502 one of which the driver says nothing."""
    nodes = tuple(Path(f"/dev/{name}") for name in ("nvidia0", "nvidia1", "nvidiactl"))
    stopped = [Container(ct, running=False) for ct in (500, 501, 502)]
    lab = make_lab(tuple(stopped), devices=nodes, driver=())
    lab.up()
    mount = "lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind,optional,create=file"
    script = [
        # This machine has no card: the host gets the driver's files of one that has two.
        "mount -t tmpfs none /proc/driver",
        *(
            f"mkdir -p {DRIVER}/{n}; printf '{CARD}' {n} {n} > {DRIVER}/{n}/information"
            for n in "10"
        ),
        "cd /etc/pve/lxc; sed -i /^dev/d 501.conf 502.conf",
        f"echo '{mount}' >> 501.conf; echo 'dev0: /dev/nvidia7,mode=0666' >> 502.conf",
    ]
    done = lab.host(["sh", "-ec", "\n".join(script)])
    assert done.returncode == 0, done.stderr
    return lab


def test_what_the_inventory_lacks_is_added_once_with_the_cards_passed_to_each_container(
    cli: Cli, passing: Lab, tmp_path: Path
) -> None:
    passed = passing.pct("config", 500).splitlines()
    assert passed[2:5] == ["dev0: /dev/nvidia0", "dev1: /dev/nvidia1", "dev2: /dev/nvidiactl"]
    known = yaml.safe_load(passing.inventory.read_text())
    folder = tmp_path / "inventory"
    folder.mkdir()
    (folder / "hosts.yaml").write_text(yaml.safe_dump({**known, "containers": {}}))
    cli.inventory = folder
    assert "3 new" in cli("inventory", "discover", "lab", code=0).stderr
    assert [path.name for path in folder.iterdir()] == ["hosts.yaml"]
    cli("inventory", "discover", "lab", "--write", code=0)
    listed = cli.json("inventory", "list")["containers"]
    assert {entry["ct"]: entry["gpus"] for entry in listed.values()} == {
        500: ["GPU-0", "GPU-1"],
        501: ["GPU-1"],
        502: [],
    }
    written = (folder / "lab.yaml").read_text()
    assert "# stopped; /dev/nvidia7\n" in written
    assert "3 known" in cli("inventory", "discover", "--write", code=0).stderr
    assert (folder / "lab.yaml").read_text() == written
