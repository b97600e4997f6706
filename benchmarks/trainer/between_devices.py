"""What lies between devices: a feature slot from one to another, a gradient's sum over all.

Parts ``copies`` and ``gradients`` of ``multi_gpu.py``.
"""

from __future__ import annotations

import threading
import time

import torch
from measure import figure, settle

from trainer.pipeline.board import Board
from trainer.pipeline.device import enter_device
from trainer.pipeline.reduce import GradientSum, fingerprint

GRADIENT = 1_048_600_000
"""Elements of an 8B-shaped drafter's gradient."""


def copies(devices: list[str]) -> None:
    """One feature slot of the 8B shape, 252 MB, from the first device to the last."""
    source = torch.randn(2, 3072, 20_480, device=devices[0]).bfloat16()
    target = torch.empty_like(source, device=devices[-1])
    host = torch.empty_like(source, device="cpu").pin_memory()
    size = source.numel() * 2

    def through_host() -> None:
        host.copy_(source, non_blocking=True)
        torch.cuda.synchronize(devices[0])
        target.copy_(host, non_blocking=True)

    figure("p2p", torch.cuda.can_device_access_peer(0, len(devices) - 1))
    for name, copy in (("direct", lambda: target.copy_(source)), ("host", through_host)):
        for i in range(12):
            if i == 2:
                settle(torch.device(devices[-1]))
                began = time.perf_counter()
            copy()
        settle(torch.device(devices[-1]))
        seconds = (time.perf_counter() - began) / 10
        figure(f"{name} GB/s", size / seconds / 1e9)
        figure(f"{name} ms", seconds * 1e3)
    figure("equal", bool(torch.equal(target.cpu(), source.cpu())))


def gradients(devices: list[str], elements: int) -> None:
    """Sum of a bf16 gradient over all devices, a thread each, beside NCCL in one process."""
    parts = [
        torch.full((elements,), float(i + 1), dtype=torch.bfloat16, device=d)
        for i, d in enumerate(devices)
    ]
    board = Board(lambda event, /, **detail: None)
    adder = GradientSum(board, len(devices))
    times: list[float] = []

    def work(party: int) -> None:
        device = torch.device(devices[party])
        enter_device(device, [torch.device(d) for d in devices])
        pulse = board.pulse(f"drafter {party}")
        for i in range(4):
            began = time.perf_counter()
            adder.add(party, device, parts[party], pulse)
            adder.end(party, device, pulse)
            settle(device)
            if party == 0 and i:
                times.append(time.perf_counter() - began)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    figure("ours ms", min(times) * 1e3)
    figure("equal", len({fingerprint([p]) for p in parts}) == 1)
    if devices[0] != "cpu":
        for i in range(4):
            if i == 1:
                torch.cuda.synchronize(devices[0])
                began = time.perf_counter()
            torch.cuda.nccl.all_reduce(parts)
        for device in devices:
            torch.cuda.synchronize(device)
        figure("nccl in one process ms", (time.perf_counter() - began) / 3 * 1e3)
