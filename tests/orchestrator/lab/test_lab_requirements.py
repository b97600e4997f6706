"""Where the lab cannot run, one message says what is missing and how to get it."""

from __future__ import annotations

import pytest

from orchestrator.errors import UsageError
from orchestrator.lab import Container, LabSpec
from orchestrator.lab.requirements import choose_backend, missing, problem
from orchestrator.lab.spec import parse_containers


def find_all_but(*absent: str) -> object:
    return lambda program: None if program in absent else f"/usr/bin/{program}"


def test_nothing_is_missing() -> None:
    assert problem("lxc", uid=0, platform="linux", find=find_all_but()) is None  # type: ignore[arg-type]


def test_all_that_is_missing_is_named_at_once_with_the_command_to_get_it() -> None:
    find = find_all_but("sshd", "lxc-start", "lxc-stop", "ip")
    error = problem("lxc", uid=1000, platform="linux", find=find)  # type: ignore[arg-type]
    assert error is not None
    assert error.what == (
        "the lab cannot start here; missing: root (it makes namespaces, mounts and cgroups); "
        "the programs of iproute2, lxc, openssh-server"
    )
    assert "sudo" in error.next_step
    assert "apt install --no-install-recommends iproute2 lxc openssh-server" in error.next_step


def test_the_unshare_backend_needs_no_lxc() -> None:
    assert missing("unshare", find_all_but("lxc-start", "lxc-attach", "lxc-stop")) == []  # type: ignore[arg-type]


def test_other_systems_are_told_so() -> None:
    error = problem("lxc", uid=501, platform="darwin")
    assert error is not None
    assert "needs Linux" in error.what


def test_a_separate_usr_is_refused_because_overlays_do_not_cross_mounts() -> None:
    error = problem("lxc", uid=0, platform="linux", separate_usr=True)
    assert error is not None
    assert "/usr on the same file system" in error.what


def test_root_of_a_user_namespace_is_told_apart_before_anything_is_made() -> None:
    """It may not mark what an overlay hides."""
    error = problem("lxc", uid=0, platform="linux", find=find_all_but(), uid_map="0 1000 1\n")  # type: ignore[arg-type]
    assert error is not None
    assert "a user namespace's" in error.what
    assert "unprivileged container" in error.next_step
    whole = "         0          0 4294967295\n"
    assert problem("lxc", uid=0, platform="linux", find=find_all_but(), uid_map=whole) is None  # type: ignore[arg-type]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="'docker' is unknown"):
        choose_backend("docker")


def test_a_list_of_containers() -> None:
    parsed = parse_containers("200, 201,300:stopped")
    assert [(ct.vmid, ct.running, ct.python) for ct in parsed] == [
        (200, True, "shared"),
        (201, True, "own"),
        (300, False, "host"),
    ]


@pytest.mark.parametrize("text", ["", "200,", "200;201", "abc", "200:paused"])
def test_a_list_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="container list"):
        parse_containers(text)


@pytest.mark.parametrize("text", ["99", "200,200"])
def test_numbers_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="container number"):
        LabSpec(containers=parse_containers(text))


def test_a_relative_work_folder_is_refused() -> None:
    with pytest.raises(UsageError, match="not absolute"):
        Container(200, workdir="workspace")
