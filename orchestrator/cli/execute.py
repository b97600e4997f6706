"""``dflashctl exec``."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TextIO

import typer

from orchestrator import pct
from orchestrator.audit import audited
from orchestrator.channel import AgentChannel
from orchestrator.cli import output
from orchestrator.cli.app import COMMAND_KEY
from orchestrator.cli.options import CtOption, HostOption, InventoryOption, JsonOption, Targets
from orchestrator.cli.session import open_session
from orchestrator.errors import DflashctlError, UsageError
from orchestrator.fanout import each
from orchestrator.fleet import Fleet
from orchestrator.launch import Step, ssh_argv
from orchestrator.run import seconds
from orchestrator.screen import LogScreen
from orchestrator.target import Target

# A line without an end is shown at this length: it would fill our memory.
LONGEST_LINE = 1 << 20

Show = Mapping[str, Callable[[bytes], object]]
"""By the name of the stream."""
Emit = Callable[[dict[str, Any]], None]
"""Takes the answer as JSON; None where words are wanted."""


def execute(
    ctx: typer.Context,
    targets: Targets = None,
    host: HostOption = None,
    ct: CtOption = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", "-i", help="Hand this command's input on.")
    ] = False,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="End it after 90s, 10m, …")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be sent; reach nothing.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one command in a container: dflashctl exec TARGET -- COMMAND...

    The command's own exit code is this one's; 128+N where signal N ended it. In several containers
    it runs at once, each line marked with its container, and the highest code is this one's. It
    reads no input unless -i hands this one's on.
    """
    words: tuple[str, ...] = ctx.meta.get(COMMAND_KEY, ())
    if not words:
        raise UsageError("no command", next_step="dflashctl exec TARGET -- COMMAND...")
    fields: dict[str, Any] = {"command": list(words)}
    if timeout:
        fields["timeout_s"] = seconds(timeout)
    with open_session(inventory, as_json=as_json) as session:
        found = session.some_targets(targets, host, ct)
        if dry_run:
            for target in found:
                _show_plan(target, fields, as_json)
            return
        if len(found) == 1:
            show = {"stdout": output.shower(sys.stdout), "stderr": output.shower(sys.stderr)}
            emit = output.emit if as_json else None
            code = _audited(session.fleet, found[0], fields, show, stdin, emit)
        elif stdin:
            raise UsageError(
                f"--stdin hands the input to one container, and {len(found)} were named",
                next_step="name one, or push a file and let the command read that",
            )
        else:
            code = _in_each(session.fleet, found, fields, as_json)
    raise typer.Exit(code)


def _show_plan(target: Target, fields: dict[str, Any], as_json: bool) -> None:
    steps = [
        Step("ssh", pct.shell_line(ssh_argv(target))),
        Step("agent", f"exec {json.dumps(_fields(target, fields), ensure_ascii=False)}"),
    ]
    output.show_steps(steps, target.place, as_json=as_json)


def _fields(target: Target, fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "python": target.settings.python}


class _Marked:
    """Whole lines of one stream of one container among several."""

    def __init__(self, stream: TextIO, mark: str, lock: threading.Lock) -> None:
        self._screen = LogScreen(
            stream.buffer, terminal=stream.isatty(), colour=output.wants_colour(stream), prefix=mark
        )
        self._lock = lock
        self._rest = b""

    def __call__(self, data: bytes) -> None:
        lines, end, self._rest = (self._rest + data).rpartition(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines, end, self._rest = lines + end + self._rest, b"\n", b""
        if end:
            with self._lock:
                self._screen.write(lines + end)

    def close(self) -> None:
        if self._rest:
            self(b"\n")


def _in_each(fleet: Fleet, targets: Sequence[Target], fields: dict[str, Any], as_json: bool) -> int:
    """At once in all of them, told as they come; the highest exit code."""
    lock = threading.Lock()
    width = max(len(target.name) for target in targets)

    def emit(body: dict[str, Any]) -> None:
        with lock:
            output.emit(body)

    def work(target: Target) -> int:
        mark = f"{target.name:<{width}} | "
        show = {
            "stdout": _Marked(sys.stdout, mark, lock),
            "stderr": _Marked(sys.stderr, mark, lock),
        }
        try:
            return _audited(fleet, target, fields, show, False, emit if as_json else None)
        finally:
            for one in show.values():
                one.close()

    codes = []
    for target, found in each(fleet, targets, work):
        if isinstance(found, DflashctlError):
            with lock:
                output.fail(found, as_json=as_json)
        elif found and not as_json:
            with lock:
                output.notice(f"{target.name}: exit code {found}")
        codes.append(found.exit_code if isinstance(found, DflashctlError) else found)
    return max(codes)


def _audited(
    fleet: Fleet,
    target: Target,
    fields: dict[str, Any],
    show: Show,
    stdin: bool,
    emit: Emit | None,
) -> int:
    # The program alone: arguments may hold a secret.
    program = fields["command"][0]
    with (
        audited(fleet, target, "exec", output.notice, program=program) as line,
        fleet.container(target) as channel,
    ):
        line["exit_code"] = code = _run(channel, target, fields, show, stdin, emit)
    return code


def _run(
    channel: AgentChannel,
    target: Target,
    fields: dict[str, Any],
    show: Show,
    stdin: bool,
    emit: Emit | None,
) -> int:
    extra = {"stdin": True, "more": True} if stdin else {}
    request = channel.request("exec", **_fields(target, fields), **extra)
    if stdin:
        threading.Thread(target=request.feed, args=(_input(),), daemon=True).start()
    heard = {"stdout": bytearray(), "stderr": bytearray()}
    for head, payload in request.frames():
        if "stream" not in head:
            continue
        if emit:
            heard[head["stream"]] += payload
        else:
            show[head["stream"]](payload)
    answer = request.result()
    if emit:
        text = {name: bytes(data).decode(errors="replace") for name, data in heard.items()}
        emit({**target.place, **answer, **text})
    if not stdin and _waits_unread():
        output.notice(f"{target.name}: the command got no input; exec -i hands it on")
    if answer.get("timed_out"):
        output.notice(f"{target.name}: the command was ended when its time was over")
    if answer.get("signal"):
        return 128 + int(answer["signal"])
    return int(answer.get("exit_code") or 0)


def _waits_unread() -> bool:
    """Whether somebody piped or redirected input to us. It is left alone: in a `while read` loop it
    is the loop's."""
    try:
        descriptor = sys.stdin.fileno()
        info = os.fstat(descriptor)
        if stat.S_ISREG(info.st_mode):
            return os.lseek(descriptor, 0, os.SEEK_CUR) < info.st_size
        if not (stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode)):
            return False
        waiting = bytearray(4)
        fcntl.ioctl(descriptor, termios.FIONREAD, waiting)
    except (OSError, ValueError, AttributeError):
        # Closed, or none at all.
        return False
    return int.from_bytes(waiting, sys.byteorder) > 0


def _input() -> Iterator[bytes]:
    while piece := os.read(sys.stdin.fileno(), 1 << 16):
        yield piece
