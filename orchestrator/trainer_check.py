"""The trainer judges its own config, in the container, before anything starts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial

from orchestrator.channel import AgentChannel
from orchestrator.errors import RefusedError, UsageError
from orchestrator.fleet import Notice
from orchestrator.request import exec_ending
from orchestrator.target import Target

# It imports torch and transformers' models and reads the target's tokenizer: seconds from a warm
# disk, 15 s from a cold one or of a GGUF file, whose vocabulary is parsed in Python.
# Who waits longer than this is told for what.
SILENT_S = 1.0
AGAIN_S = 20.0


def argv(target: Target, config: str) -> list[str]:
    """``config`` is a path inside the release."""
    return [target.settings.python, "-m", "trainer", "check", config]


def check(
    channel: AgentChannel,
    target: Target,
    config: str,
    variables: Mapping[str, str],
    release_path: str | None,
    notice: Notice,
) -> None:
    """Wait for its verdict.

    :raises UsageError: with the trainer's own message.
    :raises RefusedError: too little memory, or it could not be asked.
    """
    over = threading.Event()
    telling = partial(_tell_waiting, over, f"{target.name}: the trainer checks {config}", notice)
    threading.Thread(target=telling, daemon=True).start()
    try:
        request = channel.request(
            "exec",
            command=argv(target, config),
            env=dict(variables),
            python=target.settings.python,
            cwd=release_path,
        )
        answer, _, said = request.outputs()
    finally:
        over.set()
    code = answer["exit_code"]
    if code == 0:
        return
    if code is None:
        raise RefusedError(
            f"`trainer check {config}` {exec_ending(answer)}",
            next_step="signal 9 is how the kernel ends what needs more memory than the container "
            f"has: dflashctl doctor {target.arguments}",
            **target.place,
        )
    # Libraries may have warned before the trainer's own message.
    text = said.decode(errors="replace").strip().rpartition("error: ")[2]
    what, _, step = text.partition("\n  next: ")
    lines = what.splitlines()[-12:]
    kind = UsageError if code == 2 else RefusedError
    raise kind(
        "\n    ".join(lines) or f"`trainer check {config}` {exec_ending(answer)}",
        next_step=step.strip() or f"correct {config}",
        **target.place,
    )


def _tell_waiting(over: threading.Event, what: str, notice: Notice) -> None:
    """Why nothing is seen yet, again and again until it is ``over``."""
    if over.wait(SILENT_S):
        return
    notice(f"{what} there; importing torch can take 15 s")
    waited = SILENT_S
    while not over.wait(AGAIN_S):
        waited += AGAIN_S
        notice(
            f"{what} there, for {waited:.0f} s now: a busy machine imports torch slowly, and a "
            "target named by its hub name is looked up, without a way out for over a minute; "
            "Ctrl-C ends it, nothing is started"
        )
