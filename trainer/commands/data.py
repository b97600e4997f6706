"""`data prepare` and `data check`."""

from __future__ import annotations

import json
from argparse import Namespace

from trainer.config import load_config
from trainer.data.conversation import Rejection
from trainer.data.prepare import load_prepared
from trainer.data.sources import check_files
from trainer.data.template import ChatTemplate
from trainer.errors import DataError
from trainer.outlook import data_folder, run_folder
from trainer.resolve import Resolved, resolve
from trainer.stopping import Stopped, StopSignals
from trainer.telemetry import say


def data(options: Namespace) -> int:
    resolved = resolve(load_config(options.config))
    if options.action == "check":
        return _check_data(resolved)
    from trainer.run import Targets, make_data

    folder = run_folder(resolved.config)
    with StopSignals():
        try:
            prepared = make_data(resolved, Targets(resolved), folder)
        except Stopped as stop:
            say(f"stopped by {stop}; the same command continues")
            return stop.exit_code
    say(json.dumps(prepared.report, indent=2))
    return 0


def _check_data(resolved: Resolved) -> int:
    """Every line read and encoded; the target itself does nothing."""
    config = resolved.config
    ChatTemplate(resolved.tokenizer)
    folder = data_folder(config, run_folder(config))
    prepared = load_prepared(config, folder)
    if prepared is not None:
        say(f"{folder} is complete")
        say(json.dumps(prepared.report, indent=2))
        return 0
    rejected = 0

    def tell(item: Rejection) -> None:
        nonlocal rejected
        rejected += 1
        say(f"{item.where}: {item.reason}")

    report = check_files(config, resolved.tokenizer, tell, resolved.drafter.vocab_size)
    say(json.dumps(report, indent=2))
    say(f"{rejected} lines are left out")
    made = config.data.make.prompts if config.data.make else []
    invented = any(source.kind == "self" for source in made)
    if not (report["samples"]["samples"] or report["prompts"] or invented):
        todo = "mend the lines named above" if rejected else "the files are empty; name others"
        raise DataError("no line can be used", next_step=todo)
    return 0
