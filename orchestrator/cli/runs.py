"""``dflashctl ps``, ``status`` and ``stop``."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from functools import partial
from typing import Annotated, Any

import typer

from orchestrator import lease
from orchestrator.audit import audited
from orchestrator.channel import AgentChannel
from orchestrator.cli import interrupt, output
from orchestrator.cli.options import (
    CtOption,
    HostOption,
    InventoryOption,
    JsonOption,
    OwnRuns,
    Runs,
    Targets,
)
from orchestrator.cli.session import Session, open_session
from orchestrator.errors import DflashctlError, silence
from orchestrator.fanout import each_run
from orchestrator.fleet import Fleet
from orchestrator.gpu_use import Looks, mean_use
from orchestrator.launch import whoami
from orchestrator.reconnect import reconnecting
from orchestrator.run import Asked, RunRef, RunSummary, ask_all, seconds
from orchestrator.state import LaptopState, RememberedRun
from trainer.telemetry import QUIET_EVENTS, compact, duration

# 80 in all, with a blank between them.
COLUMNS = (
    *(("RUN", 25), ("WHERE", 9), ("STATE", 11), ("STEP", 11), ("TOK/S", 6), ("ETA", 6)),
    ("GPU", 6),
)


def ps(
    targets: Targets = None,
    host: HostOption = None,
    ct: CtOption = None,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Every run, not only the newest few.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the runs of every container, on a terminal as the answers come.

    A container that does not answer is shown as unreachable, which says nothing about its runs;
    exits 3 if none answers.
    """
    with open_session(inventory, ask=False, patient=False, as_json=as_json) as session:
        asked = session.targets_or_all(targets, host, ct)
        answers = []
        fields: dict[str, Any] = {} if every else {"limit": 5}
        with output.Table(*COLUMNS) as table:
            for answer in ask_all(session.fleet, asked, Looks(session.fleet), **fields):
                answers.append(answer)
                if not as_json:
                    _rows(table, answer)
        if as_json:
            output.emit(_as_json(answers, _remembered(session.state, answers)))
        else:
            _tell_rest(answers, _remembered(session.state, answers))
    raise typer.Exit(_silent_code(answers))


def _tell_rest(answers: list[Asked], last: dict[str, RememberedRun]) -> None:
    """Below the table: why some are silent, once for all of a host; or that there is nothing.

    :param last: of each silent container, the newest run that this laptop launched there.
    """
    for text in dict.fromkeys(str(answer.error) for answer in answers if answer.error):
        output.notice(text)
    for name, run in last.items():
        age = duration(max(0.0, time.time() - run.launched))
        output.notice(
            f"{name}: the last run that this laptop remembers there is {run.run_id}, launched "
            f"{age} ago; how it stands is known once the container answers"
        )
    if not any(answer.runs or answer.error for answer in answers):
        output.say("no runs; start one: dflashctl launch TARGET")
    live = [run for answer in answers for run in answer.runs if run.state == "training"]
    if (quiet := [run.run_id for run in live if run.step is None]) and output.redraws(sys.stdout):
        output.notice(
            f"no step of {', '.join(quiet)}: it writes no metrics.jsonl into $DFLASH_RUN_DIR; its "
            "own words: dflashctl tail RUN"
        )


def _remembered(state: LaptopState, answers: list[Asked]) -> dict[str, RememberedRun]:
    """By the container's name. Only a pointer: the container alone knows what became of it."""
    silent = {(a.target.host.address, a.target.ct): a.target.name for a in answers if a.error}
    found = {}
    for run in sorted(state.runs(), key=lambda run: run.launched):
        name = silent.get((run.target.host.address, run.target.ct))
        if name is not None:
            found[name] = run
    return found


def _silent_code(answers: list[Asked]) -> int:
    """0 as soon as one container has answered; else what kept them all from it."""
    return min((answer.error.exit_code if answer.error else 0 for answer in answers), default=0)


