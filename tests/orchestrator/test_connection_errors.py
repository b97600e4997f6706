"""What a failed login is told as: a key that was refused is another thing than no answer."""

from __future__ import annotations

import paramiko
import pytest

from orchestrator import login_failure
from orchestrator.connection import HostConnection
from orchestrator.errors import (
    AuthenticationFailed,
    ConnectionLost,
    DflashctlError,
    HostUnreachable,
)
from orchestrator.inventory import Host
from orchestrator.route import Answer, PlainSettings, route_from
from orchestrator.target import HostTarget

ROUTE = route_from(Answer({"hostname": ["pve"]}), PlainSettings())


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ("Authentication failed.", AuthenticationFailed, "refused user root"),
        ("Authentication timeout.", HostUnreachable, "did not answer the login within 10 s"),
        (
            "Authentication failed: transport shut down or saw EOF",
            ConnectionLost,
            "ended during the login",
        ),
    ],
)
def test_only_a_refused_key_is_told_as_one(
    words: str, kind: type[DflashctlError], said: str
) -> None:
    error = login_failure.explain(paramiko.AuthenticationException(words), ROUTE, "pve")
    assert type(error) is kind
    assert said in error.what


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ("Timeout opening channel.", HostUnreachable, "opened no session within 10 s"),
        ("Connection reset by peer", ConnectionLost, "was lost: Connection reset by peer"),
    ],
)
def test_a_session_that_does_not_come_in_time_is_no_lost_link(
    words: str, kind: type[DflashctlError], said: str
) -> None:
    connection = HostConnection(HostTarget(name="pve", settings=Host()))
    error = connection.lost(paramiko.SSHException(words))
    assert type(error) is kind
    assert said in error.what
