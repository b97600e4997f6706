"""Preflight, push, start: one connection, one ``pct exec``, two round trips beyond it.

Preflight and the manifest go out together. When both answers are there, the missing blobs, the
commit and the start are sent without waiting for one another.
"""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator import fleet as fleets
from orchestrator import lease, pct, preflight, trainer_check
from orchestrator.channel import AgentChannel
from orchestrator.environment import remote as environments
from orchestrator.errors import (
    ConnectionLost,
    HostUnreachable,
    NotFoundError,
    RefusedError,
    TransferError,
    UsageError,
)
from orchestrator.fleet import Fleet, Notice, Opening
from orchestrator.laptop_path import read_text
from orchestrator.push import Arrivals, Progress, Push, prune
from orchestrator.reconnect import reconnecting
from orchestrator.release import Release
from orchestrator.route import find_route
from orchestrator.target import HostTarget, Target
from orchestrator.terminal_text import counted

START_SCRIPT = "start_training.sh"
# Nothing was started, for certain.
REFUSALS = (RefusedError, UsageError, TransferError, NotFoundError)


@dataclass(frozen=True)
class Order:
    """What is to be started, all of it decided before anything is reached."""

    run_id: str
    name: str
    command: tuple[str, ...]
    config: str | None = None
    """The trainer's config inside the release."""
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Set for the run like ``environment``, but written to no record and no command line."""
    log_link: str | None = None
    force: bool = False
    restarts: int = 0
    """Attempts after the first that the supervisor makes by itself when the command fails, each
    from the newest complete checkpoint."""
    nodes: Mapping[str, Any] | None = None
    """Of one run on several containers: this one's rank, their number, all their run ids."""

    def start_fields(self, target: Target, release: Release | None) -> dict[str, Any]:
        """The fields of ``run.start``, except which release."""
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "name": self.name,
            "command": list(self.command),
            "env": dict(self.environment),
            "python": target.settings.python,
            "secrets": dict(self.secrets),
            "gpus": list(target.settings.gpus),
            "meta": self._meta(target, release),
            "force": self.force,
            "restart": {"max": self.restarts},
        }
        if self.log_link:
            fields["log_link"] = self.log_link
        return fields

    def _meta(self, target: Target, release: Release | None) -> dict[str, Any]:
        meta: dict[str, Any] = {"who": whoami(), "container": target.name}
        if self.config:
            meta["config"] = self.config
        if self.nodes:
            meta["nodes"] = dict(self.nodes)
        return {**meta, **(release.meta() if release else {})}


@dataclass(frozen=True)
class Started:
    """A run that lives."""

    run_id: str
    target: Target
    answer: dict[str, Any]
    checks: list[preflight.Check]

    def as_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            **self.target.place,
            "state": self.answer["state"],
            "release": self.answer.get("release"),
            "run_dir": self.answer.get("run_dir"),
            "log": self.answer.get("log"),
            "already": self.answer.get("already", False),
        }


def whoami() -> str:
    """``user@laptop`` for records."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def command_for(
    target: Target,
    words: Sequence[str],
    config: str | None,
    has_start_script: bool,
    pushed: str | None,
) -> tuple[str, ...]:
    """``-- COMMAND…``, else the trainer on the config, else the start script.

    :param pushed: the pushed folder, or None with ``--no-push``.
    :raises UsageError: none of the three.
    """
    if words and config:
        raise UsageError(
            "both --config and -- COMMAND were given",
            next_step="leave out one of them: --config FILE runs the trainer on FILE",
        )
    if words:
        return tuple(words)
    if config:
        return (target.settings.python, "-m", "trainer", "train", config)
    if has_start_script:
        return ("bash", START_SCRIPT)
    where = f"{pushed} has no {START_SCRIPT}" if pushed else "--no-push pushes nothing"
    raise UsageError(
        f"nothing to start: no -- COMMAND, no --config FILE, and {where}",
        next_step=f"give one: -- COMMAND…, --config FILE, or a {START_SCRIPT} at the top of the "
        "pushed folder",
        **target.place,
    )


def parse_environment(pairs: Sequence[str]) -> dict[str, str]:
    """``K=V`` words.

    :raises UsageError: a word without ``=``, or a key that no environment takes.
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier() or not key.isascii():
            # The value may be a secret: only the key is shown.
            raise UsageError(
                f"--env {key!r} is not of the form KEY=VALUE", next_step="write --env KEY=VALUE"
            )
        found[key] = value
    return found


