"""`export`: a checkpoint in the form of a public reader."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from safetensors import SafetensorError

from trainer.checkpoint import drafter_folder
from trainer.drafter import format as drafter_format
from trainer.errors import ConfigError, ResourceError
from trainer.telemetry import say


def export(options: Namespace) -> int:
    """A checkpoint in the form of a public reader."""
    folder, target = drafter_folder(options.checkpoint)
    config, weights = drafter_format.load(folder)
    if options.folder.exists() and not (options.folder.is_dir() and is_empty(options.folder)):
        raise ConfigError(f"{options.folder} is no empty folder", next_step="name a new folder")
    form: drafter_format.Form = "z-lab" if options.form == "zlab" else "speculators"
    try:
        drafter_format.save(
            options.folder, config, weights, form=form, verifier=target.model if target else ""
        )
    except (OSError, SafetensorError) as error:
        raise ResourceError(
            f"cannot write the export to {options.folder}: {error}",
            next_step="free disk space there, or name another folder",
        ) from None
    say(f"wrote {options.folder} in the {form} form")
    return 0


def is_empty(folder: Path) -> bool:
    return next(folder.iterdir(), None) is None
