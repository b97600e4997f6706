"""The proxy that makes links slow, narrow, cut or silent. It needs no lab."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from orchestrator.lab.proxy import Proxy


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets; its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve(end: socket.socket) -> None:
        with end:
            try:
                while data := end.recv(65536):
                    end.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                end, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(end,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.fixture
def proxy(echo: int) -> Iterator[Proxy]:
    with Proxy(echo) as proxy:
        yield proxy


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=20)


def receive(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := link.recv(count - len(data))):
        data += piece
    return data


def receive_until_the_cut(link: socket.socket) -> bytes:
    data = b""
    try:
        while piece := link.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def test_bytes_pass_unchanged_both_ways_and_are_counted(proxy: Proxy) -> None:
    data = bytes(range(256)) * 2000
    with connect(proxy) as link:
        threading.Thread(target=link.sendall, args=(data,)).start()
        assert receive(link, len(data)) == data
    assert proxy.traffic() == {"up": len(data), "down": len(data), "connections": 1}


def test_an_answer_takes_at_least_the_round_trip_time(proxy: Proxy) -> None:
    proxy.set(rtt_ms=100)
    with connect(proxy) as link:
        start = time.monotonic()
        link.sendall(b"x")
        assert receive(link, 1) == b"x"
        assert time.monotonic() - start >= 0.1


def test_pieces_on_a_slow_link_travel_together_not_one_after_the_other(proxy: Proxy) -> None:
    proxy.set(rtt_ms=400)
    with connect(proxy) as link:
        for _ in range(20):
            link.sendall(b"x")
            time.sleep(0.002)
        start = time.monotonic()
        assert receive(link, 20) == b"x" * 20
        assert time.monotonic() - start < 20 * 0.4


def test_the_rate_is_a_limit(proxy: Proxy) -> None:
    proxy.set(rtt_ms=0, rate=100_000)
    with connect(proxy) as link:
        start = time.monotonic()
        link.sendall(b"x" * 30_000)
        receive(link, 30_000)
        assert time.monotonic() - start >= 0.3


def test_end_of_stream_is_passed_on(proxy: Proxy) -> None:
    with connect(proxy) as link:
        link.sendall(b"last words")
        link.shutdown(socket.SHUT_WR)
        assert receive(link, 100) == b"last words"


def test_cut_resets_what_is_open_and_serves_what_comes_after(proxy: Proxy) -> None:
    with connect(proxy) as link:
        link.sendall(b"x")
        receive(link, 1)
        proxy.cut()
        assert receive_until_the_cut(link) == b""
    with connect(proxy) as link:
        link.sendall(b"y")
        assert receive(link, 1) == b"y"


def test_cut_after_passes_exactly_so_many_bytes_once(proxy: Proxy) -> None:
    proxy.cut_after(1000, "down")
    with connect(proxy) as link:
        link.sendall(b"x" * 5000)
        assert receive_until_the_cut(link) == b"x" * 1000
    with connect(proxy) as link:
        link.sendall(b"x" * 5000)
        assert receive(link, 5000) == b"x" * 5000


def test_a_black_hole_is_silent_and_gives_back_what_it_held(proxy: Proxy) -> None:
    with connect(proxy) as link:
        proxy.black_hole()
        link.sendall(b"x")
        link.settimeout(0.2)
        with pytest.raises(TimeoutError):
            link.recv(1)
        proxy.black_hole(False)
        link.settimeout(20)
        assert receive(link, 1) == b"x"


def test_refused_and_served_again_on_the_same_port(proxy: Proxy) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.refuse(False)
    with connect(proxy) as link:
        link.sendall(b"x")
        assert receive(link, 1) == b"x"


def test_a_server_that_is_not_there_leaves_the_client_with_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with Proxy(port) as proxy:
        try:
            with connect(proxy) as link:
                assert receive_until_the_cut(link) == b""
        except ConnectionError:
            pass  # reset before connect() has returned
