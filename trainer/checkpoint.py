"""Checkpoints: written beside, synced, renamed; complete or not there at all.

    checkpoints/step-00000500/
        drafter/             the z-lab form: what readers load (drafter/format.py)
        master.safetensors   fp32 master weights
        average.safetensors, square.safetensors   AdamW's moments
        state.json           step, counters, the config's fingerprint; written last: the marker
    checkpoints/.abandoned/  those of a course that the run has left (``abandon_beyond``)

A folder without ``state.json`` under its own name cannot exist: it is renamed into place when it
is whole. What a kill leaves behind is a folder ending in ``.part``, which the next save removes.
Resuming needs no generator state: batches and anchors are functions of the step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config import CheckpointConfig, TargetConfig
from trainer.errors import CheckpointError, ResourceError
from trainer.pipeline.place import RESTARTS
from trainer.records import CheckpointState, read_object

STATE = "state.json"
PART = ".part"
ABANDONED = ".abandoned"
KINDS = ("master", "average", "square")
RESUME_VARIABLE = "DFLASH_RESUME"

Export = Callable[[Path, dict[str, Tensor]], None]
"""Writes the public form of fp32 weights by name into a folder."""


@dataclass(frozen=True)
class Loaded:
    path: Path
    step: int
    """Steps done."""
    state: dict[str, Any]
    """For ``Executor.load``."""
    best: float | None


class CheckpointStore:
    """The checkpoints of one run. ``fingerprint`` is ``TrainConfig.fingerprint`` plus the data's
    and the drafter's own; every field must be equal for a resume."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        fingerprint: dict[str, Any],
        export: Export,
    ) -> None:
        self.folder = folder
        self.config = config
        self.fingerprint = json.loads(json.dumps(fingerprint))
        self.export = export

    def save(self, step: int, state: dict[str, Any], best: float | None = None) -> Path:
        """Write the checkpoint of ``step`` steps done. Raises ``ResourceError`` on a full disk;
        what was there before stays."""
        final = step_path(self.folder, step)
        beside = final.with_name(final.name + PART)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_parts()
            beside.mkdir()
            self.export(beside / "drafter", state["master"])
            for kind in KINDS:
                save_file(state[kind], beside / f"{kind}.safetensors")
            record = {
                "step": step,
                "skipped": state["skipped"],
                "best": best,
                "asked": os.environ.get(RESUME_VARIABLE),
                "fingerprint": self.fingerprint,
            }
            (beside / STATE).write_text(json.dumps(record, indent=2), encoding="utf-8")
            sync_tree(beside)
            if final.exists():
                shutil.rmtree(final)
            beside.rename(final)
            sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise ResourceError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}",
                next_step="free disk space and start again: earlier checkpoints are untouched",
            ) from None
        self._prune()
        return final

    def mark_best(self, step: int) -> None:
        """``best`` points at the checkpoint of ``step``; it is never deleted."""
        beside = self.folder / f"best{PART}"
        beside.unlink(missing_ok=True)
        beside.symlink_to(step_path(self.folder, step).name)
        beside.replace(self.folder / "best")

    def steps(self) -> list[int]:
        """Of the complete checkpoints, rising."""
        return complete_steps(self.folder)

    def newest(self) -> Path | None:
        """What to resume: ``DFLASH_RESUME`` (a checkpoint, or ``no``), else the newest complete.

        torchrun starts failed ranks again with the variables of the first time: what these have led
        to since is newer than what they name, which may be deleted by now.
        """
        asked = os.environ.get(RESUME_VARIABLE)
        newest = newest_of_run(self.folder)
        if not asked:
            return newest
        restarted = os.environ.get(RESTARTS, "0") != "0"
        if restarted and self.steps() and newest is not None:
            return newest if read_record(newest).get("asked") == asked else named()
        return named()

    def abandon_beyond(self, step: int) -> Path | None:
        """Put aside what this folder holds of later steps; returns where to, null if nothing.

        A run that goes on from an earlier checkpoint, or begins anew, makes those steps again:
        beside later ones its own would be the oldest, deleted first and never resumed.
        """
        beyond = [later for later in self.steps() if later > step]
        if not beyond:
            return None
        aside = self.folder / ABANDONED
        aside.mkdir(exist_ok=True)
        for path in (step_path(self.folder, later) for later in beyond):
            shutil.rmtree(aside / path.name, ignore_errors=True)
            path.rename(aside / path.name)
        best = self.folder / "best"
        if not best.exists():
            best.unlink(missing_ok=True)
        return aside

    def check(self) -> None:
        """Raise ``CheckpointError`` if what would be resumed is of another config, before a device
        is touched; reads no tensor."""
        path = self.newest()
        if path is not None:
            self._refuse_other(path, read_record(path)["fingerprint"])

    def load(self, path: Path) -> Loaded:
        """Raises ``CheckpointError`` unless it is whole and of this config."""
        record = read_record(path)
        self._refuse_other(path, record["fingerprint"])
        state: dict[str, Any] = {"skipped": record["skipped"]}
        for kind in KINDS:
            state[kind] = read_tensors(path / f"{kind}.safetensors")
        return Loaded(path, record["step"], state, record.get("best"))

    def _refuse_other(self, path: Path, theirs: dict[str, Any]) -> None:
        ours = self.fingerprint
        different = [k for k in sorted(ours.keys() | theirs.keys()) if ours.get(k) != theirs.get(k)]
        if different:
            lines = "\n".join(
                f"  {k}: {theirs.get(k, 'absent')!r} in the checkpoint,"
                f" {ours.get(k, 'absent')!r} in the config"
                for k in different[:8]
            )
            raise CheckpointError(
                f"{path} was made by another config:\n{lines}",
                next_step="resume with the config it was made by, or set"
                f" {RESUME_VARIABLE}=no to start anew",
            )

    def _prune(self) -> None:
        steps = self.steps()
        best = self.folder / "best"
        kept = set(steps[-self.config.keep_last :])
        if best.is_symlink():
            named = best.readlink().name
            kept |= {step for step in steps if step_path(self.folder, step).name == named}
        if self.config.keep_every:
            kept |= {step for step in steps if step % self.config.keep_every == 0}
        for step in set(steps) - kept:
            # Renamed first: a kill in the middle of the removal leaves a `.part`, not half of one.
            path = step_path(self.folder, step)
            doomed = path.with_name(path.name + PART)
            path.rename(doomed)
            shutil.rmtree(doomed)

    def _remove_parts(self) -> None:
        for path in self.folder.glob(f"step-*{PART}"):
            shutil.rmtree(path)


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """Of a run's checkpoints folder, rising."""
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    steps = {int(name) for name in names if name.isdecimal()}
    return sorted(step for step in steps if (step_path(folder, step) / STATE).is_file())


