"""Several nodes, one making of the data: the leading node makes it, the others get its samples.

What a target writes differs by a rounding, a time limit or a library from node to node, and nodes
that train on different samples would still agree on every gradient's shape. So the data of a run is
made once. The first drafter of each node meets the others' here, before anything else is built; a
node that has the same prepared folder already (a shared one, or of an earlier run) takes it.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist

from trainer.config import TrainConfig, digest
from trainer.data.prepare import HELD_OUT_PROMPTS, REPORT, Prepared, load_prepared
from trainer.errors import DataError, ResourceError, TrainerError, first_line
from trainer.pipeline.place import Place
from trainer.pipeline.torchrun import job_store

MADE = "made"
LOOK_S = 0.5
CHUNK = 1 << 26
"""Bytes of one broadcast."""
LIMIT = timedelta(minutes=10)
"""For the others to come once the data is made; making it may take hours."""


class LeaderGoneError(TrainerError):
    """The leading node's part of the run ended before the data was there."""

    exit_code = 1


def share_data(config: TrainConfig, folder: Path, place: Place, made: Prepared | None) -> Prepared:
    """For the first drafter of every node of several: ``made`` on the leading one, null elsewhere.
    Returns the data, equal on all."""
    store = job_store("dflash-data")
    if made is not None:
        files = {name: (folder / name).stat().st_size for name in file_names(folder)}
        told: dict[str, Any] = {
            "key": digest(made.fingerprint),
            "report": made.fingerprint,
            "files": files,
        }
        store.set(MADE, json.dumps(told))
    else:
        told = _await(store)
    mine = made or load_prepared(config, folder)
    if mine is not None and digest(mine.fingerprint) != told["key"]:
        raise DataError(
            f"{folder} on node {place.node} holds other data than the leading node's:"
            f" {_short(mine.fingerprint)}, there {_short(told['report'])}",
            next_step="delete that folder on this node; it is copied from the leading one",
        )
    dist.init_process_group(
        "gloo", store=store, rank=place.node, world_size=place.nodes, timeout=LIMIT
    )
    try:
        _copy(folder, told["files"], send=made is not None, wanted=mine is None)
    finally:
        dist.destroy_process_group()
    found = mine or load_prepared(config, folder)
    assert found is not None
    return found


def _await(store: Any) -> dict[str, Any]:
    """What the leading node says once its data is complete. Looks again and again: a wait inside
    the store would hold signals off."""
    try:
        while not store.check([MADE]):
            time.sleep(LOOK_S)
        told: dict[str, Any] = json.loads(store.get(MADE))
    except RuntimeError as error:
        raise LeaderGoneError(
            f"the leading node went away before the data was made: {first_line(error)}",
            next_step="look at the run on the first node",
        ) from None
    return told


def file_names(folder: Path) -> list[str]:
    """Of a prepared folder, all that others need; the report last, which makes it complete."""
    arrays = [p for part in ("train", "held_out") for p in sorted((folder / part).iterdir())]
    return [*(str(p.relative_to(folder)) for p in arrays), HELD_OUT_PROMPTS, REPORT]


def _copy(folder: Path, files: dict[str, int], *, send: bool, wanted: bool) -> None:
    """Each file from the leading node to those that want it, in pieces."""
    any_wanted = torch.tensor([int(wanted)])
    dist.all_reduce(any_wanted)
    if not int(any_wanted):
        return
    for name, size in files.items():
        path = folder / name
        part = path.with_name(path.name + ".part")
        try:
            if send:
                with path.open("rb") as source:
                    _pass_on(size, source, None)
            elif wanted:
                part.parent.mkdir(parents=True, exist_ok=True)
                with part.open("wb") as sink:
                    _pass_on(size, None, sink)
                part.replace(path)
            else:
                _pass_on(size, None, None)
        except OSError as error:
            raise ResourceError(
                f"cannot copy the leading node's data to {part}: {error.strerror}",
                next_step="free disk space there, or name another data.folder",
            ) from None


def _pass_on(size: int, source: BinaryIO | None, sink: BinaryIO | None) -> None:
    """One file's bytes, from the node with a ``source`` to those with a ``sink``."""
    for start in range(0, size, CHUNK):
        buffer = torch.empty(min(CHUNK, size - start), dtype=torch.uint8)
        if source is not None:
            read = np.frombuffer(source.read(buffer.numel()), np.uint8)
            buffer = torch.from_numpy(read.copy())
        dist.broadcast(buffer, src=0)
        if sink is not None:
            sink.write(buffer.numpy().tobytes())


def _short(fingerprint: dict[str, Any]) -> str:
    return f"{fingerprint['samples']} samples ({fingerprint['sha256']})"
