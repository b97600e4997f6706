"""What is left: an exception in the user's own code, or words that nobody knows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.shared import run_of, target_of
from orchestrator.diag.text import Line
from orchestrator.diag.tracebacks import Failure

USAGE = (
    r"^[\w./-]+: error: (?:unrecognized arguments|the following arguments are required|"
    r"argument \S+: |ambiguous option)",
    r"^(?:omegaconf|hydra)\.errors\.\w+|Error: (?:No such option|Missing (?:option|argument)|"
    r"Invalid value)",
    r"^\s*(?:SyntaxError|IndentationError|TabError): ",
    r"Some specified arguments are not used by the HfArgumentParser",
)
_UNREAD = r"(?:Syntax|Indentation|Tab)Error: "
_FILE = re.compile(r'\s*File "([^"]+)", line (\d+)')
# A kernel's error is noticed at a later call, a gradient's in one that names no line of the code.
_LATE = re.compile(r"(?i)\bcuda\b|cudnn|cublas|device-side|accelerator|backward|inplace operation")
_FILES = "Too many open files"
LOOK_AT = {
    "KeyError": "print the keys there, before that line: was a column, field or setting renamed?",
    "AttributeError": "print the object's type there: is it None, or of another library's version?",
    "IndexError": "print the length and the index there, before that line",
    "TypeError": "print the types of what is passed there, and compare with what is taken",
    "NameError": "a slip in the code: define or import the name",
    "UnboundLocalError": "the name is set on some paths only: set it before the branch",
    "ZeroDivisionError": "print the divisor there: is something empty?",
    "AssertionError": "print both sides of the condition there, before that line",
}


def code_error(e: Evidence) -> Iterator[Finding]:
    """An uncaught exception: the first in time of the last attempt, its innermost frame outside of
    libraries. One that was caught and survived, or printed after the end, is none."""
    for failure in uncaught(e)[:1]:
        frame = failure.user_frame
        where = f"{frame.file}:{frame.line} in {frame.function}" if frame else ""
        said = _said(failure)[:160]
        rank = f" on rank {failure.line.rank}" if failure.line.rank is not None else ""
        hint = "that line raised it: print what it uses before it, then launch again"
        if _FILES in failure.text:
            hint = (
                "ulimit -n 65536 in the start script, before the program; DataLoader workers: "
                'torch.multiprocessing.set_sharing_strategy("file_system")'
            )
        elif failure.name in LOOK_AT:
            hint = LOOK_AT[failure.name]
        elif _LATE.search(failure.text):
            hint = "run one step on the CPU with one process: the traceback is then exact"
        yield e.found(
            "code.error",
            f"{failure.name}: {said}{rank}" + (f"  ({where})" if where else ""),
            [failure, *_cause_lines(failure)],
            (f"open {frame.file} at line {frame.line}" if frame else "read the traceback above")
            + (f": {frame.code}" if frame and frame.code else "")
            + "\n"
            + hint,
            confidence=0.6,
        )


def uncaught(e: Evidence) -> list[Failure]:
    """Of the last attempt; of those before it only if that one has none."""
    candidates = [
        f
        for f in e.errors
        if not f.inner
        and f.line.source == "log"
        and (f.headed or f.frames)
        and f.name not in ("KeyboardInterrupt", "SystemExit", "SignalException")
        and not e.recovered(f.line)
    ]
    return [f for f in candidates if f.first >= e.outcome.attempt_line] or candidates


def _said(failure: Failure) -> str:
    """The message's first line, and the next where the first only leads to it."""
    first, _, rest = failure.message.strip().partition("\n")
    return f"{first} {rest.splitlines()[0].strip()}" if first.endswith(":") and rest else first


def _cause_lines(failure: Failure) -> list[Line]:
    return [link.line for link in failure.chain() if link is not failure][-1:]


def usage_error(e: Evidence) -> Iterator[Finding]:
    """Without a traceback: the file does not parse, or argparse, click or hydra refuses the
    arguments."""
    usage = e.unrecovered(*USAGE, probes=False)
    if not usage or e.outcome.state == "running" or uncaught(e):
        return
    unread = [h for h in usage if re.search(_UNREAD, h.line.text)]
    if unread:
        lines = [li for li in e.lines if li.number < unread[0].line.number]
        files = [m for li in lines if (m := _FILE.match(li.text)) is not None]
        opened = "open the file at the line that is shown above"
        if files:
            opened = f"open {files[-1][1]} at line {files[-1][2]}"
        yield e.found(
            "code.error",
            f"the program could not be read: {unread[0].line.text.strip()[:140]}",
            unread[:2],
            f"{opened}; before the next launch: python3 -m compileall -q .",
            confidence=0.6,
        )
    else:
        raised = next((_said(f) for f in e.errors if f.line is usage[0].line), "")
        yield e.found(
            "code.error",
            f"the program refused its arguments: {(raised or usage[0].line.text.strip())[:140]}",
            usage[:2],
            "ask the program itself: --help; compare with the launch command (dflashctl status)",
            confidence=0.6,
        )


