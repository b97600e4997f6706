"""``dflashctl attach``."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from orchestrator import pct
from orchestrator.audit import audited
from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, OwnRuns
from orchestrator.cli.session import Session, open_session
from orchestrator.errors import RefusedError, UsageError
from orchestrator.launch import host_ssh_argv
from orchestrator.run import RunRef

STAND_INS = ("xterm-256color", "xterm")
"""For a terminal of which the container has no description: tmux would refuse it."""


def attach(
    runs: OwnRuns = None,
    host: HostOption = None,
    ct: CtOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command; do not run it.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Attach the terminal to a run's tmux session; leave it with Ctrl-b d.

    OpenSSH's own client carries the terminal: it knows sizes, escapes and every setting of yours.
    With --json the command is printed, as with --dry-run. What you type there reaches the run, so
    that a colleague's is attached to by its run id alone.
    """
    printed = dry_run or as_json
    if not printed and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "attach needs a terminal", next_step="use `dflashctl tail` in scripts and pipes"
        )
    terminal = os.environ.get("TERM") or "xterm"
    if terminal == "dumb" and not printed:
        raise UsageError(
            "this terminal says that it cannot place a cursor (TERM=dumb)",
            next_step="use `dflashctl tail`, or set TERM: TERM=xterm dflashctl attach",
        )
    with open_session(inventory, patient=False, as_json=as_json) as session:
        ref = session.one_run_to_change(runs, host, ct, "attach")
        # What is typed there reaches the run; what is only printed nobody has used yet.
        noted = audited(session.fleet, ref.target, "attach", output.notice, run_id=ref.run_id)
        with nullcontext() if printed else noted:
            answer = _ask(session, ref, terminal)
    # `--keep-env 0` leaves TERM=linux and no locale: tmux would draw with neither colour nor lines.
    known = answer.get("terminal") or terminal
    if known != terminal:
        output.notice(f"the container knows no terminal {terminal!r}: attached as {known}")
    inner = ["env", f"TERM={known}", "LC_ALL=C.UTF-8", *answer["argv"]]
    target = ref.target
    remote = pct.exec_argv(target.ct, inner, pct=target.host.settings.pct)
    argv = host_ssh_argv(target.host, remote, terminal=True)
    if as_json:
        place = {"run_id": ref.run_id or answer["session"], "host": target.host.name}
        output.emit({**place, "ct": target.ct, "argv": argv})
        return
    if dry_run:
        output.say(pct.shell_line(argv))
        return
    os.execvp(argv[0], argv)


def _ask(session: Session, ref: RunRef, terminal: str) -> dict[str, Any]:
    """How the run's session is shown on such a terminal.

    :raises RefusedError: the session is gone.
    """
    # In this order they are tried; what Debian's ncurses-base has is there with every tmux.
    terminals = list(dict.fromkeys([terminal, *STAND_INS]))
    answer = session.fleet.container(ref.target).call(
        "run.attach", terminals=terminals, **ref.fields
    )
    if not answer["alive"]:
        words = f"dflashctl tail {ref.run_id or ref.target.arguments}"
        raise RefusedError(
            "its tmux session is gone",
            next_step=f"its log can be read all the same: {words}",
            **ref.place,
        )
    return answer
