"""`pct push` and `pct pull` fail as badly as the real ones: with exit code 0."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.lab import Container, Lab

pytestmark = pytest.mark.lab

SMALL = 256 * 1024


@pytest.fixture(scope="module")
def small_lab(make_lab: Callable[..., Lab]) -> Lab:
    """200 has a work folder of 256 KiB, to be filled."""
    lab = make_lab((Container(200, workdir_size=SMALL), Container(202, running=False)))
    lab.up()
    return lab


@pytest.fixture
def inside(each_lab: Lab) -> Iterator[Path]:
    """The work folder of 200 as this machine sees it; what was there before stays."""
    folder = each_lab.files(200) / "workspace"
    before = set(folder.iterdir())
    yield folder
    for path in set(folder.iterdir()) - before:
        path.unlink()


def on_host(lab: Lab, command: str) -> subprocess.CompletedProcess[str]:
    return lab.host(["sh", "-c", f"cd /tmp && {command}"], stdin=subprocess.DEVNULL)


def assert_silent_success(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_file_is_pushed_and_pulled(each_lab: Lab, inside: Path) -> None:
    assert_silent_success(on_host(each_lab, "printf abc >f && pct push 200 f /workspace/f"))
    assert (inside / "f").read_text() == "abc"
    assert_silent_success(on_host(each_lab, "pct pull 200 /workspace/f g && cmp f g"))


def test_mode_is_octal_and_owners_are_names_of_the_container(each_lab: Lab, inside: Path) -> None:
    options = "--perms 640 --user daemon --group adm"
    assert_silent_success(on_host(each_lab, f"echo >f && pct push 200 f /workspace/f {options}"))
    status = each_lab.pct("exec", 200, "--", "stat", "-c", "%a %U %G", "/workspace/f")
    assert status == "640 daemon adm\n"


def test_an_unknown_owner_is_a_message_and_exit_code_0(each_lab: Lab, inside: Path) -> None:
    done = on_host(each_lab, "echo >f && pct push 200 f /workspace/f --user nosuch")
    assert done.stderr == "failed to get uid for: nosuch\n"
    assert done.returncode == 0


def test_parents_are_not_created_and_the_exit_code_is_still_0(each_lab: Lab, inside: Path) -> None:
    done = on_host(each_lab, "echo >f && pct push 200 f /workspace/no/f")
    message = "failed to create file: /workspace/no/f: No such file or directory\n"
    assert (done.stderr, done.returncode) == (message, 0)


def test_a_missing_source_is_a_message_and_exit_code_0(each_lab: Lab) -> None:
    done = on_host(each_lab, "pct push 200 nosuch /workspace/f")
    assert done.stderr == "failed to open nosuch for reading: No such file or directory\n"
    assert done.returncode == 0


def test_a_read_only_target_is_a_message_and_exit_code_0(each_lab: Lab) -> None:
    done = on_host(each_lab, "echo >f && pct push 200 f /sys/f")
    assert "failed to create file: /sys/f: " in done.stderr
    assert done.returncode == 0


def test_a_relative_target_is_below_the_root(each_lab: Lab, inside: Path) -> None:
    on_host(each_lab, "printf abc >f && pct push 200 f workspace/relative")
    assert (inside / "relative").read_text() == "abc"


def test_a_pushed_folder_becomes_an_empty_file(each_lab: Lab, inside: Path) -> None:
    on_host(each_lab, "mkdir -p d && pct push 200 d /workspace/d")
    assert (inside / "d").is_file()
    assert (inside / "d").stat().st_size == 0


def test_a_pulled_folder_becomes_an_empty_file(each_lab: Lab) -> None:
    done = on_host(each_lab, "pct pull 200 /etc got && stat -c %s,%F got")
    assert (done.stdout, done.returncode) == ("0,regular empty file\n", 0)


def test_pulling_what_is_missing_leaves_an_empty_file(each_lab: Lab) -> None:
    done = on_host(each_lab, "rm -f got; pct pull 200 /nosuch got; echo $?; stat -c %s got")
    assert done.stdout.split() == ["0", "0"]


def test_a_symbolic_link_inside_is_followed(each_lab: Lab, inside: Path) -> None:
    each_lab.pct("exec", 200, "--", "ln", "-s", "/workspace/real", "/workspace/link")
    on_host(each_lab, "printf abc >f && pct push 200 f /workspace/link")
    assert (inside / "link").is_symlink()
    assert (inside / "real").read_text() == "abc"


def test_a_full_disk_truncates_without_a_word(small_lab: Lab) -> None:
    command = "head -c 1M /dev/zero >big && pct push 200 big /workspace/big"
    assert_silent_success(on_host(small_lab, command))
    assert (small_lab.files(200) / "workspace/big").stat().st_size == SMALL


@pytest.mark.parametrize("verb", ["push 202 f /f", "pull 202 /etc/hostname f"])
def test_only_a_stopped_container_fails(each_lab: Lab, verb: str) -> None:
    done = on_host(each_lab, f"echo >f && pct {verb}")
    assert "running CT at /usr/share/perl5/PVE/CLI/pct.pm line" in done.stderr
    assert done.returncode == 255


@pytest.mark.slow
def test_a_second_copy_waits_ten_seconds_for_the_lock_and_gives_up(lab: Lab) -> None:
    lock = "/run/lock/lxc/pve-config-200.lock"
    done = on_host(lab, f"echo >f; flock {lock} pct push 200 f /workspace/f")
    assert done.returncode == 4
    assert f"can't lock file '{lock}' - got timeout\n" in done.stderr