def _rows(table: output.Table, answer: Asked) -> None:
    if answer.error is not None:
        table.row(None, answer.target.name, silence(answer.error))
    for run in answer.runs:
        table.row(
            run.run_id,
            answer.target.name,
            run.state,
            run.progress,
            compact(run.tokens_per_s) if run.tokens_per_s and not run.is_over else None,
            duration(run.eta_s) if run.eta_s is not None and not run.is_over else None,
            _gpus(answer.cards.get(run.run_id, [])),
        )


def _gpus(cards: list[dict[str, Any]]) -> str | None:
    """How many a run has, and how busy they are: ``2 97%``."""
    use = mean_use(cards)
    parts = [str(len(cards))] if cards else []
    return " ".join([*parts, f"{use:.0f}%"] if use is not None else parts)


def _as_json(answers: list[Asked], last: dict[str, RememberedRun]) -> dict[str, Any]:
    runs = [
        {**run.as_json(answer.target), "gpu_use": answer.cards.get(run.run_id, [])}
        for answer in answers
        for run in answer.runs
    ]
    silent = [
        {
            **answer.target.place,
            "state": silence(answer.error),
            "remembered_run": last[name].run_id if (name := answer.target.name) in last else None,
            "error": answer.error.as_dict(),
        }
        for answer in answers
        if answer.error is not None
    ]
    return {"runs": runs, "unreachable": silent}


