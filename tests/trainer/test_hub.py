"""A hub that is out of reach costs one short question, and its message says what to do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from trainer import hub
from trainer.config import TargetConfig
from trainer.errors import TargetError
from trainer.target import load_hf_config, locate

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def asked_afresh() -> Iterator[None]:
    hub.silence.cache_clear()
    yield
    hub.silence.cache_clear()


class Gated(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(401)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Gated) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_hub_that_refuses_us_answers(answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "ENDPOINT", answering)
    assert hub.silence() is None
    assert "local_files_only" not in locate("some/model").arguments()


def test_an_absent_hub_is_asked_once_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    asked: list[str] = []
    ask = hub._ask
    monkeypatch.setattr(hub, "_ask", lambda endpoint: asked.append(endpoint) or ask(endpoint))
    for _ in range(2):
        with pytest.raises(TargetError) as caught:
            load_hf_config(TargetConfig(model="nobody/has-this"))
    assert asked == ["http://127.0.0.1:1"]
    assert "127.0.0.1:1 does not answer: [Errno 111] Connection refused" in caught.value.what
    assert "not in this machine's cache" in caught.value.what
    assert "HF_ENDPOINT" in caught.value.next_step
    assert locate("nobody/has-this").arguments()["local_files_only"]


def test_a_hub_that_only_listens_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(
            hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}"
        )
        found = hub.silence()
    assert found is not None and ("0.2 s" in found or "timed out" in found)


def test_where_nobody_shall_ask_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    assert hub.silence() is None


def test_a_folder_needs_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_ask", lambda endpoint: pytest.fail("the hub was asked"))
    with pytest.raises(TargetError, match="no file or folder"):
        locate("/nowhere/at/all")
