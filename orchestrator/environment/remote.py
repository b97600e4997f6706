"""Environments out of containers: one request to collect one, one to read what a run recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.agent_failure import kind_of
from orchestrator.channel import AgentChannel
from orchestrator.environment import collector
from orchestrator.environment.lock import Environment, parse
from orchestrator.environment.sync import Plan
from orchestrator.errors import DflashctlError, NotFoundError, RefusedError, RunFailed
from orchestrator.paths import ContainerPaths, RunPaths
from orchestrator.request import Request, exec_ending
from orchestrator.target import Target

# nvidia-smi has been seen to need 8 s without a persistence daemon.
COLLECT_S = 60
# Nobody waits for it: its interpreter's start alone would take 50 ms of a launch.
IN_BACKGROUND = ("sh", "-c", '"$@" </dev/null >/dev/null 2>&1 &', "sh")


def collector_argv(python: str, into: str | None = None) -> list[str]:
    """Prints the environment of ``python``, or leaves it in the file ``into``."""
    source = Path(collector.__file__).read_text(encoding="utf-8")
    return [python, "-c", source, *([into] if into else [])]


def collect(channel: AgentChannel, target: Target) -> Environment:
    """The container's environment as it is now.

    :raises RefusedError: its interpreter cannot run the collector.
    """
    python = target.settings.python
    request = channel.request("exec", command=collector_argv(python), timeout_s=COLLECT_S, cwd="/")
    answer, stdout, stderr = request.outputs()
    if answer["exit_code"] != 0:
        said = stderr.decode(errors="replace").strip().splitlines()
        raise RefusedError(
            f"{python} could not tell its environment: {said[-1] if said else 'no answer'}",
            next_step="`dflashctl doctor` looks at the interpreter",
            **target.place,
        )
    return parse(stdout, f"the environment of {target.name}")


def record(
    channel: AgentChannel, target: Target, run_id: str, variables: Mapping[str, str]
) -> Request:
    """Leave the environment in the folder of a run that is being started. See :func:`finish`.

    Sent beside ``run.start``, not after it: the collector waits for the run's folder.
    """
    into = ContainerPaths(target.settings.workdir).run(run_id).environment
    return channel.request(
        "exec",
        command=[*IN_BACKGROUND, *collector_argv(target.settings.python, into)],
        env=dict(variables),
        python=target.settings.python,
        cwd="/",
        timeout_s=COLLECT_S,
    )


def finish(recording: Request) -> None:
    """Wait until the collector is on its own. A run without its record is a run all the same."""
    with contextlib.suppress(DflashctlError):
        recording.result()


def recorded(channel: AgentChannel, target: Target, run_id: str) -> Environment:
    """What a run wrote down of its environment when it began.

    :raises NotFoundError: it wrote nothing (an older run, or one that ended at once).
    """
    name = RunPaths("").environment
    request = channel.request("pull.read", run_id=run_id, path=name)
    try:
        text = b"".join(payload for _, payload in request.frames())
    except DflashctlError as error:
        if kind_of(error) != "file.not_found":
            raise
        raise NotFoundError(
            "the run recorded no environment",
            next_step=f"compare its container: dflashctl env diff … {target.name}",
            **target.place,
            run_id=run_id,
        ) from None
    return parse(text, f"{name} of {run_id}")


def install(channel: AgentChannel, target: Target, plan: Plan) -> Iterable[bytes]:
    """Run the plan's commands; their output as it comes.

    :raises RunFailed: a command failed; what was installed before it stays.
    """
    for command in plan.commands:
        request = channel.request("exec", command=command, cwd="/")
        for head, payload in request.frames():
            if "stream" in head:
                yield payload
        answer = request.result()
        if answer["exit_code"] != 0:
            raise RunFailed(
                f"{command[0]} {exec_ending(answer)}; its own words are above",
                next_step="mend what it names (a package index, a full disk) and sync again",
                **target.place,
            )
