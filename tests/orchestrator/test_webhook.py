"""The webhook against a real HTTP server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from orchestrator.errors import UsageError
from orchestrator.webhook import Webhook, check_url, post


class Receiver(HTTPServer):
    """Keeps what it was sent; answers ``status``."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[Any] = []
        self.kinds: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook/secret-token"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        self.server.bodies.append(json.loads(self.rfile.read(size)))
        self.server.kinds.append(self.headers["Content-Type"])
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_each_body_arrives_as_json_and_in_order(receiver: Receiver) -> None:
    hook = Webhook(receiver.url, pytest.fail)
    for number in range(20):
        hook.send({"event": "state", "number": number, "text": "läuft ☃"})
    hook.close()
    assert [body["number"] for body in receiver.bodies] == list(range(20))
    assert receiver.bodies[0]["text"] == "läuft ☃"
    assert set(receiver.kinds) == {"application/json"}


def test_a_far_side_that_refuses_is_told_without_the_secret_address(receiver: Receiver) -> None:
    receiver.status = 403
    told: list[str] = []
    hook = Webhook(receiver.url, told.append)
    hook.send({"a": 1})
    hook.close()
    assert told == ["the webhook at 127.0.0.1 answered 403 Forbidden"]


def test_nobody_there_is_told_and_raises_nothing(receiver: Receiver) -> None:
    url = receiver.url
    receiver.server_close()
    assert "was not reached" in (post(url, {}) or "")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "hooks.example.org", "http://"])
def test_only_http_is_a_webhook(url: str) -> None:
    with pytest.raises(UsageError):
        check_url(url)
