"""What a live diagnosis says where its own way in failed: the cause, and a remedy that names the
host, the port and the container, and harms nobody."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.diag import Evidence, Finding, diagnose

TARGET = {
    "host": "pve1",
    "address": "10.1.2.6",
    "port": 20022,
    "user": "root",
    "container": "train-a",
    "python": "/opt/venv/bin/python",
}
NO_INTERPRETER = (
    "lxc-attach: 200: ../src/lxc/attach.c: lxc_attach_run_command: 1841 No such file or directory"
    ' - Failed to exec "/opt/venv/bin/python"'
)
NOT_ROOT = "ipcc_send_rec[1] failed: Unknown error -1\nUnable to load access control list"
REFUSED_KEY = "10.1.2.6:20022 refused user root: Authentication failed (AuthenticationException)"
OTHER_KEY = "Host key for server '[10.1.2.6]:20022' does not match (BadHostKeyException)"
SILENT = "ssh: connect to host 10.1.2.6 port 20022: Connection timed out"


def first(log: str = "", **probes: Any) -> Finding:
    return diagnose(Evidence.from_text(log, probes)).findings[0]


def told(log: str = "", **probes: Any) -> str:
    found = first(log, **probes)
    return f"{found.title}\n{found.remedy}"


@pytest.mark.parametrize("words", [NO_INTERPRETER, NOT_ROOT], ids=["no-interpreter", "not-root"])
def test_nobody_restarts_a_cluster_service_for_a_path_or_a_user(words: str) -> None:
    assert "pve-cluster" not in told(ct=200, target=TARGET, pct=words)


def test_a_dead_cluster_filesystem_is_still_looked_at() -> None:
    assert "systemctl status pve-cluster" in told(pct="ipcc_send_rec[1] failed: Connection refused")


def test_a_lost_quorum_is_brought_back_not_restarted() -> None:
    words = told("cluster not ready - no quorum?\n")
    assert "pvecm status" in words
    assert "systemctl restart" not in words


def test_the_systems_own_interpreter_is_installed_not_made_as_an_environment_in_usr() -> None:
    missing = NO_INTERPRETER.replace("/opt/venv/bin/python", "/usr/bin/python3")
    words = told(ct=200, target={**TARGET, "python": "/usr/bin/python3"}, pct=missing)
    assert "pct exec 200 -- apt install -y python3" in words
    assert "venv" not in words


def test_the_interpreter_of_the_inventory_is_named_with_its_container() -> None:
    words = told(ct=200, target=TARGET, pct=NO_INTERPRETER)
    assert "the container has no /opt/venv/bin/python" in words
    assert "`python:` of train-a" in words
    assert "pct exec 200 -- python3 -m venv /opt/venv" in words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (REFUSED_KEY, "ssh -v -p 20022 root@10.1.2.6 true"),
        (REFUSED_KEY, "ssh-copy-id -p 20022 root@10.1.2.6"),
        (REFUSED_KEY, "pve1 (10.1.2.6:20022) refused"),
        (OTHER_KEY, "ssh-keygen -R '[10.1.2.6]:20022'"),
        (SILENT, "nc -vz 10.1.2.6 20022"),
    ],
)
def test_host_and_port_are_filled_in(words: str, expected: str) -> None:
    assert expected in told(target=TARGET, ssh=words)
    assert "HOST" not in told(target=TARGET, ssh=words)


def test_a_log_alone_gives_the_host_and_port_that_its_lines_name() -> None:
    log = "ssh: connect to host 10.9.8.7 port 2222: Connection refused\n"
    assert "nc -vz 10.9.8.7 2222" in told(log)


def test_a_log_that_speaks_of_another_host_is_not_given_the_targets_name() -> None:
    log = "ssh: connect to host 10.9.8.7 port 2222: Connection refused\n"
    assert "10.1.2.6" not in told(log, target=TARGET)


def test_no_rule_searches_the_targets_own_words() -> None:
    """A container may be called anything."""
    named = {**TARGET, "container": "CUDA out of memory", "host": "No space left on device"}
    assert diagnose(Evidence.from_text("step 1/2 | loss 1.0\n", {"target": named})).healthy


def test_a_probe_that_somebody_else_called_target_stays_a_probe() -> None:
    found = first(target="container '200' not running!")
    assert found.code == "ct.stopped"
