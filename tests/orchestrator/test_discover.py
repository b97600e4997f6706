"""From ``pct list`` and ``pct config`` to YAML that the inventory takes, changing nothing in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import inventory as inventories
from orchestrator.discover import Found, add, discover, minors, render, uuids
from orchestrator.errors import InventoryError
from orchestrator.inventory import Inventory
from orchestrator.paths import LaptopPaths
from orchestrator.target import resolve_host

INFORMATION = """\
Model: \t\t NVIDIA H200
IRQ:   \t\t 100
GPU UUID: \t GPU-aaaa
Video BIOS: \t 96.00
Bus Location: \t 0000:18:00.0
Device Minor: \t 1
Model: \t\t NVIDIA H200
GPU UUID: \t GPU-bbbb
Device Minor: \t 0
"""


def container(ct: int, name: str = "", **config: Any) -> dict[str, Any]:
    return {"ct": ct, "name": name, "status": "running", "lock": "", "config": config}


def read(tmp_path: Path, text: str) -> Inventory:
    path = tmp_path / "inventory.yaml"
    path.write_text(text)
    return inventories.load(path, LaptopPaths({"HOME": str(tmp_path)}))


def test_both_ways_of_passing_a_gpu_are_read_and_its_helpers_are_none() -> None:
    assert minors({"dev0": "/dev/nvidia3,mode=0666", "dev8": "/dev/nvidiactl"}) == (3,)
    entries = [
        "/dev/nvidia0 dev/nvidia0 none bind,optional,create=file",
        "/dev/nvidia12 dev/nvidia1 none bind,optional,create=file",
        "/dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file",
        "/dev/nvidia-caps/nvidia-cap1 dev/x none bind",
    ]
    assert minors({"lxc.mount.entry": entries}) == (0, 12)
    assert minors({"lxc.mount.entry": "\n".join(entries)}) == (0, 12)
    assert minors({"description": "/dev/nvidia5", "net0": "x"}) == ()


def test_a_card_is_known_by_its_minor_number_not_by_its_place_in_a_list() -> None:
    assert uuids(INFORMATION) == {1: "GPU-aaaa", 0: "GPU-bbbb"}
    assert uuids("") == {}


def test_what_is_found_is_yaml_that_the_inventory_takes(tmp_path: Path) -> None:
    found = discover(
        Inventory(),
        resolve_host(Inventory(), "root@10.1.2.6:2222"),
        [container(200, "train", dev0="/dev/nvidia1", dev1="/dev/nvidia0"), container(201)],
        uuids(INFORMATION),
    )
    text = render(found)
    known = read(tmp_path, text)
    assert known.hosts["10.1.2.6"].port == 2222
    assert known.hosts["10.1.2.6"].user == "root"
    assert known.containers["train"].gpus == ("GPU-bbbb", "GPU-aaaa")
    assert known.containers["10.1.2.6-201"].ct == 201
    assert "# running; /dev/nvidia0, /dev/nvidia1" in text
    assert "# running; no GPU" in text


def test_what_the_inventory_has_is_left_as_it_is_and_the_gone_are_named(tmp_path: Path) -> None:
    known = read(
        tmp_path,
        "hosts: {pve1: {address: 10.1.2.6}}\n"
        "containers: {mine: {host: pve1, ct: 200}, old: {host: pve1, ct: 300}}\n",
    )
    found = discover(
        known, resolve_host(known, "10.1.2.6"), [container(200, "train"), container(201, "b")], {}
    )
    assert (found.host, found.settings, found.known, found.gone) == (
        "pve1",
        None,
        ("mine",),
        ("old",),
    )
    assert [item.name for item in found.new] == ["b"]


def test_a_name_that_is_taken_or_no_name_is_replaced(tmp_path: Path) -> None:
    known = read(
        tmp_path, "hosts: {a: {}, b: {}}\ncontainers: {gpu: {host: a, ct: 200, groups: [all]}}\n"
    )
    items = [container(200, "gpu"), container(201, "all"), container(202, "-x"), container(203, "")]
    found = discover(known, resolve_host(known, "b"), items, {})
    assert [item.name for item in found.new] == ["gpu-200", "all-201", "b-202", "b-203"]


def test_a_host_that_is_known_is_not_written_again(tmp_path: Path) -> None:
    known = read(tmp_path, "hosts: {a: {}}\n")
    text = render(discover(known, resolve_host(known, "a"), [container(200)], {}))
    assert "hosts:" not in text and "containers:" in text


def test_nothing_new_is_no_text(tmp_path: Path) -> None:
    known = read(tmp_path, "hosts: {a: {}}\ncontainers: {gpu: {host: a, ct: 200}}\n")
    assert render(discover(known, resolve_host(known, "a"), [container(200)], {})) == ""


def test_an_existing_file_is_added_to_with_its_comments_kept(tmp_path: Path) -> None:
    old = (
        "# mine\nhosts: {a: {}}\ncontainers:\n  gpu: {host: a, ct: 200, groups: [night]}  # keep\n"
    )
    known = read(tmp_path, old)
    found = discover(known, resolve_host(known, "a"), [container(200), container(201, "new")], {})
    text = add(old, found, tmp_path / "a.yaml")
    assert text.startswith(old)
    after = read(tmp_path, text)
    assert after.containers["gpu"] == known.containers["gpu"]
    assert after.containers["new"].ct == 201
    again = discover(after, resolve_host(after, "a"), [container(200), container(201, "new")], {})
    assert add(text, again, tmp_path / "a.yaml") == text


@pytest.mark.parametrize(
    "old",
    [
        "containers:\n  gpu: {host: a, ct: 200}\nhosts: {a: {}}\n",
        "hosts: {a: {}}\ncontainers: {gpu: {host: a, ct: 200}}\n",
        "hosts: {a: {}}\ncontainers:\n    gpu: {host: a, ct: 200}\n",
    ],
)
def test_a_file_that_cannot_be_added_to_safely_is_left_alone(tmp_path: Path, old: str) -> None:
    known = read(tmp_path, old)
    found = discover(known, resolve_host(known, "a"), [container(201, "new")], {})
    with pytest.raises(InventoryError, match="paste what it prints"):
        add(old, found, tmp_path / "a.yaml")


@given(st.text(), st.text(max_size=20))
def test_whatever_a_host_says_the_yaml_reads_back(name: str, status: str) -> None:
    item = container(200, name) | {"status": status}
    found = discover(Inventory(), resolve_host(Inventory(), "h"), [item], {})
    tree = yaml.safe_load(render(found))
    (label,) = tree["containers"]
    assert inventories.NAME.match(label)
    assert isinstance(found.new[0], Found)
