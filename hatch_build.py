"""Puts the git commit into the wheel and the sdist, so that `dflashctl --version` can tell it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds ``orchestrator/_commit.txt``; the checkout itself stays as it is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        sys.path.insert(0, str(root))
        from orchestrator.version import COMMIT_FILE, commit_of

        place = f"orchestrator/{COMMIT_FILE}"
        # An sdist brings the file along; an editable install asks git each time.
        if version == "editable" or (root / place).exists():
            return
        if found := commit_of(root):
            self._folder = tempfile.TemporaryDirectory()
            path = Path(self._folder.name) / COMMIT_FILE
            path.write_text(found + "\n", encoding="ascii")
            build_data["force_include"][str(path)] = place
