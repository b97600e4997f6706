"""Runs inside containers, in any Python from 3.10 on: can the nodes of one run reach each other?

Sent as text (``python -c``), so it stands alone. ``listen SECONDS`` on the first node prints one
JSON line with its addresses and a free port, and answers there. ``visit PORT SECONDS ADDRESS...``
on another tries the addresses and prints which of them answered, and by which own interface.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
import sys
import threading
import time

SIOCGIFADDR = 0x8915
HELLO = b"dflashctl\n"


def interfaces() -> dict[str, str]:
    """IPv4 address → interface, loopback left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                found[address] = name
    return found


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def listen(seconds: float) -> None:
    """Answer whoever knocks, until the time is over or the caller has heard enough."""
    deadline = time.monotonic() + seconds
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(("", 0))
        door.listen(64)
        say(port=door.getsockname()[1], addresses=interfaces())
        while (left := deadline - time.monotonic()) > 0:
            door.settimeout(left)
            with contextlib.suppress(OSError):
                guest, _ = door.accept()
                with guest:
                    guest.settimeout(2)
                    guest.sendall(HELLO)
                    # The guest closes first: its side, not this port, then waits in TIME_WAIT.
                    guest.recv(1)


def visit(port: int, seconds: float, addresses: list[str]) -> None:
    """Try every address at once: which answered, by which own interface, and why others did not."""
    own = interfaces()
    reached: dict[str, str | None] = {}
    failed: dict[str, str] = {}

    def knock(address: str) -> None:
        try:
            with socket.create_connection((address, port), timeout=seconds) as link:
                if link.recv(64) != HELLO:
                    raise OSError("something else answers there")
                reached[address] = own.get(link.getsockname()[0])
        except OSError as error:
            failed[address] = str(error)

    threads = [threading.Thread(target=knock, args=(address,)) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(reached=reached, failed=failed)


def main(words: list[str]) -> None:
    if words[0] == "listen":
        listen(float(words[1]))
    else:
        visit(int(words[1]), float(words[2]), words[3:])


if __name__ == "__main__":
    main(sys.argv[1:])
