"""The sum of the drafters' gradients, in place, the same bits on every device.

A thread beside each drafter adds up bucket after bucket, on streams of its own, while the drafter's
last backward pass of the step goes on (``buckets.py``, ``workers.SumWorker``).

Each drafter adds up one share of the elements, over all drafters in float32, then copies the
others' shares: 2·(M-1)/M of a gradient over each device's link in each direction, as a ring
all-reduce moves, by plain copies between devices. Each element is added up once, by one drafter in
one order, so replicas are equal bit for bit whatever the timing. NCCL would be faster (6 ms for an
8B-shaped drafter's 2.1 GB on two H200s) but sums bfloat16 in bfloat16 and takes a device only once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.errors import TrainerError
from trainer.pipeline.board import Board, Pulse
from trainer.pipeline.device import Fence

CHUNK = 1 << 24
"""Elements added at a time: 64 MB of float32, enough to fill a link, little beside the weights."""


class ReplicasDifferError(TrainerError):
    """Two drafters no longer hold the same weights."""

    exit_code = 1


class Rendezvous:
    """All M drafters hand in a value and get everybody's."""

    def __init__(self, board: Board, parties: int) -> None:
        self._board = board
        self._parties = parties
        self._rounds: dict[int, list[Any]] = {}
        self._read: dict[int, int] = {}
        self._turn = [0] * parties

    def meet(self, party: int, value: Any, pulse: Pulse, what: str) -> list[Any]:
        """In the order of the parties. Every party calls it equally often."""
        with self._board.changed:
            turn = self._turn[party]
            self._turn[party] += 1
            values = self._rounds.setdefault(turn, [None] * self._parties)
            # In a tuple: None is a value, an empty place is not.
            values[party] = (value,)
            self._board.changed.notify_all()
            self._board.wait(lambda: all(v is not None for v in values), pulse, what)
            self._read[turn] = self._read.get(turn, 0) + 1
            if self._read[turn] == self._parties:
                del self._rounds[turn], self._read[turn]
        return [v[0] for v in values]


class GradientSum:
    """Of one run. One thread a drafter sums, the drafters' own threads compare weights: they meet
    apart from each other, for otherwise turns would depend on who comes first."""

    def __init__(self, board: Board, parties: int, chunk: int = CHUNK) -> None:
        self._sums = Rendezvous(board, parties)
        self._drafters = Rendezvous(board, parties)
        self._parties = parties
        self._chunk = chunk

    def add(self, party: int, device: torch.device, gradient: Tensor, pulse: Pulse) -> None:
        """Every drafter's ``gradient``, flat, becomes their sum. Nobody may write to it before
        ``end``: another may still read it."""
        everyone = self._meet(party, device, gradient, pulse, "gradients of the others")
        self._add_share(party, device, everyone)
        self._meet(party, device, None, pulse, "the others' shares")
        self._copy_shares(party, everyone)

    def end(self, party: int, device: torch.device, pulse: Pulse) -> None:
        """After a step's last ``add``: from here on nobody reads this drafter's gradients."""
        self._meet(party, device, None, pulse, "the others' copies")

    def check_equal(self, party: int, step: int, weights: list[Tensor], pulse: Pulse) -> None:
        """ReplicasDifferError unless all drafters hold the same bits; waits for the device."""
        mine = fingerprint(weights)
        everyone = self._drafters.meet(party, mine, pulse, "fingerprints of the others")
        compare_fingerprints(everyone, step)

    def _meet(
        self, party: int, device: torch.device, value: Any, pulse: Pulse, what: str
    ) -> list[Any]:
        """A meeting after which this thread's device work comes after everybody's so far."""
        met = self._sums.meet(party, (Fence(device), value), pulse, f"waiting for {what}")
        for fence, _ in met:
            fence.wait(device)
        return [v for _, v in met]

    @torch.no_grad()
    def _add_share(self, party: int, device: torch.device, everyone: list[Tensor]) -> None:
        mine = everyone[party]
        for low, high in self._pieces(mine.numel(), party):
            total = mine[low:high].to(torch.float32, copy=True)
            for other, flat in enumerate(everyone):
                if other != party:
                    total += flat[low:high].to(device, non_blocking=True)
            mine[low:high].copy_(total)

    @torch.no_grad()
    def _copy_shares(self, party: int, everyone: list[Tensor]) -> None:
        mine = everyone[party]
        for owner, flat in enumerate(everyone):
            if owner != party:
                low, high = share(mine.numel(), owner, self._parties)
                mine[low:high].copy_(flat[low:high], non_blocking=True)

    def _pieces(self, elements: int, party: int) -> list[tuple[int, int]]:
        low, high = share(elements, party, self._parties)
        return [(a, min(a + self._chunk, high)) for a in range(low, high, self._chunk)]


def share(elements: int, party: int, parties: int) -> tuple[int, int]:
    """The range of elements that ``party`` adds up."""
    return elements * party // parties, elements * (party + 1) // parties


@torch.no_grad()
def fingerprint(tensors: list[Tensor]) -> tuple[int, ...]:
    """Of the bits: equal tensors give equal ones, and any single changed bit another one.

    Per tensor the sum of its 32-bit words, and of the words times an odd number that depends on
    their place, modulo 2^64."""
    values: list[int] = []
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(torch.int32)
        plain = torch.zeros((), dtype=torch.int64, device=words.device)
        placed = plain.clone()
        for start in range(0, words.numel(), CHUNK):
            chunk = words[start : start + CHUNK].long()
            place = torch.arange(start, start + chunk.numel(), device=words.device) * 2 + 1
            plain += chunk.sum()
            placed += (chunk * place).sum()
        values += [int(plain), int(placed)]
    return tuple(values)


def compare_fingerprints(everyone: list[tuple[int, ...]], step: int) -> None:
    """Raises ``ReplicasDifferError`` unless all are equal."""
    odd = [i for i, f in enumerate(everyone) if f != everyone[0]]
    if odd:
        names = ", ".join(str(i) for i in odd)
        raise ReplicasDifferError(
            f"at step {step} the weights of drafter {names} differ from drafter 0's",
            next_step="resume from the newest checkpoint; if it comes again, suspect a device's "
            "memory (look for Xid and ECC messages in the host's kernel log)",
        )
