"""torchrun: becoming it where the executor needs ranks, and meeting in its store.

The plan knows how many ranks a node has, and only where the devices are. So nobody else need know:
`dflashctl launch --config` starts the same command for every executor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch.distributed import rendezvous

from trainer.config import TrainConfig
from trainer.outlook import plan_run
from trainer.pipeline.place import LOCAL_RANKS, RESTARTS
from trainer.resolve import resolve
from trainer.telemetry import say


def needs_ranks(config: TrainConfig, environment: Mapping[str, str]) -> bool:
    """Whether this process must be replaced by torchrun."""
    return config.pipeline.executor == "processes" and LOCAL_RANKS not in environment


def command(
    arguments: Sequence[str], ranks: int, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """argv of torchrun round ``-m trainer ARGUMENTS``. Several nodes meet by the variables that
    ``dflashctl launch`` sets on each."""
    nodes = int(environment.get("NNODES", "1"))
    # Without an address the ranks look for each other by the host's name, which a container need
    # not be able to resolve: they would wait for ever.
    where = ["--standalone", "--local-addr", "127.0.0.1"]
    if nodes > 1:
        where = [
            *("--nnodes", str(nodes), "--node-rank", environment["NODE_RANK"]),
            *("--master-addr", environment["MASTER_ADDR"]),
            *("--master-port", environment["MASTER_PORT"]),
        ]
    launcher = [sys.executable, "-m", "trainer.torchrun", *where]
    return [*launcher, "--nproc-per-node", str(ranks), "-m", "trainer", *arguments]


def job_store(name: str) -> dist.Store:
    """The store where all ranks meet. It outlives a restart, and in it the addresses of ranks that
    are gone: each attempt has a part of its own."""
    store, _, _ = next(rendezvous("env://"))
    return dist.PrefixStore(f"{name}/{os.environ.get(RESTARTS, '0')}", store)


def become_torchrun(config: TrainConfig, arguments: Sequence[str]) -> None:
    """Does not return. The process keeps its id, so whoever watches or stops it still can."""
    plan = plan_run(resolve(config))
    argv = command(arguments, len(plan.targets) + len(plan.drafters))
    say(f"starting {len(plan.targets)} targets and {len(plan.drafters)} drafters by torchrun")
    if os.environ.get("NNODES", "1") == "1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # From a signal until it kills its ranks. Its 30 s are few for a checkpoint of 15 GB that takes
    # 9 s to gather; whoever sent the signal has a limit of his own. torch 2.11 ignores it.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    os.execv(argv[0], argv)
