"""From what is asked, by a verb or a playbook's step, to orders; and from orders to runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orchestrator import launch as launching
from orchestrator import release as releases
from orchestrator import snapshot
from orchestrator.audit import audited_each
from orchestrator.errors import UsageError
from orchestrator.fleet import Fleet, Notice, Opening
from orchestrator.laptop_path import did_you_mean, laptop_path, working_folder
from orchestrator.launch import Order, Started
from orchestrator.paths import LaptopPaths
from orchestrator.push import Progress
from orchestrator.release import Release
from orchestrator.run import new_run_id
from orchestrator.state import LaptopState
from orchestrator.target import Target


def take_code(laptop: LaptopPaths, code: Path | None, config: str | None) -> Release:
    """The folder to push, with the trainer beside a config.

    :raises UsageError: no such folder or file.
    """
    root = snapshot.find_root(code, working_folder())
    path = laptop_path(config) if config else None
    if path is not None and not path.is_file():
        raise UsageError(
            f"config {config}: no such file{_in_the_code(path, root.path) or did_you_mean(path)}",
            next_step="give a file of this machine; where nothing is pushed, a path inside the "
            "container",
        )
    return releases.build(root, laptop, path)


def _in_the_code(config: Path, root: Path) -> str:
    """A config that was named as it lies in the folder to push."""
    inside = root / config
    there = working_folder()
    if not inside.is_file():
        return ""
    return (
        f"; did you mean {inside.relative_to(there) if inside.is_relative_to(there) else inside}?"
    )


def make(
    targets: Sequence[Target],
    release: Release | None,
    *,
    words: Sequence[str],
    config: str | None,
    name: str | None,
    variables: Mapping[str, str],
    env_file: Path | None,
    log: str | None,
    force: bool,
    restarts: int,
    secret: Sequence[str] = (),
) -> list[Order]:
    """One for each container, all under one run id. Nothing is reached.

    :param secret: names of this machine's variables.
    :param release: None pushes nothing; ``config`` is then a path inside the container.
    """
    launching.check_log_link(log)
    secrets = launching.read_environment_file(laptop_path(env_file)) if env_file else {}
    secrets |= launching.take_secrets(secret, os.environ)
    run_id = new_run_id(name)
    if config and release:
        config = releases.config_path(laptop_path(config), release.root)
    return [
        Order(
            run_id=run_id,
            name=name or "run",
            command=launching.command_for(
                target,
                words,
                config,
                release.has(launching.START_SCRIPT) if release else False,
                str(release.root.path) if release else None,
            ),
            config=config,
            environment=variables,
            secrets=secrets,
            log_link=log,
            force=force,
            restarts=restarts,
        )
        for target in targets
    ]


def start(
    fleet: Fleet,
    targets: Sequence[Target],
    orders: Sequence[Order],
    release: Release | None,
    *,
    notice: Notice,
    ranks: int | None = None,
    opening: Opening | None = None,
    progress: Progress | None = None,
    tell: Callable[[Started], None] = lambda started: None,
) -> list[Started]:
    """One container: a run. Several: one run, a node each.

    :param opening: the channel of the only target, if it is on its way.
    :param tell: called before the host's audit lines are written, which takes a round trip more.
    """
    kept = [
        (target, {"run_id": run_id})
        for target, run_id in zip(targets, run_ids(orders), strict=True)
    ]
    with audited_each(fleet, kept, "launch", notice):
        try:
            if len(targets) == 1:
                only = launching.launch(
                    fleet,
                    targets[0],
                    orders[0],
                    release,
                    opening=opening,
                    notice=notice,
                    progress=progress,
                )
                started = [only]
            else:
                from orchestrator import nodes

                started = nodes.launch(fleet, targets, orders, release, notice=notice, ranks=ranks)
        except KeyboardInterrupt:
            # Before the audit's lines, which a dead link holds up.
            notice(f"interrupted: {_outlook(fleet.state, run_ids(orders))}")
            raise
        for one in started:
            tell(one)
    return started


def run_ids(orders: Sequence[Order]) -> list[str]:
    """The id of each node; one alone keeps its own."""
    if len(orders) == 1:
        return [orders[0].run_id]
    from orchestrator.nodes import node_id

    return [node_id(order.run_id, rank) for rank, order in enumerate(orders)]


def _outlook(state: LaptopState, ids: Sequence[str]) -> str:
    """What Ctrl-C leaves behind: a start that was asked for goes on without us."""
    asked = [run for run in state.runs() if run.run_id in ids]
    if not asked:
        return "nothing was started"
    return "; ".join(
        f"{run.run_id} may have started on {run.target.name}: see dflashctl status {run.run_id}, "
        f"end it with dflashctl stop {run.run_id}"
        for run in asked
    )
