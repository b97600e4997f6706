"""A replica's gradients in pieces that other replicas may add theirs to while backward goes on.

The flat buffers are laid out in the order in which a backward pass finishes gradients
(``Drafter.backward_order``), so a bucket is a contiguous piece of one of them. A hook on each
parameter counts; a bucket is told when it and all before it are complete, so that every replica
tells the same ones in the same order. What was not told when backward ends (a parameter without a
gradient holds up all behind it) is complete then: the caller takes it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from trainer.flat_group import FlatGroup

BUCKET_BYTES = 64 << 20
"""Fills a link (3 ms at the 24 GB/s of the slowest pair of H200s measured, 0.6 ms at 106), beside
which the two meetings of threads that each bucket takes are nothing; and is little beside the
2.1 GB of an 8B-shaped drafter, for the last bucket is what nothing hides."""
FEWEST = 8
"""Buckets of a small drafter, about: one would leave nothing to overlap."""

Finished = Callable[[int], None]
"""Called with a bucket's number, from inside backward: it must not wait for anybody."""


def bucket_bytes(gradient: int) -> int:
    """Limit of a bucket, for a gradient of so many bytes."""
    return max(1, min(BUCKET_BYTES, gradient // FEWEST))


def cut(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Runs [first, last) of consecutive parameters of these sizes: each as long as it can be within
    ``limit``, or one parameter that is larger (whose gradient comes at once anyway)."""
    runs: list[tuple[int, int]] = []
    first = held = 0
    for i, size in enumerate(sizes):
        if i > first and held + size > limit:
            runs.append((first, i))
            first, held = i, 0
        held += size
    if first < len(sizes):
        runs.append((first, len(sizes)))
    return runs


class Buckets:
    """Of one replica. ``tensors`` are views of its gradients, each element in one of them."""

    def __init__(self, groups: Sequence[FlatGroup], order: Sequence[str]) -> None:
        """``order``: names in the order in which gradients are expected, in every group too."""
        place = {name: i for i, name in enumerate(order)}
        limit = bucket_bytes(sum(g.gradient.nbytes for g in groups))
        found: list[tuple[int, Tensor, list[nn.Parameter]]] = []
        for group in groups:
            size = group.gradient.element_size()
            start = 0
            for first, last in cut([p.numel() * size for p in group.parameters], limit):
                members = group.parameters[first:last]
                end = start + sum(p.numel() for p in members)
                complete = max(place[name] for name in group.names[first:last])
                found.append((complete, group.gradient[start:end], members))
                start = end
        found.sort(key=lambda bucket: bucket[0])
        self.tensors = [tensor for _, tensor, _ in found]
        self._members = [members for *_, members in found]
        self._finished: Finished | None = None
        self._missing: list[set[int]] = []
        self._next = 0

    def watch(self) -> None:
        """Hook the parameters. Before anything is compiled that reads them; once."""
        for number, members in enumerate(self._members):
            for parameter in members:
                parameter.register_post_accumulate_grad_hook(self._hook(number))

    @contextmanager
    def telling(self, finished: Finished) -> Iterator[None]:
        """For one backward pass. ``finished`` is called in the thread and on the stream that added
        the bucket's last gradient, after it."""
        self._missing = [{id(p) for p in members} for members in self._members]
        self._next = 0
        self._finished = finished
        try:
            yield
        finally:
            self._finished = None

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if self._finished is None:
                return
            if id(parameter) not in self._missing[number]:
                raise RuntimeError(
                    f"a gradient of shape {list(parameter.shape)} arrived twice in one backward"
                    " pass: others may have added theirs to the first"
                )
            self._missing[number].remove(id(parameter))
            while self._next < len(self._missing) and not self._missing[self._next]:
                self._next += 1
                self._finished(self._next - 1)

        return arrived
