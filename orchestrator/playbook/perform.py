"""Action name → function: the whole set that a playbook can use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from orchestrator.playbook import looking, working
from orchestrator.playbook.runner import Done, Perform
from orchestrator.playbook.stage import Stage


def functions(stage: Stage) -> Mapping[str, Perform]:
    """What the runner takes, for one play."""
    table: Mapping[str, Callable[..., Done]] = {
        "preflight": looking.preflight,
        "env": looking.env,
        "push": working.push,
        "exec": working.execute,
        "warmup": working.warmup,
        "launch": working.launch,
        "wait": working.wait,
        "diag": looking.diag,
        "pull": working.pull,
    }
    return {name: partial(function, stage) for name, function in table.items()}