def status(
    runs: Runs = None,
    host: HostOption = None,
    ct: CtOption = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Last lines shown.")] = 5,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one run in full; exits 1 if it failed, 3 if it cannot be reached."""
    with open_session(inventory, patient=False, as_json=as_json) as session:
        found = []
        for ref in session.runs(runs, host, ct):
            with session.fleet.container(ref.target) as channel:
                answer = channel.call("run.status", lines=lines, **ref.fields)
            summary = RunSummary.model_validate(answer)
            found.append(summary)
            if as_json:
                output.emit(summary.as_json(ref.target))
            else:
                _show(summary, ref, answer)
    raise typer.Exit(max(summary.verdict for summary in found))


def _show(run: RunSummary, ref: RunRef, answer: dict[str, Any]) -> None:
    record = answer.get("record") or {}
    rows: list[tuple[str, Any]] = [
        ("run", run.run_id),
        ("where", ref.target.in_full),
        ("state", run.ending()),
        ("phase", _between_steps(run, answer)),
        ("command", shlex.join(map(str, answer.get("command") or []))),
        ("release", answer.get("release")),
        ("launched by", answer.get("who")),
        ("stopped by", _stopped_by(answer)),
        ("step", run.progress),
        ("loss", f"{run.loss:.4f}" if run.loss is not None else None),
        ("tau", f"{run.tau:.2f}" if run.tau is not None else None),
        ("tokens/s", compact(run.tokens_per_s) if run.tokens_per_s else None),
        ("eta", duration(run.eta_s) if run.eta_s is not None and not run.is_over else None),
        ("silent for", duration(run.idle_s) if run.idle_s and not run.is_over else None),
        ("attempt", _attempt(answer)),
        ("folder", answer.get("run_dir")),
        ("git", _git(record.get("meta") or record)),
    ]
    for name, value in rows:
        if value not in (None, ""):
            # A program given as one word (python -c) has lines of its own.
            output.say(f"{name:<12} {value}".replace("\n", f"\n{'':13}"))
    for line in run.last_lines:
        output.say(f"  | {line}")


def _attempt(answer: dict[str, Any]) -> str | None:
    """``2 of 3``, of a run that its supervisor may start again."""
    restart = (answer.get("record") or {}).get("restart") or {}
    more = restart.get("max")
    if not isinstance(more, int) or more < 1:
        return None
    return f"{answer.get('attempt') or 1} of {more + 1}"


def _between_steps(run: RunSummary, answer: dict[str, Any]) -> str | None:
    """What keeps a run that trains from stepping: minutes, after the last step."""
    phase = answer.get("phase")
    return phase if phase in QUIET_EVENTS and run.state == "training" else None


def _stopped_by(answer: dict[str, Any]) -> str | None:
    """``ben@vm at 2026-09-01 10:59:55``, by this laptop's clock as a person reads it."""
    stop = (answer.get("exit") or {}).get("stop") or {}
    who, at = stop.get("who"), stop.get("time")
    if answer.get("state") != "stopped" or not who:
        return None
    if not isinstance(at, (int, float)):
        return str(who)
    return f"{who} at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}"


def _git(meta: dict[str, Any]) -> str | None:
    git = meta.get("git") or {}
    commit = git.get("commit")
    return (
        f"{commit[:12]}{' + uncommitted changes' if git.get('dirty') else ''}" if commit else None
    )


def stop(
    runs: OwnRuns = None,
    host: HostOption = None,
    ct: CtOption = None,
    grace: Annotated[
        str | None,
        typer.Option("--grace", help="Time for a checkpoint before TERM: 90s, 5m.", metavar="TIME"),
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a run after a checkpoint: INT to all of it, on all its nodes, then TERM, then KILL.

    Without RUN it is the newest that you launched. A colleague's is stopped by its run id alone: by
    its container it is refused, and its owner named.
    """
    fields = {"grace_s": seconds(grace)} if grace else {}
    failed: list[DflashctlError] = []
    going_on = "a run that was told to stop ends without us; see dflashctl status"
    with (
        open_session(inventory, patient=False, as_json=as_json) as session,
        interrupt.told(going_on),
    ):

        def work(ref: RunRef) -> dict[str, Any]:
            with audited(session.fleet, ref.target, "stop", output.notice, run_id=ref.run_id):
                answer = _stop(session.fleet, ref, fields, as_json)
                _give_back(session, ref, answer["run_id"])
            return answer

        def fail(error: DflashctlError) -> None:
            failed.append(error)
            output.fail(error, as_json=as_json)

        # At once: what hangs in one container must not keep another's run going.
        refs = []
        chosen = session.runs_to_change(runs, host, ct, "stop")
        for _, found in each_run(session.fleet, chosen, partial(session.pinned, verb="stop")):
            if isinstance(found, DflashctlError):
                fail(found)
            else:
                refs.append(found)
        for ref, answer in each_run(session.fleet, session.with_siblings(refs), work):
            if isinstance(answer, DflashctlError):
                fail(answer)
            elif as_json:
                output.emit({**ref.target.place, **answer})
            else:
                _tell_stopped(answer)
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed))


def _give_back(session: Session, ref: RunRef, run_id: str) -> None:
    """Its GPUs' leases, which would be found stale later anyway."""
    try:
        lease.release(session.fleet.host(ref.target.host), run_id)
    except DflashctlError as error:
        output.notice(f"{ref.target.name}: leases were not given back: {error.what}")


def _stop(fleet: Fleet, ref: RunRef, fields: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """Stop it; its id and how it ended. After a cut it is asked for again."""
    run_id = ref.run_id
    asked = 0

    def ask(channel: AgentChannel) -> dict[str, Any]:
        nonlocal run_id, asked
        # Fixed once: after a reconnect "the newest" may be another run.
        run_id = run_id or str(channel.call("run.status", lines=0)["run_id"])
        asked += 1
        request = channel.request("run.stop", run_id=run_id, who=whoami(), **fields)
        for head, _ in request.frames():
            if "signal" in head and not as_json:
                left = head.get("left")
                these = "process is" if left == 1 else "processes are"
                output.notice(f"{run_id}: sent SIG{head['signal']}; {left} {these} left")
        return request.result()

    with contextlib.ExitStack() as opened:
        answer = reconnecting(
            fleet, lambda: opened.enter_context(fleet.container(ref.target)), ask, output.notice
        )
    if asked > 1 and answer["state"] == "stopped":
        # By our first request, whose answer was lost.
        answer["already"] = False
    return {"run_id": run_id, **answer}


def _tell_stopped(answer: dict[str, Any]) -> None:
    run_id = answer["run_id"]
    for line in answer.get("last_lines") or []:
        output.say(f"  | {line}")
    if answer.get("already"):
        output.say(f"{run_id} had already ended: {answer['state']}")
    else:
        code = answer.get("exit_code")
        how = "its exit code is not known" if code is None else f"exit code {code}"
        if answer.get("signal"):
            how = f"signal {answer['signal']}"
        output.say(f"{run_id} {answer['state']} ({how})")
