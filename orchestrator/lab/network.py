"""The lab's bridge: an address for each container, and none to the outside."""

from __future__ import annotations

import subprocess
from ipaddress import IPv4Network

from orchestrator.lab.requirements import CLEAN_ENV


def ip(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *args], env=CLEAN_ENV, capture_output=True, text=True, check=False)


def free_network(seed: int, routes: str) -> str | None:
    """A /24 as its first three numbers, overlapping none of ``routes`` (``ip -4 route`` text)."""
    taken = []
    for line in routes.splitlines():
        first = line.split()[0]
        if first[0].isdigit():
            taken.append(IPv4Network(first, strict=False))
    for offset in range(256):
        prefix = f"10.213.{(seed + offset) % 256}"
        if not any(IPv4Network(f"{prefix}.0/24").overlaps(net) for net in taken):
            return prefix
    return None


def make_bridge(name: str, seed: int) -> str | None:
    """Returns the network's prefix, or None where the kernel has no bridges or no room."""
    prefix = free_network(seed, ip("-4", "route").stdout)
    if prefix is None or ip("link", "add", name, "type", "bridge").returncode:
        return None
    for step in (("addr", "add", f"{prefix}.1/24", "dev", name), ("link", "set", name, "up")):
        if ip(*step).returncode:
            remove_bridge(name)
            return None
    return prefix


def remove_bridge(name: str) -> None:
    ip("link", "del", name)
