"""Which files an inventory is made of, and whether they are still the same ones."""

from __future__ import annotations

from pathlib import Path

from orchestrator.paths import LaptopPaths

Stamp = list[list[str | int]]


def files_of(source: Path | None, laptop: LaptopPaths) -> list[Path]:
    """The files at ``source`` (file or folder), or the user's own."""
    if source is None:
        found = [laptop.inventory] if laptop.inventory.exists() else []
        return found + _yaml_files(laptop.inventory_folder)
    return _yaml_files(source) if source.is_dir() else [source]


def stamp(files: list[Path]) -> Stamp | None:
    """Equal for files that nobody has changed; None where one cannot be read."""
    try:
        found = [(path.absolute(), path.stat()) for path in files]
    except OSError:
        return None
    return [
        [str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        for path, status in found
    ]


def _yaml_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.suffix in {".yaml", ".yml"})
