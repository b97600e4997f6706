"""Command lines as the host's shell gets them, and what pct's own words mean."""

from __future__ import annotations

import subprocess

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator import pct
from orchestrator.errors import (
    ContainerMissing,
    ContainerNotRunning,
    DflashctlError,
    ExecFailed,
    RefusedError,
)

arguments = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1
)


def test_a_command_in_a_container_keeps_the_hosts_environment_out() -> None:
    argv = pct.exec_argv(200, ["ls", "-la", "/my folder"])
    assert argv == ["pct", "exec", "200", "--keep-env", "0", "--", "ls", "-la", "/my folder"]
    assert pct.shell_line(argv) == "pct exec 200 --keep-env 0 -- ls -la '/my folder'"


def test_lxcs_own_tool_is_given_the_same() -> None:
    argv = pct.attach_argv(200, ["ls", "-la"])
    assert argv == ["lxc-attach", "-n", "200", "--clear-env", "--", "ls", "-la"]


def test_a_terminal_goes_through_the_ssh_client_under_the_inventorys_rules() -> None:
    argv = pct.ssh_argv(
        "10.1.2.6",
        pct.exec_argv(200, ["tmux", "attach", "-t", "run one"]),
        user="root",
        port=2222,
        identity_file="/keys/id",
        known_hosts="/keys/known",
        host_keys="strict",
        terminal=True,
    )
    assert argv == [
        *("ssh", "-t", "-l", "root", "-p", "2222", "-i", "/keys/id", "-o", "IdentitiesOnly=yes"),
        *("-o", "UserKnownHostsFile=/keys/known", "-o", "GlobalKnownHostsFile=none"),
        *("-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=10", "--", "10.1.2.6"),
        "pct exec 200 --keep-env 0 -- tmux attach -t 'run one'",
    ]


@given(arguments)
@examples(60)
@example(["$(touch /tmp/x)", "`id`", "'", '"', "\\", "*", "", "-n", "a\nb", "~", "!x", "é;&|<>"])
def test_every_argument_survives_the_hosts_shell_untouched(argv: list[str]) -> None:
    line = pct.shell_line(["printf", r"%s\0", *argv])
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [word.encode() for word in argv]


def test_a_nul_is_refused_because_no_argument_can_hold_one() -> None:
    with pytest.raises(ValueError, match="NUL"):
        pct.shell_line(["echo", "a\0b"])


STDERR = {
    "stopped": ("container '202' not running!", ContainerNotRunning, "pct start 202"),
    "missing": (
        "Configuration file 'nodes/pve1/lxc/202.conf' does not exist",
        ContainerMissing,
        "pct list",
    ),
    "no python": (
        "lxc-attach: 202: ../src/lxc/attach.c: lxc_attach_run_command: 1841 "
        'No such file or directory - Failed to exec "python3"',
        RefusedError,
        "apt install python3",
    ),
    "an environment that is still to be made": (
        'lxc-attach: 202: x: No such file or directory - Failed to exec "/opt/venv/bin/python"',
        RefusedError,
        "pct exec 202 -- python3 -m venv /opt/venv ",
    ),
    "no system python": (
        'lxc-attach: 202: x: No such file or directory - Failed to exec "/usr/bin/python3"',
        RefusedError,
        "apt install python3",
    ),
    "not executable": (
        'lxc-attach: 202: x: Permission denied - Failed to exec "/srv/python"',
        RefusedError,
        "inventory",
    ),
    "cluster down": (
        "ipcc_send_rec[1] failed: Connection refused\n"
        "Unable to load access control list: Connection refused",
        ExecFailed,
        "pve-cluster",
    ),
    "not root": ("ipcc_send_rec[1] failed: Unknown error -1", ExecFailed, "root@pve1"),
    "locked": ("CT is locked (backup)", ExecFailed, "pct unlock 202"),
    "lock held": (
        "can't lock file '/run/lock/lxc/pve-config-202.lock' - got timeout",
        ExecFailed,
        "task",
    ),
    "stopped, by LXC's tool": (
        "lxc-attach: 202: ../src/lxc/attach.c: get_attach_context: 406 Connection refused - "
        "Failed to get init pid",
        ContainerNotRunning,
        "pct list",
    ),
    "no lxc-attach": ("lxc-attach: not found", ExecFailed, "inventory"),
    "no pct": ("bash: line 1: pct: command not found", ExecFailed, "inventory"),
    "old pct": ("Unknown option: keep-env\n400 unable to parse option", ExecFailed, "upgrade"),
}


@pytest.mark.parametrize("stderr,error,step", STDERR.values(), ids=STDERR)
@pytest.mark.parametrize("status", [255, 2, 0, None])
def test_the_words_decide_and_never_the_number(
    stderr: str, error: type[DflashctlError], step: str, status: int | None
) -> None:
    found = pct.failure(f"motd\n{stderr}\n", status, host="pve1", ct=202)
    assert type(found) is error
    assert step in found.next_step
    assert found.where == "pve1/202"


def test_unknown_words_are_shown_as_they_are() -> None:
    found = pct.failure("strange thing\n", 255, host="pve1", ct=200)
    assert isinstance(found, ExecFailed)
    assert "strange thing" in found.what
    assert "exit code 255" in found.what
