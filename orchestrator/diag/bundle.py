"""One file that holds all that a diagnosis saw, for a person elsewhere: ``run.tar.zst``.

    manifest.json   format, when, place, what was redacted, versions
    log.txt         the log (its end, if it is long)
    probes.json     every probe
    report.json     what was found
    report.txt      the same for reading
    run.json, environment.json    the run's own records, of a live run

Secrets are taken out while writing. ``run.tar.gz`` is written where that is asked for: a
``.tar.zst`` is smaller and needs ``zstandard``, an optional dependency.
"""

from __future__ import annotations

import gzip
import io
import json
import shlex
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from orchestrator.diag.finding import Report
from orchestrator.diag.redact import redact
from orchestrator.diag.report import render
from orchestrator.errors import UsageError
from orchestrator.laptop_path import writing

FORMAT = 1
LOG_BYTES = 64 << 20  # the end of a longer log; what matters lies there, and a mail has its limits
_ZSTD = b"\x28\xb5\x2f\xfd"
MAX_MEMBER = 512 << 20


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read."""

    log: bytes
    probes: dict[str, Any]
    manifest: dict[str, Any]


def write_bundle(
    path: Path,
    *,
    log: Path | None,
    probes: Mapping[str, Any],
    report: Report,
    about: Mapping[str, Any] | None = None,
    records: Mapping[str, Mapping[str, Any]] | None = None,
    addresses: bool = False,
) -> None:
    """``about`` goes into the manifest (place, run, release); ``records`` are files of their own,
    by name. Written beside, then renamed."""
    text, cut = _log_text(log)
    members = {
        "manifest.json": _json(
            {
                "format": FORMAT,
                **dict(about or {}),
                "log_cut_bytes": cut,
                "redacted": ["secrets", *(["addresses"] if addresses else [])],
            }
        ),
        "log.txt": text,
        "probes.json": _json(dict(probes)),
        "report.json": _json(report.as_dict()),
        "report.txt": render(report),
        **{name: _json(record) for name, record in (records or {}).items()},
    }
    check_packer(path)
    part = path.with_name(path.name + ".part")
    with writing(path):
        with _packed(part) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
            for name, content in members.items():
                data = redact(content, addresses=addresses).encode("utf-8", "surrogateescape")
                info = tarfile.TarInfo(name)
                info.size = len(data)
                info.mode = 0o600
                archive.addfile(info, io.BytesIO(data))
        part.replace(path)


def read_bundle(path: Path) -> Bundle:
    """Raises ``UsageError`` if ``path`` is no bundle of ours."""
    members: dict[str, bytes] = {}
    try:
        with _unpacked(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for info in archive:
                file = archive.extractfile(info) if info.isfile() else None
                if file is not None and info.size <= MAX_MEMBER:
                    members[info.name] = file.read()
        manifest = json.loads(members["manifest.json"])
        probes = json.loads(members["probes.json"])
    except (OSError, tarfile.TarError, KeyError, ValueError, EOFError) as error:
        raise UsageError(
            f"{path} cannot be read as a bundle: {error}",
            next_step="give a file that `dflashctl diag --bundle FILE` wrote; a saved log goes to "
            "--log",
        ) from None
    if manifest.get("format") != FORMAT or not isinstance(probes, dict):
        raise UsageError(
            f"the bundle {path} has format {manifest.get('format')!r}, this version reads {FORMAT}",
            next_step="read it with the version of dflashctl that wrote it",
        )
    return Bundle(members.get("log.txt", b""), probes, manifest)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n"


def _log_text(log: Path | None) -> tuple[str, int]:
    if log is None:
        return "", 0
    size = log.stat().st_size
    cut = max(0, size - LOG_BYTES)
    with log.open("rb") as stream:
        stream.seek(cut)
        return stream.read().decode("utf-8", "surrogateescape"), cut


def check_packer(path: Path) -> None:
    """For before anything is looked at.

    :raises UsageError: it is a folder, or what packs a bundle of that name is not installed.
    """
    if path.is_dir():
        raise UsageError(
            f"--bundle {path}: that is a folder", next_step=f"name a file: {path / 'run.tar.gz'}"
        )
    if not _is_gzip(path):
        _zstandard()


def _is_gzip(path: Path) -> bool:
    return path.name.removesuffix(".part").endswith((".gz", ".tgz"))


@contextmanager
def _packed(path: Path) -> Iterator[IO[bytes]]:
    if _is_gzip(path):
        with gzip.open(path, "wb") as stream:
            yield stream  # type: ignore[misc]
        return
    zstandard = _zstandard()
    with path.open("wb") as raw, zstandard.ZstdCompressor(level=9).stream_writer(raw) as stream:
        yield stream


@contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw:
        magic = raw.read(4)
        raw.seek(0)
        if magic == _ZSTD:
            zstandard = _zstandard()
            with zstandard.ZstdDecompressor().stream_reader(raw) as stream:
                yield stream
        else:
            with gzip.open(raw) as stream:
                yield stream  # type: ignore[misc]


def _install_zstandard() -> str:
    """Into the environment that this runs in. One of pipx has no pip of its own."""
    if Path(sys.prefix, "pipx_metadata.json").is_file():
        return "pipx inject dflashctl zstandard"
    return f"{shlex.quote(sys.executable)} -m pip install zstandard"


def _zstandard() -> Any:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise UsageError(
            "bundles not named .tar.gz are packed by the package zstandard, which is not installed",
            next_step=f"{_install_zstandard()}; or name the file .tar.gz, which needs nothing",
        ) from None
    return zstandard
