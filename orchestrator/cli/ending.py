"""Following runs to their end, and the exit code that says how they ended."""

from __future__ import annotations

import errno
import re
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from orchestrator.cli import output
from orchestrator.cli.session import Session
from orchestrator.errors import DflashctlError, UnreachableError, UsageError
from orchestrator.fleet import KEPT, Fleet
from orchestrator.follow import Follower, Piece, Start
from orchestrator.paths import RunPaths
from orchestrator.run import RunRef, RunSummary
from orchestrator.screen import LogScreen
from orchestrator.terminal_text import fit_name
from trainer.telemetry import duration, read_steps

LOG = RunPaths("").log
METRICS = RunPaths("").metrics


def follow_runs(
    session: Session,
    refs: Sequence[RunRef],
    *,
    start: Start,
    follow: bool = True,
    show: bool = True,
    metrics: bool = False,
    grep: re.Pattern[bytes] | None = None,
    as_json: bool = False,
) -> int:
    """Follow several runs at once, each line marked with its run where there are several.

    The highest exit code of all is returned; a run that cannot be read is told and does not stop
    the others.
    """
    _check_crowd(session.fleet, refs)
    prefixes = _prefixes(refs)
    lock = threading.Lock()
    codes: list[int] = []
    unread = threading.Event()

    def one(ref: RunRef, prefix: str) -> None:
        follower = Follower(
            session.fleet,
            ref,
            (METRICS if metrics else LOG,),
            start,
            follow,
            output.notice,
        )
        writer = _writer(ref, prefix, grep, show=show, metrics=metrics, as_json=as_json)
        for piece in follower.pieces():
            with lock:
                writer(follower, piece)
        summary = follower.summary()
        with lock:
            codes.append(_end(summary, ref, follow, as_json))

    if len(refs) == 1:
        one(refs[0], "")
        return max(codes)

    def guarded(ref: RunRef, prefix: str) -> None:
        try:
            one(ref, prefix)
        except DflashctlError as error:
            with lock:
                output.fail(session.fleet.named(error), as_json=as_json)
                codes.append(error.exit_code)
        except BrokenPipeError:
            unread.set()

    threads = [
        threading.Thread(target=guarded, args=pair, daemon=True)
        for pair in zip(refs, prefixes, strict=True)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if unread.wait(0.2):
            # As with one run: nobody reads on (`| head`), and a quiet run would never find out.
            raise BrokenPipeError(errno.EPIPE, "the output is closed")
    return max(codes)


def _check_crowd(fleet: Fleet, refs: Sequence[RunRef]) -> None:
    """:raises UsageError: more runs of one host than channels, each of which is held to the end."""
    fleet.expect([ref.target for ref in refs])
    host, count = Counter(ref.target.host for ref in refs).most_common(1)[0]
    if count <= KEPT:
        return
    try:
        room = fleet.room(host)
    except UnreachableError:
        # Each of its runs tells so itself.
        return
    if count > room:
        raise UsageError(
            f"{count} runs of one host at once: there is room for {room}",
            next_step="follow fewer, or use `dflashctl watch` or `top`, which take turns",
            host=host.name,
        )


def _prefixes(refs: Sequence[RunRef]) -> list[str]:
    names = [ref.run_id or ref.target.name for ref in refs]
    terminal = output.terminal_width()
    if terminal is not None:
        # A quarter of the line is enough to tell them apart.
        names = [fit_name(name, max(16, terminal // 4)) for name in names]
    width = max(len(name) for name in names)
    return [f"{name:<{width}} | " for name in names]


def _writer(
    ref: RunRef,
    prefix: str,
    grep: re.Pattern[bytes] | None,
    *,
    show: bool,
    metrics: bool,
    as_json: bool,
) -> Any:
    """A function that shows a piece, by what was asked for."""
    if not show:
        return lambda follower, piece: None
    screen = LogScreen(
        sys.stdout.buffer,
        terminal=output.redraws(sys.stdout),
        colour=output.wants_colour(sys.stdout),
        prefix=prefix,
        grep=grep,
    )

    def as_lines(follower: Follower, piece: Piece) -> None:
        place = RunRef(ref.target, follower.run_id).place
        text = piece.data.decode(errors="replace")
        if metrics:
            for step in read_steps(text):
                output.emit({**place, "metrics": step.model_dump()})
            return
        # At line ends alone: str.splitlines() would also cut at U+2028, form feeds and others.
        for line in text.removesuffix("\n").split("\n"):
            if grep is None or grep.search(line.encode()):
                output.emit({**place, "line": line})

    def as_steps(follower: Follower, piece: Piece) -> None:
        steps = read_steps(piece.data.decode(errors="replace"))
        screen.write("".join(f"{step.human()}\n" for step in steps).encode())

    if as_json:
        return as_lines
    if metrics:
        return as_steps
    return lambda follower, piece: screen.write(piece.data)


def _end(summary: RunSummary, ref: RunRef, follow: bool, as_json: bool) -> int:
    """Say how it ended, after the last of its lines."""
    if not follow:
        return 0
    if as_json:
        output.emit(summary.as_json(ref.target))
    else:
        took = ""
        if summary.ended and summary.started:
            took = f" after {duration(summary.ended - summary.started)}"
        output.notice(f"{summary.run_id} {summary.ending()}{took}")
        if summary.state == "failed":
            output.notice(f"why: dflashctl diag {summary.run_id}")
    return summary.verdict
