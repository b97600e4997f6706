"""``python -m orchestrator.cli`` is ``dflashctl``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

# `-m` puts the folder one stands in first: a `trainer` of the user's own would hide ours.
with contextlib.suppress(FileNotFoundError):
    if Path(sys.path[0]) == Path.cwd() != Path(__file__).parents[2]:
        del sys.path[0]

from orchestrator.cli import main

main()
