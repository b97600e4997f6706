"""Ranks of the processes executor as processes of this machine, under gloo, without torchrun."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch

from trainer.pipeline.processes import PeerFailedError, ProcessesExecutor


def enter_rank(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # The store outlives every rank, as torchrun's does.
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def run_ranks(
    function: Any, world: int = 4, *, more: tuple[Any, ...] = (), answers: int | None = None
) -> list[Any]:
    """What each rank put, by rank; called with (rank, port, queue, *more). ``answers``: how many
    will, if not all."""
    context = multiprocessing.get_context("forkserver")
    # One import for all of them.
    context.set_forkserver_preload(
        ["torch", "transformers", "tiny_job", "trainer.pipeline.processes"]
    )
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    out = context.Queue()
    ranks = [
        context.Process(target=function, args=(r, store.port, out, *more)) for r in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        return sorted(out.get(timeout=120) for _ in range(answers or world))
    finally:
        for process in ranks:
            process.join(60)
            process.kill()


def train_until_it_fails(executor: ProcessesExecutor, rank: int, out: Any) -> None:
    """At most 50 steps; puts (rank, kind, text) of what ended them, and ends this process."""
    try:
        for index in range(50):
            executor.step(index)
            executor.agreed_stop(None)
    except (RuntimeError, PeerFailedError) as error:
        out.put((rank, type(error).__name__, str(error)))
        raise SystemExit(1) from None
