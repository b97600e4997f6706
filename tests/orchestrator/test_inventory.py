"""What an inventory may say, and the one message for what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import InventoryError, NotFoundError, UnreachableError, UsageError
from orchestrator.fleet import Fleet
from orchestrator.inventory import Inventory, load
from orchestrator.laptop_path import laptop_path
from orchestrator.paths import LaptopPaths
from orchestrator.state import LaptopState
from orchestrator.target import Target, everything, resolve, resolve_host

GOOD = """
hosts:
  pve1: {address: 10.1.2.6, user: root}
containers:
  a: {host: pve1, ct: 200, gpus: [0, 1], groups: [train]}
  b: {host: pve1, ct: 201, workdir: /data, groups: [train, small]}
defaults:
  python: /opt/python
"""


@pytest.fixture
def laptop(tmp_path: Path) -> LaptopPaths:
    return LaptopPaths({"HOME": str(tmp_path / "home")})


def read(tmp_path: Path, text: str) -> Inventory:
    path = tmp_path / "inventory.yaml"
    path.write_text(text)
    return load(path, LaptopPaths({"HOME": str(tmp_path)}))


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(InventoryError) as caught:
        read(tmp_path, text)
    return str(caught.value)


def test_defaults_fill_what_a_container_leaves_out(tmp_path: Path) -> None:
    known = read(tmp_path, GOOD)
    assert known.containers["a"].python == "/opt/python"
    assert known.containers["a"].workdir == "/workspace"
    assert known.containers["b"].workdir == "/data"
    assert known.groups() == {"train": ["a", "b"], "small": ["b"]}


def test_a_container_of_two_names_is_asked_once(tmp_path: Path) -> None:
    text = "hosts:\n  h: {address: x}\ncontainers:\n  a: {host: h, ct: 200}\n"
    known = read(tmp_path, text + "  b: {host: h, ct: 200}\n  c: {host: h, ct: 201}\n")
    assert [target.name for target in everything(known)] == ["a", "c"]
    own = text + "  b: {host: h, ct: 200, workdir: /data}\n"
    assert [target.name for target in everything(read(tmp_path, own))] == ["a", "b"]


def test_a_host_that_is_nearly_one_of_the_inventorys_is_remembered_as_a_slip(
    tmp_path: Path,
) -> None:
    known = read(tmp_path, "hosts:\n  lab: {address: x}\n")
    assert resolve_host(known, "root@lba:22").near == "lab"
    assert resolve_host(known, "10.1.2.3").near is None
    assert resolve_host(known, "lab").near is None


def test_every_mistake_is_told_with_its_line_and_a_next_step(tmp_path: Path) -> None:
    text = "hosts:\n  a: {address: x, usr: root}\ncontainers:\n  c: {host: a, ct: nine}\n"
    told = refusal(tmp_path, text)
    assert ":2: unknown key 'usr'" in told and "did you mean 'user'?" in told
    assert ":4: containers c ct" in told
    assert "next: " in told and "more" not in told


def test_of_very_many_mistakes_the_rest_is_counted(tmp_path: Path) -> None:
    keys = ", ".join(f"bad{n}: 1" for n in range(12))
    told = refusal(tmp_path, f"hosts:\n  a: {{address: x, {keys}}}\n")
    assert told.count("unknown key") == 8 and "and 4 more" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hosts:\n  a: {address: x, user: }, }\n", ":2: "),
        ("hosts:\n  a: %x\n", "put the value in quotes"),
        ("hosts:\n\ta: {address: x}\n", "a tab"),
        ("hosts:\n  a:\n    groups: [,]\n", "a value is missing"),
        ("hosts:\n  a: {address: x\ncontainers:\n  c: {}\n", "that begins in line 2"),
        ("hosts:\n  a: b: c\n", "a second `: ` on one line"),
        ("hosts:\n  a: {}\n b: {}\n", "is the indentation that of its neighbours"),
    ],
)
def test_a_fault_of_yaml_is_told_in_words_that_help(tmp_path: Path, text: str, words: str) -> None:
    told = refusal(tmp_path, text)
    assert words in told and "next: " in told
    assert "did not find expected node" not in told and "start any token" not in told


def test_aliases_of_aliases_are_read_once(tmp_path: Path) -> None:
    steps = [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 60)]
    text = "\n".join(["a0: &a0 {x: 1}", *steps])
    assert "unknown key 'a0'" in refusal(tmp_path, text)


def test_a_name_in_two_files_is_refused_though_it_is_a_number(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("hosts: {1: {}}")
    with pytest.raises(InventoryError, match=r"was already given at .*a\.yaml:1"):
        load(tmp_path, LaptopPaths({"HOME": str(tmp_path)}))


def test_a_home_folder_of_nobody_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such user's home folder"):
        laptop_path("~nobody-of-that-name/inventory.yaml")


def test_the_users_own_inventory_is_a_file_and_a_folder_beside_it(laptop: LaptopPaths) -> None:
    assert load(None, laptop) == Inventory()
    laptop.inventory_folder.mkdir(parents=True)
    laptop.inventory.write_text("hosts: {one: {}}")
    (laptop.inventory_folder / "lab.yaml").write_text(
        "hosts: {two: {}}\ncontainers: {c: {host: one, ct: 7}}"
    )
    known = load(None, laptop)
    assert list(known.hosts) == ["one", "two"]
    assert known.containers["c"].host == "one"


@pytest.mark.parametrize(
    "text,said",
    [
        ("containers:\n  a: {host: h, ct: 1, wrkdir: /x}", "did you mean 'workdir'?"),
        ("hosts: &a\n  b: *a", "unknown key 'b' in hosts b"),
        ("hosts: {h: {port: 2026-13-45}}", "month must be in 1..12"),
        ('hosts: {h: {port: !!int ""}}', "does not fit its type"),
        ("[" * 5000, "nest"),
        ("hosts: {h: {port: true}}", "true is not a number"),
        ("containers: {a: {host: h, ct: 1, groups: lab}}", "should be a list, such as [a, b]"),
        ("hosts: {h: }", "{} for none"),
        ("hosts:\n  h: {adress: x}", "did you mean 'address'?"),
        ("host: {}", "did you mean 'hosts'?"),
        ("defaults: {pyton: x}", "did you mean 'python'?"),
        ("hosts: {h: {port: 99999}}", "hosts h port"),
        ("hosts: {h: {address: -oProxyCommand=x}}", "not a host name"),
        ("containers: {a: {host: h, ct: 1}}", "not under hosts"),
        ("hosts: {pve1: {}}\ncontainers: {a: {host: pve, ct: 1}}", "did you mean 'pve1'?"),
        ("hosts: {h: {}}\ncontainers: {a: {host: h, ct: 1, workdir: rel}}", "absolute path"),
        ("hosts: {h: {}}\ncontainers: {a: {host: h}}", "containers a ct: Field required"),
        ("hosts: {'a b': {}}", "'a b' is no name for a host"),
        ("hosts: {h: {}, h: {}}", "'h' is given twice"),
        ("[1, 2]", "a list, not a mapping"),
        ("hosts: {h: [", "inventory.yaml:"),
        ("hosts: {h: {}}\ncontainers: {g: {host: h, ct: 1, groups: [g]}}", "container and a group"),
    ],
)
def test_one_message_says_what_does_not_fit(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_the_message_names_the_file_and_the_line(tmp_path: Path) -> None:
    text = "hosts:\n  h: {}\ncontainers:\n  a:\n    host: h\n    ct: 200\n    pyton: x\n"
    assert f"{tmp_path}/inventory.yaml:7:" in refusal(tmp_path, text)


def test_a_name_given_in_two_files_names_both(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("hosts: {h: {}}")
    (tmp_path / "b.yaml").write_text("hosts:\n  h: {}")
    with pytest.raises(InventoryError, match=r"b\.yaml:2.*a\.yaml:1"):
        load(tmp_path, LaptopPaths({"HOME": "/nowhere"}))


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_an_unreadable_file_is_one_message(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "inventory.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InventoryError, match="UTF-8" if content else "does not exist"):
        load(path, LaptopPaths({"HOME": "/nowhere"}))


# Targets


@pytest.fixture
def known(tmp_path: Path) -> Inventory:
    return read(tmp_path, GOOD)


def names(targets: list[Target]) -> list[str]:
    return [target.name for target in targets]


def test_a_target_is_a_name_a_group_or_host_and_number(known: Inventory) -> None:
    assert names(resolve(known, ["b"])) == ["b"]
    assert names(resolve(known, ["train"])) == ["a", "b"]
    assert names(resolve(known, ["small", "train"])) == ["b", "a"]
    assert names(resolve(known, [], "pve1", 200)) == ["a"]
    assert names(resolve(known, ["pve1/201"])) == ["b"]
    assert resolve(known) == []
    assert names(everything(known)) == ["a", "b"]


def test_an_error_calls_a_container_what_its_user_does(
    known: Inventory, laptop: LaptopPaths
) -> None:
    """And so do `ps`, `status` and `diag`; numbers are for containers that have no name."""
    with Fleet(LaptopState(laptop)) as fleet:
        fleet.expect(resolve(known, ["a"], "pve9", 300))

        def where(host: str, ct: int | None) -> str:
            return fleet.named(UnreachableError("no answer", host=host, ct=ct)).where

        assert where("pve1", 200) == "a"
        assert where("pve9", 300) == "pve9/300"
        assert where("pve1", 999) == "pve1/999"
        assert where("pve1", None) == "pve1"


def test_a_host_outside_the_inventory_takes_its_defaults(known: Inventory) -> None:
    (target,) = resolve(known, [], "me@10.9.9.9:2222", 300)
    assert target.name == "me@10.9.9.9:2222/300"
    assert (target.host.settings.user, target.host.settings.port) == ("me", 2222)
    assert target.host.address == "10.9.9.9"
    assert target.settings.python == "/opt/python"


def test_an_address_of_six_groups_needs_brackets_for_its_port(known: Inventory) -> None:
    assert resolve_host(known, "[fe80::1]:22").address == "fe80::1"


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "a b", "", "h:port"])
def test_what_ssh_would_not_take_as_a_host_is_refused(known: Inventory, host: str) -> None:
    with pytest.raises(UsageError):
        resolve(known, [], host, 200)


def test_half_a_target_is_wrong_usage(known: Inventory) -> None:
    with pytest.raises(UsageError, match="--ct without --host"):
        resolve(known, [], None, 200)
    with pytest.raises(UsageError, match="--host without --ct"):
        resolve(known, [], "pve1", None)


def test_an_unknown_name_suggests_the_nearest(known: Inventory) -> None:
    with pytest.raises(NotFoundError, match="did you mean 'train'"):
        resolve(known, ["trian"])


def test_a_run_where_a_container_is_wanted_is_told_apart(known: Inventory) -> None:
    with pytest.raises(NotFoundError, match="is a run, and this takes containers") as refused:
        resolve(known, ["night-20260101-000000-ab12"])
    assert "--set run=RUN" in str(refused.value.next_step)
