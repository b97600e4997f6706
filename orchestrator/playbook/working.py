"""The actions that do: push, exec, warmup, launch, wait, pull."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from orchestrator import orders, transfer
from orchestrator import push as pushing
from orchestrator.alarm import DROP
from orchestrator.channel import AgentChannel
from orchestrator.errors import NotFoundError, RunFailed
from orchestrator.laptop_path import laptop_path
from orchestrator.playbook import actions
from orchestrator.playbook.runner import Done
from orchestrator.playbook.stage import Stage
from orchestrator.request import exec_ending
from orchestrator.run import RunRef
from orchestrator.run_files import first_before
from orchestrator.terminal_text import counted
from orchestrator.watch import Report, Watch
from trainer.telemetry import duration

POLL_S = 2.0
RESUME_VARIABLE = "DFLASH_RESUME"
"""Names the checkpoint that the trainer goes on from."""


def push(stage: Stage, action: actions.Push) -> Done:
    stage.code = action.code
    release = stage.release(action.code, action.config)
    for target in stage.targets:
        with stage.audited(target, "push", release=release.id):
            answer = pushing.push(
                stage.fleet, target, partial(stage.channel, target), release, notice=stage.notice
            )
            stage.pushed[target.name] = str(answer["path"])
    return Done(
        f"{release.id}, {counted(release.files, 'file')}",
        {"release": release.id, "files": release.files},
    )


def execute(stage: Stage, action: actions.Exec) -> Done:
    fields = {"timeout_s": action.timeout_s} if action.timeout_s else {}
    return _command(stage, action.command, action.cwd, action.env, action.ok, fields)


def warmup(stage: Stage, action: actions.Warmup) -> Done:
    fields = {"timeout_s": action.timeout_s}
    return _command(stage, action.command, action.cwd, action.env, [0], fields)


def _command(
    stage: Stage,
    command: Sequence[str],
    cwd: str | None,
    env: Mapping[str, str],
    good: Sequence[int],
    fields: Mapping[str, Any],
) -> Done:
    codes = {}
    for target, channel in stage.each():
        argv = [target.settings.python, *command[1:]] if command[0] == "python" else [*command]
        where = cwd or stage.pushed.get(target.name) or target.settings.workdir
        with stage.audited(target, "exec", program=argv[0]) as line:
            python = target.settings.python
            request = channel.request(
                "exec", command=argv, cwd=where, env=dict(env), python=python, **fields
            )
            for head, payload in request.frames():
                if "stream" in head:
                    stage.show(payload)
            answer = request.result()
            line["exit_code"] = answer["exit_code"]
        codes[target.name] = answer["exit_code"]
        if answer["timed_out"] or answer["exit_code"] not in good:
            raise RunFailed(
                f"{argv[0]} {exec_ending(answer)}",
                next_step="its own words are above; mend what they name",
                **target.place,
            )
    return Done("exit code 0" if set(codes.values()) == {0} else str(codes), {"codes": codes})


def launch(stage: Stage, action: actions.Launch) -> Done:
    variables = dict(action.env)
    if action.resume:
        variables[RESUME_VARIABLE] = _checkpoint(stage, action.run)
    code = action.code if action.code is not None else stage.code
    release = stage.release(code, action.config) if action.push else None
    wanted = orders.make(
        stage.targets,
        release,
        words=action.command or (),
        config=action.config,
        name=action.name,
        variables=variables,
        env_file=laptop_path(action.env_file) if action.env_file else None,
        log=action.log,
        force=action.force,
        restarts=action.restarts,
    )
    started = orders.start(
        stage.fleet, stage.targets, wanted, release, notice=stage.notice, ranks=action.ranks
    )
    stage.refs = [RunRef(one.target, one.run_id) for one in started]
    ids = [one.run_id for one in started]
    return Done(" ".join(ids), {"run_ids": ids})


def _checkpoint(stage: Stage, run: str | None) -> str:
    """The newest complete checkpoint of the run that is to go on.

    :raises NotFoundError: it has none.
    """
    ref = stage.runs(run)[0]
    channel = stage.channel(ref.target)
    run_id = ref.run_id or str(channel.call("run.status", lines=0)["run_id"])
    found = channel.call("pull.last_checkpoint", run_id=run_id)
    if not found["path"]:
        # Attempts to go on that died at once often lie behind the run that one means.
        earlier = first_before(channel, run_id, _has_checkpoint)
        raise NotFoundError(
            "the run has no complete checkpoint to go on from",
            next_step=f"{earlier}, before it, has one: give `run` its id (--set run={earlier})"
            if earlier
            else "start it anew: dflashctl launch --config FILE",
            **ref.target.place,
            run_id=run_id,
        )
    return str(found["path"])


def _has_checkpoint(channel: AgentChannel, run_id: str) -> bool:
    return channel.call("pull.last_checkpoint", run_id=run_id)["path"] is not None


def wait(stage: Stage, action: actions.Wait) -> Done:
    refs = stage.runs(action.run)
    watch = Watch(stage.fleet, refs, drop=DROP, every_s=POLL_S)
    began = time.monotonic()
    for report in watch.run():
        for notice in report.notices:  # states too: data making and compiling may take hours
            stage.notice(f"{report.where}: {notice.text}")
        _refuse_bad_end(report)
        if action.until == "training" and all(map(_trains, watch.reports)):
            break
        if action.timeout_s and time.monotonic() - began > action.timeout_s:
            raise RunFailed(
                f"not {action.until} after {duration(action.timeout_s)}: "
                f"it is {report.watched.state}",
                next_step=f"dflashctl diag {report.ref.run_id or ''}".rstrip(),
                **report.ref.place,
            )
    stage.refs = [report.ref for report in watch.reports]
    states = [report.watched.state for report in watch.reports]
    return Done(", ".join(states), {"states": states})


def pull(stage: Stage, action: actions.Pull) -> Done:
    files = size = 0
    refs = stage.runs(action.run)
    for ref in refs:
        channel = stage.channel(ref.target)
        run_id = ref.run_id or str(channel.call("run.status", lines=0)["run_id"])
        source, wanted = {"run_id": run_id}, transfer.Wanted(every=True)
        if action.what == "checkpoint":
            wanted = transfer.newest_and_best(channel, run_id)
        elif action.what == "logs":
            wanted = transfer.Wanted()
        elif action.what != "run":
            key = {"path": action.what}
            source = key if action.what.startswith("/") else source | key
        pulled = transfer.pull(
            stage.fleet,
            ref.target,
            source,
            laptop_path(action.to) / run_id,
            wanted=wanted,
            own_folder=True,
            notice=stage.notice,
        )
        files, size = files + pulled.files, size + pulled.bytes
    into = laptop_path(action.to) / run_id if len(refs) == 1 else action.to
    return Done(
        f"{counted(files, 'file')} into {into}",
        {"files": files, "bytes": size, "to": action.to},
    )


def _trains(report: Report) -> bool:
    return report.watched.state in {"training", "finished"}


def _refuse_bad_end(report: Report) -> None:
    """:raises RunFailed: the run failed, or somebody stopped it."""
    summary = report.watched.summary
    if summary is None or not report.watched.is_over or summary.state == "finished":
        return
    last = "".join(f"\n    | {line}" for line in summary.last_lines[-3:])
    raise RunFailed(
        f"{summary.ending()}{last}",
        next_step=f"dflashctl diag {summary.run_id}",
        **report.ref.place,
    )
