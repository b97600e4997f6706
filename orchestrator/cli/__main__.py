"""``python -m orchestrator.cli`` is ``dflashctl``."""

from __future__ import annotations

import sys

try:
    import contextlib
    from pathlib import Path

    # `-m` puts the folder one stands in first: a `trainer` of the user's own would hide ours.
    with contextlib.suppress(FileNotFoundError):
        if Path(sys.path[0]) == Path.cwd() != Path(__file__).parents[2]:
            del sys.path[0]

    from orchestrator.cli import main
except KeyboardInterrupt:
    # Nothing is begun yet; `main` sees to itself.
    sys.exit(130)

main()
