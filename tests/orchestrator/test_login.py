"""What a login does otherwise than paramiko would."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import paramiko
import pytest

from orchestrator.login import Transport


class Host(paramiko.ServerInterface):
    def check_auth_none(self, username: str) -> int:
        return paramiko.AUTH_SUCCESSFUL


class Laptop(Transport):
    said = 0

    def send_ignore(self, byte_count: int | None = None) -> None:
        super().send_ignore(byte_count)
        self.said += 1


@pytest.fixture
def link() -> Iterator[tuple[Laptop, paramiko.Transport]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    laptop, host = Laptop(ours), paramiko.Transport(theirs)
    host.add_server_key(paramiko.ECDSAKey.generate())
    host.start_server(threading.Event(), Host())
    laptop.connect()
    laptop.auth_none("root")
    yield laptop, host
    laptop.close()
    host.close()


def test_what_the_host_tells_unasked_is_followed_by_a_word(
    link: tuple[Laptop, paramiko.Transport],
) -> None:
    laptop, host = link
    assert laptop.said == 0
    host.global_request("hostkeys-00@openssh.com", wait=False)
    # Answered in order, so the word went before this answer.
    host.global_request("keepalive@openssh.com")
    assert laptop.said >= 1
    assert laptop.is_active()


def test_the_cipher_authenticates_in_the_same_pass(
    link: tuple[Laptop, paramiko.Transport],
) -> None:
    laptop, _ = link
    assert "gcm" in laptop.local_cipher
