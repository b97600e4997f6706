"""`export`: a checkpoint in the form of a public reader."""

from __future__ import annotations

from argparse import Namespace

from trainer.checkpoint import drafter_folder
from trainer.drafter import format as drafter_format
from trainer.errors import ConfigError
from trainer.telemetry import say


def export(options: Namespace) -> int:
    """A checkpoint in the form of a public reader."""
    folder, target = drafter_folder(options.checkpoint)
    config, weights = drafter_format.load(folder)
    if options.folder.exists() and any(options.folder.iterdir()):
        raise ConfigError(f"{options.folder} is not empty", next_step="name a new folder")
    form: drafter_format.Form = "z-lab" if options.form == "zlab" else "speculators"
    drafter_format.save(
        options.folder, config, weights, form=form, verifier=target.model if target else ""
    )
    say(f"wrote {options.folder} in the {form} form")
    return 0
