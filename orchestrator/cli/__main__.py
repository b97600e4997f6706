"""``python -m orchestrator.cli`` is ``dflashctl``."""

from __future__ import annotations

from orchestrator.cli import main

main()