def read_environment_file(path: Path) -> dict[str, str]:
    """``KEY=VALUE`` lines; ``#`` lines and empty ones are passed over; quotes round a value go.

    :raises UsageError: unreadable, or a line of another form (named by number, never shown).
    """
    lines = read_text(path, "--env-file", "give a file of KEY=VALUE lines").splitlines()
    found = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or not key.isascii():
            raise UsageError(
                f"--env-file {path}:{number} is not of the form KEY=VALUE",
                next_step="correct that line; # begins a comment",
            )
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found[key] = value
    return found


def take_secrets(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of this machine by name. A value among the words would be in its process list.

    :raises UsageError: a name that is none, or that is not set here (never showing more of it).
    """
    found = {}
    for name in names:
        key = name.partition("=")[0]
        if key != name or not key.isidentifier() or not key.isascii():
            raise UsageError(
                f"--secret {key!r} takes a variable's name alone",
                next_step=f"export it here and give --secret {key}, or write it into an --env-file",
            )
        if key not in environment:
            raise UsageError(
                f"--secret {key}: this variable is not set here",
                next_step=f"export {key} first, or write it into an --env-file",
            )
        found[key] = environment[key]
    return found


def check_log_link(path: str | None) -> None:
    """:raises UsageError: ``--log`` that is no absolute path."""
    if path is not None and not PurePosixPath(path).is_absolute():
        raise UsageError(
            f"--log {path} is not absolute",
            next_step="give a path inside the container, such as /workspace/train.log",
        )


def launch(
    fleet: Fleet,
    target: Target,
    order: Order,
    release: Release | None,
    *,
    notice: Notice,
    opening: Opening | None = None,
    progress: Progress | None = None,
) -> Started:
    """Start the run, or refuse with nothing half-made.

    :param opening: the channel, if somebody began to open it already.

    A link lost on the way is made again and everything is asked again under the same run id: a
    start whose reply was lost never makes a second process.

    :raises RefusedError: preflight, a run that lives there already, a held lease.
    :raises UnreachableError: the state is unknown; ``status`` of the run id tells once it answers.
    """
    reached = False
    arrivals = Arrivals(progress)

    def channels() -> AgentChannel:
        nonlocal opening
        first, opening = opening, None
        return first.result() if first else fleet.container(target)

    def work(channel: AgentChannel) -> Started:
        nonlocal reached
        reached = True
        return _attempt(fleet, channel, target, order, release, notice, arrivals)

    try:
        return reconnecting(fleet, channels, work, notice)
    except (ConnectionLost, HostUnreachable) as error:
        error.run_id = order.run_id if reached else None
        raise
    except REFUSALS:
        fleet.state.forget(order.run_id)
        raise


def _attempt(
    fleet: Fleet,
    channel: AgentChannel,
    target: Target,
    order: Order,
    release: Release | None,
    notice: Notice,
    arrivals: Arrivals,
) -> Started:
    looking = channel.request("preflight", **preflight_fields(target, order, release))
    push = Push(channel, release, arrivals, fleet.beside(target)) if release else None
    which: dict[str, Any] = {}
    sent = []
    if push is not None:
        # Without waiting for the preflight: a release that no run uses does no harm.
        blobs, commit = push.send()
        sent = [*blobs, commit]
        which["release_from"] = commit.number
    seen = looking.result()
    # Asked before the push and read after it: over 64 KB/s a minute lies between.
    checks = preflight.read(seen, target, looking.answered)
    refused = preflight.refusal(checks, target)
    if refused is not None:
        raise refused
    if order.config is not None:
        for request in sent:
            request.result()
        release_path = sent[-1].result()["path"] if sent else None
        trainer_check.check(channel, target, order.config, order.environment, release_path, notice)
    gpus = lease.wanted(seen["checks"], target)
    owner = {"user": whoami()}
    host = fleet.host(target.host) if gpus else None
    if host is not None:
        taken = lease.claim(host, target, order.run_id, gpus, owner, force=order.force)
        for words in taken:
            notice(f"{target.name}: took over the lease of {words}")
    fleet.state.remember(order.run_id, target)
    diff = release.git.diff if release and release.git else b""
    fields = {**order.start_fields(target, release), **which, "more": True}
    starting = channel.request("run.start", **fields)
    starting.feed([diff])
    recording = environments.record(channel, target, order.run_id, order.environment)
    # In this order, so that the first failure told is the first cause.
    try:
        for request in sent:
            request.result()
        answer = starting.result()
    except REFUSALS:
        if host is not None:
            lease.release(host, order.run_id)
        raise
    if release is not None:
        prune(channel, target, sent[-1])
    if host is not None:
        lease.confirm(host, target, order.run_id, gpus, owner)
    environments.finish(recording)
    return Started(order.run_id, target, answer, checks)


def preflight_fields(target: Target, order: Order, release: Release | None) -> dict[str, Any]:
    modules = preflight.MODULES if order.config else ()
    return preflight.request_fields(target, modules, release.bytes if release else None)


# What --dry-run shows


@dataclass(frozen=True)
class Step:
    """One thing that would be sent: to the host's shell, or to the agent."""

    label: str
    text: str

    def line(self) -> str:
        return f"{self.label:<7} {self.text}"


def plan(target: Target, order: Order, release: Release | None) -> list[Step]:
    """Exactly what :func:`launch` would send, secrets hidden, nothing reached."""
    hidden = replace(order, secrets=dict.fromkeys(order.secrets, "***"))
    steps = [
        Step("ssh", pct.shell_line(ssh_argv(target))),
        _agent("preflight", preflight_fields(target, order, release)),
    ]
    which = {}
    if release is not None:
        size = f"{counted(release.files, 'file')}, {release.bytes} bytes"
        steps += [
            _agent("release.begin", {"release": release.id}, f"({size})"),
            _agent("release.blobs", {}, "(those that the container lacks)"),
            _agent("release.commit", {"meta": release.meta()}),
        ]
        which = {"release": release.id}
    if order.config is not None:
        argv = trainer_check.argv(target, order.config)
        steps.append(_agent("exec", {"command": argv}))
    steps.append(_agent("run.start", {**hidden.start_fields(target, release), **which}))
    if release is not None:
        steps.append(_agent("release.prune", {"keep": target.settings.keep_releases}))
    return steps


def ssh_argv(target: Target) -> list[str]:
    """What OpenSSH would be given for the same command; the agent's loader stands as ``LOADER``."""
    return host_ssh_argv(target.host, [*fleets.agent_argv(target)[:-1], "LOADER"])


def host_ssh_argv(host: HostTarget, command: Sequence[str], *, terminal: bool = False) -> list[str]:
    """``command`` on a host by OpenSSH's client, under the inventory's settings."""
    settings = host.settings
    return pct.ssh_argv(
        host.address,
        command,
        user=settings.user or find_route(host).user,
        port=settings.port,
        identity_file=str(settings.identity_file) if settings.identity_file else None,
        known_hosts=str(settings.known_hosts) if settings.known_hosts else None,
        host_keys=settings.host_keys,
        ssh_config=str(settings.ssh_config) if settings.ssh_config else None,
        terminal=terminal,
    )


def _agent(op: str, fields: dict[str, Any], note: str = "") -> Step:
    text = f"{op} {json.dumps(fields, ensure_ascii=False)}" if fields else op
    return Step("agent", f"{text} {note}".rstrip())
