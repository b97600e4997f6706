"""What a failed login is told as: a key that was refused is another thing than no answer."""

from __future__ import annotations

import paramiko
import pytest

from orchestrator.connection import refusal
from orchestrator.errors import AuthenticationFailed, DflashctlError, HostUnreachable
from orchestrator.route import Answer, PlainSettings, route_from

ROUTE = route_from(Answer({"hostname": ["pve"]}), PlainSettings())


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ("Authentication failed.", AuthenticationFailed, "refused user root"),
        ("Authentication timeout.", HostUnreachable, "did not answer the login within 10 s"),
        (
            "Authentication failed: transport shut down or saw EOF",
            HostUnreachable,
            "ended during the login",
        ),
    ],
)
def test_only_a_refused_key_is_told_as_one(
    words: str, kind: type[DflashctlError], said: str
) -> None:
    error = refusal(paramiko.AuthenticationException(words), ROUTE, "pve")
    assert type(error) is kind
    assert said in error.what
