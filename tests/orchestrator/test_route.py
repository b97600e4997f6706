"""OpenSSH's own reading of the ssh config becomes a route; errors name what to do."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import paramiko
import pytest

from orchestrator import host_keys, login_failure
from orchestrator.errors import (
    AuthenticationFailed,
    DflashctlError,
    HostKeyMismatch,
    HostUnreachable,
    UsageError,
)
from orchestrator.inventory import Host
from orchestrator.route import Answer, Route, find_route, query_argv, route_from
from orchestrator.target import HostTarget


def host(**settings: object) -> HostTarget:
    return HostTarget(name="pve1", settings=Host.model_validate(settings))


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config"
    path.write_text(text)
    return path


def test_ssh_is_asked_with_the_inventorys_settings() -> None:
    settings = Host(user="root", port=2222, ssh_config=Path("/c"))
    assert query_argv("pve1", settings) == [
        *("ssh", "-G", "-F", "/c", "-l", "root", "-p", "2222", "--", "pve1")
    ]


def test_aliases_includes_and_alias_names_of_keys_come_from_the_ssh_config(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host pve1\n  HostName 10.1.2.6\n  Port 2200\n  User admin\n")
    path = config(tmp_path, f"Include {tmp_path}/more\nHost *\n  HostKeyAlias cluster\n")
    route = find_route(host(ssh_config=path))
    assert (route.hostname, route.port, route.user) == ("10.1.2.6", 2200, "admin")
    assert route.key_name == "cluster"


def test_jump_hosts_are_reached_one_through_the_other(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        "Host pve1\n  ProxyJump first,me@second:2222\nHost first\n  HostName 10.0.0.1\n",
    )
    route = find_route(host(ssh_config=path))
    assert route.gateway is not None and route.gateway.gateway is not None
    assert (route.gateway.hostname, route.gateway.user, route.gateway.port) == (
        *("second", "me"),
        2222,
    )
    assert route.gateway.gateway.hostname == "10.0.0.1"


def test_jump_hosts_in_a_circle_are_told(tmp_path: Path) -> None:
    path = config(tmp_path, "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises((HostUnreachable, UsageError)):
        find_route(HostTarget(name="a", settings=Host(ssh_config=path)))


def test_a_config_that_does_not_parse_is_one_message(tmp_path: Path) -> None:
    path = config(tmp_path, "Host pve1\n  Prot 22\n")
    with pytest.raises(UsageError, match=r"does not fit.*(?i:prot|bad configuration)"):
        find_route(host(ssh_config=path))


def test_keys_are_strict_unless_somebody_asked_for_accept_new() -> None:
    ask = Answer({"hostname": ["h"], "stricthostkeychecking": ["no"]})
    new = Answer({"hostname": ["h"], "stricthostkeychecking": ["accept-new"]})
    assert not route_from(ask, Host()).accept_new
    assert route_from(new, Host()).accept_new
    assert not route_from(new, Host(host_keys="strict")).accept_new
    assert route_from(ask, Host(host_keys="accept-new")).accept_new


def test_a_port_of_its_own_is_part_of_the_name_in_known_hosts() -> None:
    assert route_from(Answer({"hostname": ["h"], "port": ["22"]}), Host()).key_name == "h"
    assert route_from(Answer({"hostname": ["h"], "port": ["23"]}), Host()).key_name == "[h]:23"


def test_an_identity_of_the_inventory_is_the_only_file_offered() -> None:
    route = route_from(
        Answer({"hostname": ["h"], "identityfile": ["/etc/hostname"]}),
        Host(identity_file=Path("/keys/id")),
    )
    assert route.identities == (Path("/keys/id"),)
    assert route.use_agent


@pytest.mark.parametrize("form", [[], ["-m", "PEM"]])
@pytest.mark.parametrize("passphrase,locked", [("", False), ("abcde", True)])
def test_a_locked_key_file_may_be_unlocked_in_the_agent(
    tmp_path: Path, form: list[str], passphrase: str, locked: bool
) -> None:
    key = tmp_path / "key"
    command = ["ssh-keygen", "-q", "-t", "ecdsa", *form, "-N", passphrase, "-f", str(key)]
    subprocess.run(command, check=True)
    answer = Answer({"hostname": ["h"], "identitiesonly": ["yes"], "identityfile": [str(key)]})
    assert route_from(answer, Host()).use_agent is locked


def test_root_is_who_works_with_pct_unless_somebody_else_is_named(tmp_path: Path) -> None:
    plain = config(tmp_path, "")
    assert find_route(host(ssh_config=plain)).user == "root"
    assert find_route(host(ssh_config=plain, user="me")).user == "me"
    named = config(tmp_path, "Host *\n  User other\n")
    assert find_route(host(ssh_config=named)).user == "other"


# Errors


@pytest.fixture
def route(tmp_path: Path) -> Route:
    return Route(
        hostname="10.1.2.6",
        port=2222,
        user="root",
        identities=(),
        use_agent=True,
        known_hosts=(tmp_path / "known_hosts",),
        accept_new=False,
        key_name="[10.1.2.6]:2222",
    )


KEY = paramiko.ECDSAKey.generate()
OTHER = paramiko.ECDSAKey.generate()

FAILURES: dict[str, tuple[BaseException, type[DflashctlError], str]] = {
    "no such name": (socket.gaierror(-2, "x"), HostUnreachable, "no such host name"),
    "closed port": (ConnectionRefusedError(111, "x"), HostUnreachable, "no SSH server listens"),
    "no answer": (TimeoutError("timed out"), HostUnreachable, "within 10 s"),
    "no banner": (
        paramiko.SSHException("Error reading SSH protocol banner"),
        HostUnreachable,
        "no SSH server spoke",
    ),
    "refused key": (
        paramiko.AuthenticationException("Authentication failed."),
        AuthenticationFailed,
        "refused user root",
    ),
    "passphrase": (
        paramiko.PasswordRequiredException("x"),
        AuthenticationFailed,
        "passphrase",
    ),
    "changed key": (
        paramiko.BadHostKeyException("h", KEY, OTHER),
        HostKeyMismatch,
        host_keys.fingerprint(KEY),
    ),
    "unknown key": (host_keys.UnknownKey(KEY), HostKeyMismatch, "not known here"),
    "anything else": (OSError(113, "No route to host"), HostUnreachable, "No route to host"),
}


@pytest.mark.parametrize("error,kind,said", FAILURES.values(), ids=FAILURES)
def test_each_failure_to_connect_has_its_own_words(
    route: Route, error: BaseException, kind: type[DflashctlError], said: str
) -> None:
    found = login_failure.explain(error, route, "pve1")
    assert type(found) is kind
    assert said in found.what
    assert found.next_step
    assert found.host == "pve1"
    assert found.exit_code == 3


def test_no_known_hosts_entry_means_no_connection(route: Route) -> None:
    client = paramiko.SSHClient()
    host_keys.guard(client, route, "pve1")
    with pytest.raises(host_keys.UnknownKey):
        client._policy.missing_host_key(client, "h", KEY)


def test_accept_new_records_the_key_under_the_hosts_name(route: Route) -> None:
    from dataclasses import replace

    client = paramiko.SSHClient()
    host_keys.guard(client, replace(route, accept_new=True), "pve1")
    client._policy.missing_host_key(client, "h", KEY)
    recorded = route.known_hosts[0].read_text()
    assert recorded == f"[10.1.2.6]:2222 {KEY.get_name()} {KEY.get_base64()}\n"


def test_an_alias_is_looked_up_by_its_name_and_checked_by_the_dialled_one(route: Route) -> None:
    from dataclasses import replace

    route.known_hosts[0].write_text(f"cluster {KEY.get_name()} {KEY.get_base64()}\n")
    client = paramiko.SSHClient()
    host_keys.guard(client, replace(route, key_name="cluster"), "pve1")
    assert client.get_host_keys().check("[10.1.2.6]:2222", KEY)
