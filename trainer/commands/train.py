"""`train`: the run itself, or the torchrun that starts its ranks."""

from __future__ import annotations

import os
from argparse import Namespace

from trainer.config import load_config
from trainer.pipeline.torchrun import become_torchrun, needs_ranks


def train(options: Namespace) -> int:
    config = load_config(options.config)
    if needs_ranks(config, os.environ):
        traced = ["--trace-compile"] if options.trace_compile else []
        become_torchrun(config, ["train", str(options.config), *traced])
    # What becomes torchrun is soon forgotten, and trains nothing itself.
    from trainer.train import train as run_training

    return run_training(config)
