"""What to install so that an environment has the packages of a lock file, as argv lists. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.environment.compare import numbers
from orchestrator.environment.lock import Environment
from orchestrator.errors import RefusedError

# They install packages; which version does so changes nothing in a run.
INSTALLERS = frozenset({"pip", "setuptools", "wheel", "uv"})
TORCH_INDEX = "https://download.pytorch.org/whl/"


@dataclass(frozen=True)
class Plan:
    """Commands in order, and what of the lock file cannot be had this way."""

    commands: list[list[str]]
    left: list[str]
    wanted: dict[str, str]
    """Package → requirement."""


def plan(lock: Environment, now: Environment) -> Plan:
    """Packages are added and changed, never removed.

    :raises RefusedError: no installer is there, or the interpreter is the distribution's own.
    """
    wanted: dict[str, str] = {}
    left: list[str] = []
    for name, version in sorted(lock.packages.items()):
        if name in INSTALLERS or now.packages.get(name) == version:
            continue
        origin = lock.sources.get(name)
        if origin is None:
            wanted[name] = f"{name}=={version}"
        elif origin.startswith(("git+", "hg+", "svn+", "bzr+", "https:")):
            wanted[name] = f"{name} @ {origin}"
        else:
            left.append(f"{name} {version}: it was installed from {origin}")
    if numbers(lock.python.version)[:2] != numbers(now.python.version)[:2]:
        left.insert(0, f"Python {lock.python.version}: this interpreter is {now.python.version}")
    if not wanted:
        return Plan([], left, {})
    return Plan([_command(now, list(wanted.values()), _backend(wanted))], left, wanted)


def _backend(wanted: dict[str, str]) -> str | None:
    """``cu130`` where torch is wanted in a build that only torch's own index has."""
    local = wanted.get("torch", "").partition("+")[2]
    return local or None


def _command(now: Environment, requirements: list[str], backend: str | None) -> list[str]:
    python = now.python.executable
    if now.python.managed:
        raise RefusedError(
            f"{python} belongs to the distribution, and nothing may be installed into it",
            next_step="make a virtual environment in the container (python3 -m venv PATH) and set "
            "`python: PATH/bin/python` in the inventory",
        )
    if now.tools.uv:
        index = ["--torch-backend", backend] if backend else []
        return [now.tools.uv, "pip", "install", "--python", python, *index, *requirements]
    if now.tools.pip:
        index = ["--extra-index-url", TORCH_INDEX + backend] if backend else []
        return [python, "-m", "pip", "install", *index, *requirements]
    raise RefusedError(
        f"neither uv nor pip can install for {python}",
        next_step="in the container: `python3 -m ensurepip` for that interpreter, or install uv",
    )
