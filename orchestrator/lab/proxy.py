"""A TCP proxy that makes a link slow, narrow, cut or silent.

There is no netem on every machine, so faults of the link are made in user land, in a process of
its own (threads in the tester's process would share its interpreter lock and blur the delays):

    with Proxy(target_port=lab.spec.port, rtt_ms=20) as proxy:
        subprocess.run(lab.ssh_argv("true", port=proxy.port))
        proxy.cut_after(100_000, "down")

Limits: the proxy ends TCP on both sides, so a black hole still acknowledges until buffers are
full (a peer sees no answers, not lost packets), and connecting to it succeeds.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Direction = Literal["up", "down"]
"""up: from the client to the server."""

PIECE = 64 * 1024
IN_FLIGHT = 256
"""Pieces between reader and writer: 16 MiB, more than any window of SSH."""


# --- the tester's side -------------------------------------------------------------------------


class Proxy:
    """Runs the proxy process; ``port`` is where clients connect. It ends with this object."""

    def __init__(self, target_port: int, *, rtt_ms: float = 0) -> None:
        self._process = subprocess.Popen(
            # As a file, isolated: importing the package would cost 0.3 s a proxy.
            [sys.executable, "-I", "-S", __file__, str(target_port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port: int = self._ask(op="set", rtt_ms=rtt_ms, rate=0)["port"]

    def _ask(self, **command: Any) -> dict[str, Any]:
        process = self._process
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        reply: dict[str, Any] = json.loads(process.stdout.readline())
        return reply

    def set(self, *, rtt_ms: float, rate: float = 0) -> None:
        """``rate``: bytes per second in each direction, 0 for no limit."""
        self._ask(op="set", rtt_ms=rtt_ms, rate=rate)

    def cut(self) -> None:
        """Reset every connection now; new ones are served."""
        self._ask(op="cut")

    def cut_after(self, count: int, direction: Direction) -> None:
        """Once ``count`` more bytes have been passed on in ``direction``, reset every connection.

        One shot: connections made after it are whole.
        """
        self._ask(op="cut_after", count=count, direction=direction)

    def black_hole(self, on: bool = True) -> None:
        """Pass nothing on and say nothing; when switched off, what was held back goes on."""
        self._ask(op="black_hole", on=on)

    def refuse(self, on: bool = True) -> None:
        """New connections are refused, as by a host whose sshd is down."""
        self._ask(op="refuse", on=on)

    def traffic(self) -> dict[str, int]:
        """Bytes passed on so far, ``up`` and ``down``, and ``connections`` accepted."""
        return self._ask(op="traffic")

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# --- the proxy process ---------------------------------------------------------------------------


@dataclass
class Link:
    """What all connections share; ``changed`` guards and announces every change."""

    target: tuple[str, int]
    delay_s: float = 0.0
    rate: float = 0.0
    open: threading.Event = field(default_factory=threading.Event)
    """Cleared while the link is a black hole."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    traffic: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0, "connections": 0})
    budget: dict[str, int] = field(default_factory=dict)
    """Bytes until the cut, per direction."""
    sockets: set[socket.socket] = field(default_factory=set)

    def cut(self) -> None:
        with self.lock:
            sockets, self.sockets = self.sockets, set()
            self.budget.clear()
        for end in sockets:
            reset(end)

    def allowance(self, direction: Direction, wanted: int) -> int:
        """How many of ``wanted`` bytes may still pass."""
        with self.lock:
            left = min(wanted, self.budget.get(direction, wanted))
            if direction in self.budget:
                self.budget[direction] -= left
            self.traffic[direction] += left
            return left

    def spent(self, direction: Direction) -> bool:
        with self.lock:
            return self.budget.get(direction) == 0


def reset(end: socket.socket) -> None:
    """Close it under the threads that wait in it: shutdown wakes them, lingering 0 s sends RST."""
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer has gone already
    end.close()


def pump(link: Link, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
    """Read at once, so that the delay is the link's and not the reader's."""
    pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(IN_FLIGHT)
    writer = threading.Thread(target=deliver, args=(link, pieces, sink, direction), daemon=True)
    writer.start()
    free_at = 0.0
    while True:
        size = PIECE if not link.rate else max(1, min(PIECE, int(link.rate / 50)))
        try:
            data = source.recv(size)
        except OSError:
            data = b""
        now = time.monotonic()
        if link.rate:
            free_at = max(now, free_at) + len(data) / link.rate
        pieces.put((max(now, free_at) + link.delay_s, data))
        if not data:
            return


def deliver(
    link: Link,
    pieces: queue.Queue[tuple[float, bytes]],
    sink: socket.socket,
    direction: Direction,
) -> None:
    broken = False
    while True:
        due, data = pieces.get()
        time.sleep(max(0.0, due - time.monotonic()))
        link.open.wait()
        try:
            if not data:
                sink.shutdown(socket.SHUT_WR)
            elif not broken:
                sink.sendall(data[: link.allowance(direction, len(data))])
        except OSError:
            broken = True  # keep taking pieces, else the reader blocks for ever
        if link.spent(direction):
            link.cut()
        if not data:
            return


def accept(link: Link, listener: socket.socket) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return  # closed: connections are refused now
        threading.Thread(target=connect, args=(link, client), daemon=True).start()


def connect(link: Link, client: socket.socket) -> None:
    try:
        server = socket.create_connection(link.target)
    except OSError:
        reset(client)
        return
    with link.lock:
        link.sockets |= {client, server}
        link.traffic["connections"] += 1
    for end in (client, server):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    up = threading.Thread(target=pump, args=(link, client, server, "up"), daemon=True)
    up.start()
    pump(link, server, client, "down")


def listen(link: Link, port: int) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    threading.Thread(target=accept, args=(link, listener), daemon=True).start()
    return listener


def main(target_port: int) -> None:
    link = Link(("127.0.0.1", target_port))
    link.open.set()
    listener = listen(link, 0)
    port = listener.getsockname()[1]
    for line in sys.stdin:
        command = json.loads(line)
        reply: dict[str, int] = {"port": port}
        match command["op"]:
            case "set":
                link.delay_s = command["rtt_ms"] / 2000
                link.rate = command["rate"]
            case "cut":
                link.cut()
            case "cut_after":
                with link.lock:
                    link.budget = {command["direction"]: command["count"]}
            case "black_hole":
                link.open.clear() if command["on"] else link.open.set()
            case "refuse":
                # shutdown, because close alone does not wake the thread in accept().
                if command["on"]:
                    listener.shutdown(socket.SHUT_RDWR)
                    listener.close()
                else:
                    listener = listen(link, port)
            case "traffic":
                with link.lock:
                    reply = dict(link.traffic)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