def unguarded(e: Evidence) -> Iterator[Finding]:
    """multiprocessing's ``spawn`` imports the program anew in each process: one that starts
    processes outside of ``if __name__ == "__main__"`` would do it again there."""
    hits = e.unrecovered(r"An attempt has been made to start a new process before the\b")
    if hits:
        yield e.found(
            "code.error",
            'the program starts processes while it is imported: no if __name__ == "__main__"',
            hits[:1],
            'put all that runs, also loaders with workers, under if __name__ == "__main__": main()',
            confidence=0.7,
        )


_NOISE = re.compile(
    r"^\s*(?:$|[\W_]+$|at |File |Failures:|Root Cause|time |host |rank |exitcode|error_file|"
    r"traceback |\[\d+\]:$|<NO_OTHER)"
)


_SHELLS_CODES = {
    126: "126 is a shell's: it found a command and could not execute it. Is it executable, is the "
    "file system\nmounted noexec, is its first line right? Its words, if not above, "
    "went elsewhere (2>/dev/null?)\n",
    127: "127 is a shell's: it did not find a command. Its words, if not above, went elsewhere "
    "(2>/dev/null?);\nlook by hand:\n"
    "dflashctl exec {target} -- sh -c 'echo $PATH; command -v python3 python torchrun'\n",
}


_REASON = re.compile(r"error: (.+)")
_NEXT = re.compile(r"\s*next: (.+)")


def refused(e: Evidence) -> Iterator[Finding]:
    """`error: REASON`, then perhaps `next: STEP`, among the last words of a run that no other rule
    explains. So `python -m trainer` refuses a config, data, a target or a checkpoint; many programs
    do."""
    last = [line for line in e.lines[-60:] if line.number >= e.outcome.attempt_line]
    for index, line in reversed([*enumerate(last)]):
        if reason := _REASON.match(line.text):
            step = next((li for li in last[index + 1 : index + 10] if _NEXT.match(li.text)), None)
            told = _NEXT.match(step.text) if step else None
            yield e.found(
                "run.refused",
                reason[1][:300],
                [line, *([step] if step else [])],
                told[1] if told else "the reason is its own; mend that, then launch again",
                confidence=0.8 if told else 0.5,
            )
            return


def lone(e: Evidence) -> Iterator[Finding]:
    """Among the last words an exception without its traceback, and no rule that knows it."""
    first = e.lines[-12].number if len(e.lines) > 12 else 0
    last = [
        f
        for f in e.errors
        if f.line.source == "log"
        and not (f.headed or f.inner or e.recovered(f.line))
        and f.line.number >= max(first, e.outcome.attempt_line)
    ]
    for failure in last[-1:]:
        yield e.found(
            "code.error",
            f"{failure.name}: {_said(failure)[:160]}",
            [failure],
            "the traceback that names the place is not in this log: launch again, with stderr in "
            "it (2>&1)\n"
            + LOOK_AT.get(failure.name, "look for its words in the code and in its libraries"),
            confidence=0.5,
        )


def _of_a_shell(e: Evidence, code: int | None) -> str:
    return _SHELLS_CODES.get(code or 0, "").format(target=target_of(e))


def unknown(e: Evidence) -> Iterator[Finding]:
    """The run failed and no rule knows why: its last distinct lines, as they are."""
    last: list[Line] = []
    shapes: set[str] = set()
    step_lines = {s.number for s in e.series.steps}
    for line in reversed(e.lines[-400:]):
        shape = re.sub(r"[\d\W_]+", "", line.text)
        if _NOISE.match(line.text) or shape in shapes or line.number in step_lines or line.quiet:
            continue
        shapes.add(shape)
        last.insert(0, line)
        if len(last) == 6:
            break
    record = e.outcome.exit
    code = (
        next((c for c in (record.code, record.shell, *record.pipe) if c), None) if record else None
    )
    yield e.found(
        "unknown",
        "the run ended"
        + (f" with code {code}" if code else "")
        + " and said nothing that is known here",
        [*last, *([record.line] if record else [])] or list(e.probes)[:2],
        _of_a_shell(e, code) + f"dflashctl tail {run_of(e)} -n 200 --no-follow   # the last lines\n"
        f"dflashctl diag {run_of(e)} --bundle run.tar.zst   # keep it for a person",
        confidence=0.4,
    )


RULES = (code_error, usage_error, unguarded)
