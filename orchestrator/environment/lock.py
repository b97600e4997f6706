"""A container's environment as data, and the lock file that keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.errors import NotFoundError, UsageError
from orchestrator.laptop_path import read_text


class _Part(BaseModel):
    # A newer collector may tell more than this version compares.
    model_config = ConfigDict(extra="ignore", frozen=True)


class System(_Part):
    os: str = ""
    kernel: str = ""
    machine: str = ""
    libc: str = ""
    cpus: int = 0
    memory_gb: float = 0


class Python(_Part):
    version: str
    implementation: str = "CPython"
    executable: str = ""
    virtual: bool = False
    managed: bool = False
    """The distribution's own Python, into which pip must not install (PEP 668)."""


class Torch(_Part):
    version: str
    """``2.11.0+cu130``"""
    cuda: str | None = None
    """The CUDA that it was built for; null in a CPU build."""
    hip: str | None = None


class Driver(_Part):
    version: str
    nvidia_smi: str | None = None


class Gpu(_Part):
    uuid: str = ""
    name: str
    memory: str = ""
    capability: str = ""


class Tools(_Part):
    uv: str | None = None
    pip: str | None = None


class Cache(_Part):
    """A compile cache: what is in it decides whether the first steps compile."""

    path: str
    files: int = 0
    bytes: int = 0
    newest: float | None = None


class Environment(_Part):
    """Everything that the collector tells. Package names are normalized (PEP 503)."""

    format: int = Field(1, le=1)
    time: float = 0
    hostname: str = ""
    system: System = System()
    python: Python
    torch: Torch | None = None
    driver: Driver | None = None
    gpus: tuple[Gpu, ...] = ()
    packages: dict[str, str] = {}
    sources: dict[str, str] = {}
    """Where a package came from that came from no index: a path or a repository with a commit."""
    tools: Tools = Tools()
    caches: dict[str, Cache] = {}
    variables: dict[str, str] = {}
    """Those that change a training run; a secret's value is ``(set)``."""

    def lock_text(self) -> str:
        """The lock file: JSON with sorted keys, so that two of them differ line by line."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"


def parse(text: str | bytes, source: str) -> Environment:
    """An environment from JSON.

    :raises UsageError: naming ``source`` and what does not fit.
    """
    try:
        return Environment.model_validate(json.loads(text))
    except ValueError as error:
        raise UsageError(
            f"{source} is no environment: {_reason(error)}",
            next_step="`dflashctl env freeze` writes one",
        ) from None


def _reason(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first: Any = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return f"not JSON ({error})"


def read_lock(path: Path) -> Environment:
    """:raises NotFoundError: no such file. :raises UsageError: it is not a lock file."""
    instead = f"write one: dflashctl env freeze TARGET -o {path}"
    return parse(read_text(path, "lock file", instead, absent=NotFoundError), str(path))
