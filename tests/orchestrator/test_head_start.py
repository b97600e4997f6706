"""A connection is begun before the inventory is read only where that could not decide otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import head_start
from orchestrator.fleet import agent_argv
from orchestrator.inventory import load
from orchestrator.inventory_files import files_of, stamp
from orchestrator.paths import LaptopPaths
from orchestrator.pct import shell_line
from orchestrator.private_file import write_private
from orchestrator.target import resolve

TEXT = """
hosts:
  near: {address: 10.1.2.6, user: root, port: 2222, ssh_config: ~/other, host_keys: strict}
  far: {pct: /usr/sbin/pct, known_hosts: /etc/known, identity_file: /keys/one}
containers:
  a: {host: near, ct: 200, groups: [both]}
  b: {host: far, ct: 201, python: /opt/python, groups: [both]}
"""


class Laptop:
    def __init__(self, home: Path) -> None:
        self.environment = {"HOME": str(home)}
        self.paths = LaptopPaths(self.environment)
        self.paths.inventory.parent.mkdir(parents=True)
        self.paths.inventory.write_text(TEXT)
        self.read()

    def read(self) -> None:
        files = stamp(files_of(None, self.paths))
        self.inventory = load(None, self.paths)
        head_start.remember(self.paths, files, self.inventory)

    def way(self, line: str) -> head_start.Way | None:
        return head_start.known_way(line.split(), self.environment, self.paths)


@pytest.fixture
def laptop(tmp_path: Path) -> Laptop:
    return Laptop(tmp_path)


@pytest.mark.parametrize("name", ["a", "b"])
def test_what_is_begun_is_what_the_inventory_asks_for(laptop: Laptop, name: str) -> None:
    way = laptop.way(f"launch {name} --force")
    (target,) = resolve(laptop.inventory, [name])
    assert way is not None
    assert way.leads_to(target.host)
    assert way.line == shell_line(agent_argv(target))


def test_it_leads_nowhere_else(laptop: Laptop) -> None:
    way = laptop.way("launch a")
    (target,) = resolve(laptop.inventory, ["a"])
    settings = target.host.settings
    assert way is not None
    for change in ({"port": 22}, {"user": "me"}, {"address": "b"}, {"known_hosts": Path("/k")}):
        other = target.host.model_copy(update={"settings": settings.model_copy(update=change)})
        assert not way.leads_to(other)


@pytest.mark.parametrize(
    "line",
    [
        *("", "launch", "launch c", "launch both", "launch a b", "ps a", "-- a", "launch -- a"),
        *("launch a --dry-run", "launch a --help", "push a --dry-run", "exec a --inventory=other"),
        *("launch a --inventory other", "launch --host a --ct 200"),
    ],
)
def test_in_doubt_nothing_is_begun(laptop: Laptop, line: str) -> None:
    assert laptop.way(line) is None


def test_an_inventory_that_was_changed_is_read_first(laptop: Laptop) -> None:
    changed = TEXT.replace("10.1.2.6", "10.1.2.7")
    laptop.paths.inventory.write_text(changed)
    assert laptop.way("launch a") is None
    laptop.read()
    way = laptop.way("launch a")
    assert way is not None and way.address == "10.1.2.7"


def test_a_change_within_the_same_tick_and_size_is_seen(laptop: Laptop) -> None:
    path = laptop.paths.inventory
    before = path.stat()
    path.write_text(TEXT.replace("10.1.2.6", "10.1.2.7"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert laptop.way("launch a") is None


def test_a_file_beside_the_inventory_counts(laptop: Laptop) -> None:
    folder = laptop.paths.inventory_folder
    folder.mkdir()
    (folder / "more.yaml").write_text("containers: {c: {host: far, ct: 202}}\n")
    assert laptop.way("launch a") is None
    laptop.read()
    assert laptop.way("launch a") and laptop.way("launch c")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"containers": []}', "not json"])
def test_a_damaged_cache_is_as_none(laptop: Laptop, text: str) -> None:
    write_private(laptop.paths.ways, text)
    assert laptop.way("launch a") is None


def test_an_entry_of_another_version_is_as_none(laptop: Laptop) -> None:
    text = laptop.paths.ways.read_text()
    write_private(laptop.paths.ways, text.replace('"agent"', '"agents"'))
    assert laptop.way("launch a") is None
    write_private(laptop.paths.ways, text.replace('"port"', '"gate"'))
    assert laptop.way("launch a") is None


def test_only_its_owner_reads_it(laptop: Laptop) -> None:
    assert laptop.paths.ways.stat().st_mode & 0o777 == 0o600


def test_paramiko_is_there_before_fabric_and_what_it_brings() -> None:
    lines = (
        "import sys",
        "from orchestrator.head_start import _import_paramiko",
        "_import_paramiko()",
        "assert 'paramiko' in sys.modules and 'invoke' not in sys.modules",
        "from orchestrator.login import log_in",
        "assert 'invoke' not in sys.modules",
        "from fabric import Config, Connection",
        "Connection('somewhere', config=Config(lazy=True))",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