def named() -> Path | None:
    """The checkpoint that ``DFLASH_RESUME`` names."""
    wanted = os.environ.get(RESUME_VARIABLE) or "no"
    return None if wanted == "no" else Path(wanted)


def newest_of_run(folder: Path) -> Path | None:
    """The newest complete checkpoint there, else the one elsewhere that the run goes on from."""
    steps = complete_steps(folder)
    return step_path(folder, steps[-1]) if steps else named()


def newest_step(folder: Path) -> int:
    """Steps that a resume need not do again."""
    path = newest_of_run(folder)
    try:
        return 0 if path is None else int(read_record(path)["step"])
    except CheckpointError:
        # It was to be read, and was not yet.
        return 0


def read_record(path: Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint folder."""
    try:
        return read_object((path / STATE).read_bytes(), CheckpointState)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is no complete checkpoint: it has no {STATE}",
            next_step="name a folder checkpoints/step-… of a run",
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path / STATE} cannot be read: {error}",
            next_step=f"resume from an earlier checkpoint of the run ({RESUME_VARIABLE})",
        ) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Raises ``CheckpointError`` for a file that is damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged or cut short: {error}",
            next_step=f"resume from an earlier checkpoint of the run ({RESUME_VARIABLE})",
        ) from None


def fitting(state: dict[str, Any], kind: str, name: str, shape: Sequence[int]) -> Tensor:
    """A tensor of a loaded checkpoint. Raises ``CheckpointError`` unless it is there and of this
    shape: `copy_` would spread a single row over all."""
    found = state[kind].get(name)
    if found is not None and found.shape == torch.Size(shape):
        return cast(Tensor, found)
    has = "is absent" if found is None else f"has shape {tuple(found.shape)}"
    raise CheckpointError(
        f"{name} of {kind}.safetensors {has} in the checkpoint, the drafter's is {tuple(shape)}",
        next_step=f"resume from another checkpoint of the run ({RESUME_VARIABLE})",
    )


def sync_tree(folder: Path) -> None:
    """Every file and folder below, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drafter_folder(path: Path) -> tuple[Path, TargetConfig | None]:
    """(the folder in z-lab form, the target if it is known) of a checkpoint or an export."""
    if (path / STATE).is_file():
        fields = read_record(path)["fingerprint"].items()
        target = {k.removeprefix("target."): v for k, v in fields if k.startswith("target.")}
        try:
            return path / "drafter", TargetConfig.model_validate(target)
        except ValidationError as error:
            problem = error.errors()[0]
            raise CheckpointError(
                f"{path / STATE} does not say which target the drafter was trained for:"
                f" target.{'.'.join(map(str, problem['loc']))}: {problem['msg']}",
                next_step=f"name {path / 'drafter'} instead, and its target",
            ) from None
    if not path.is_dir():
        raise CheckpointError(
            f"there is no folder {path}", next_step="name a folder checkpoints/step-… of a run"
        )
    return path, None
