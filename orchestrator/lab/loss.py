"""Packets of one port that get lost on the loopback: real TCP, which notices and sends them again.

Done by nftables: kernels without netem are common, and a proxy can only stall. The rules belong to
the ``nft`` process that made them and go with it, also when the tester is killed.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

from orchestrator.errors import RefusedError
from orchestrator.lab.requirements import CLEAN_ENV, which

RULE = 'iifname "lo" tcp {side} {port} numgen random mod 100 < {percent} counter drop'


def missing() -> str | None:
    """The Debian package that is needed and not there."""
    return None if which("nft") else "nftables"


@contextlib.contextmanager
def loss(port: int, percent: int) -> Iterator[None]:
    """While the block runs, lose that share of all packets to and from ``port``, at random.

    :raises RefusedError: nftables is missing, or this kernel refuses.
    """
    table = f"inet dflashctl-loss-{port}"
    steps = [
        f"add table {table} {{ flags owner; }}",
        f"add chain {table} lo {{ type filter hook input priority -300; }}",
        *(
            f"add rule {table} lo " + RULE.format(side=side, port=port, percent=percent)
            for side in ("dport", "sport")
        ),
        f"list table {table}",
    ]
    with subprocess.Popen(
        [which("nft") or "nft", "-i"],
        env=CLEAN_ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as nft:
        assert nft.stdin and nft.stdout
        nft.stdin.write("\n".join(steps) + "\n")
        nft.stdin.flush()
        said = []
        for line in nft.stdout:
            said.append(line)
            if "drop" in line and "sport" in line and "numgen" in line and "add rule" not in line:
                break
            if "Error" in line:
                nft.kill()
                raise RefusedError(
                    f"nft refuses to lose packets: {''.join(said).strip()}",
                    next_step="this kernel may lack nf_tables: try on another machine",
                )
        yield
