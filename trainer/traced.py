"""``python -m trainer trace SCRIPT``: any training script, with a record of who traces.

The script is not edited. Each distinct thread and stack that sets torch's FX-tracing flag becomes
one ``fx_trace`` event in the run's folder, which `dflashctl diag` reads beside the error that the
flag caused in another thread.
"""

from __future__ import annotations

import os
import runpy
import sys
from argparse import Namespace
from pathlib import Path

from trainer.compile_lock import TraceLog
from trainer.errors import ConfigError
from trainer.telemetry import RUN_DIR_VARIABLE, RunWriter


def trace(options: Namespace) -> int:
    script: Path = options.script
    if not script.is_file():
        raise ConfigError(
            f"there is no script {script}",
            next_step="give the path of a Python file; its arguments follow it",
        )
    writer = RunWriter(Path(os.environ.get(RUN_DIR_VARIABLE) or "."))
    log = TraceLog(writer.event)
    # As `python SCRIPT` sets both.
    sys.argv = [str(script), *options.arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        log.close()
        writer.close()
    return 0
