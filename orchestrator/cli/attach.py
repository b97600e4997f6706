"""``dflashctl attach``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from orchestrator import pct
from orchestrator.cli import output
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Runs
from orchestrator.cli.session import open_session
from orchestrator.errors import RefusedError, UsageError
from orchestrator.launch import host_ssh_argv


def attach(
    runs: Runs = None,
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
    With --json the command is printed, as with --dry-run.
    """
    if not dry_run and not as_json and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "attach needs a terminal", next_step="use `dflashctl tail` in scripts and pipes"
        )
    with open_session(inventory) as session:
        ref = session.one_run(runs, host, ct)
        answer = session.fleet.container(ref.target).call("run.attach", **ref.fields)
    if not answer["alive"]:
        words = f"dflashctl tail {ref.run_id or ref.target.arguments}"
        raise RefusedError(
            "its tmux session is gone",
            next_step=f"its log can be read all the same: {words}",
            host=ref.target.host.name,
            ct=ref.target.ct,
            run_id=ref.run_id,
        )
    # `--keep-env 0` leaves TERM=linux and no locale: tmux would draw with neither colour nor lines.
    inner = ["env", f"TERM={os.environ.get('TERM', 'xterm')}", "LC_ALL=C.UTF-8", *answer["argv"]]
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
