"""The fixed set of actions and what each may be told. Pure data: the edge gives them functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _absent(value: Any) -> Any:
    # A variable's default is often "", which stands for "not given".
    return None if value == "" else value


Text = Annotated[str | None, BeforeValidator(_absent)]
Argv = Annotated[list[str], Field(min_length=1)]


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Preflight(Action):
    """Look at everything a launch needs; the step fails where `doctor` would."""

    trainer: bool = False
    """Also look for what our trainer needs (torch, transformers, pydantic)."""


class Env(Action):
    """Compare the container's environment with a lock file, or write one."""

    lock: Text = None
    """Lock file on this machine to compare with."""
    save: Text = None
    """Where to write the container's own lock file."""
    sync: bool = False
    """Install what differs from ``lock``."""
    fail_on: Literal["breaks", "may matter", "never"] = "breaks"
    """The least difference that fails the step."""


class Push(Action):
    """Push code as a release. Later commands run in it, and a later launch starts from it."""

    code: Text = None
    """Folder on this machine; null is where the command stands."""
    config: Text = None
    """A trainer config on this machine: it and the trainer are taken along."""


class Exec(Action):
    """Run one command in each container and show its output."""

    command: Argv
    """argv, handed on word by word; no shell reads it. A first word ``python`` stands for the
    container's interpreter."""
    cwd: Text = None
    """Null: the release that was pushed, else the workdir."""
    env: dict[str, str] = {}
    """Variables for the command."""
    timeout_s: float | None = Field(None, gt=0)
    """Seconds after which it is ended and the step fails; null waits for ever."""
    ok: list[int] = [0]
    """Exit codes that are good."""


class Warmup(Action):
    """Run a command that fills the compile caches before the run starts."""

    command: Argv
    """As in ``exec``."""
    cwd: Text = None
    """As in ``exec``."""
    env: dict[str, str] = {}
    """As in ``exec``."""
    timeout_s: float = Field(3600, gt=0)
    """Seconds. An hour: the compile of a large drafter takes minutes, its data longer."""


class Launch(Action):
    """Start a run; what it starts is decided as for the verb `launch`. Several containers make one
    run, a node each."""

    command: Annotated[list[str] | None, BeforeValidator(lambda v: v or None)] = None
    """argv to start in place of the trainer or the start script."""
    config: Text = None
    """A trainer config on this machine."""
    code: Text = None
    """Folder on this machine; null is what ``push`` took, else where the command stands."""
    push: bool = True
    """False starts what is already there."""
    name: Text = None
    """The run's name; null is ``run``."""
    env: dict[str, str] = {}
    """Variables for the run."""
    env_file: Text = None
    """Variables that are kept secret."""
    log: Text = None
    """A link to the log at this path in the container."""
    force: bool = False
    """Start although another run lives there."""
    restarts: int = Field(0, ge=0)
    """Attempts after the first when the command fails, each from the newest checkpoint."""
    ranks: Annotated[int | None, BeforeValidator(lambda v: v or None)] = Field(None, ge=1)
    """Processes of each of several nodes; null: as many as it has GPUs."""
    resume: bool = False
    """Go on from the newest complete checkpoint of ``run`` (null: the newest run)."""
    run: Text = None
    """The run that ``resume`` goes on from."""


class Wait(Action):
    """Wait until the run has come so far."""

    until: Literal["training", "ended"] = "ended"
    """``training``: past compiling, or already ended well. ``ended``: finished; a run that failed
    or was stopped fails the step."""
    timeout_s: float | None = Field(None, gt=0)
    """Seconds after which the step fails; the run goes on. Null waits for ever."""
    run: Text = None
    """A run id; null is the run of this play, else the newest."""


class Diag(Action):
    """Say what is wrong with the run."""

    bundle: Text = None
    """A file on this machine for all that was seen, secrets redacted; `diag --from` reads it."""
    fail_on: Literal["fatal", "warning", "never"] = "fatal"
    """The least finding that fails the step."""
    run: Text = None
    """As in ``wait``."""


class Pull(Action):
    """Fetch from the run's container, verified."""

    what: str = "checkpoint"
    """``checkpoint`` (the newest complete one and the best, with logs and records), ``logs``,
    ``run`` (its whole folder), or a path."""
    to: str = "."
    """Folder on this machine; in it each run has its own, which ignores itself (.gitignore)."""
    run: Text = None
    """As in ``wait``."""


ACTIONS: dict[str, type[Action]] = {
    "preflight": Preflight,
    "env": Env,
    "push": Push,
    "exec": Exec,
    "warmup": Warmup,
    "launch": Launch,
    "wait": Wait,
    "diag": Diag,
    "pull": Pull,
}
