"""How the run ended, as far as the log and the probes say: finished, failed, running, unknown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.diag.probes import Exit, Probes
from orchestrator.diag.steps import Series
from orchestrator.diag.text import Line
from orchestrator.diag.tracebacks import Failure

State = Literal["finished", "failed", "running", "unknown"]

_DONE = re.compile(
    r"^(?:\W*(?:train(?:ing|er)?|run|job|all|fit|epochs?)?[ :]*(?:is |has |was )?(?:all )?"
    r"(?:done|finished|complete[d]?|successful(?:ly)?)\b(?! (?:waiting|loading|reading|compil|warm|"
    r"tokeniz|download|init|build|prepar))(?!\s*[:=]\s*(?:false|0|no)\b).{0,80}"
    r"|.*\b[Tt]raining (?:completed|complete|finished|done|succeeded)\b.*"
    r"|.*(?:`?Trainer\.fit`? stopped: `max_(?:steps|epochs)).*"
    r"|.*['\"]train_runtime['\"].*"
    r"|.*\"event\": ?\"(?:finished|done|complete[d]?)\".*"
    r"|.*\b(?:final|last) (?:model|checkpoint|weights) (?:saved|written|exported)\b.*"
    r"|.*\breached (?:max_steps|the last step|total_steps)\b.*)$",
    re.IGNORECASE,
)
_PART_DONE = re.compile(
    r"\b(?:load|download|compil|warm|preflight|push|eval|valid|tokeniz|cache|shard|save|copy|"
    r"connect|bundle|build|check|prefetch|mask)\w*\b",
    re.IGNORECASE,
)
_ATTEMPT = re.compile(
    r"(?:^|[\s\[])(?:attempt|try|retry|restart)[ _#:=]*(?:no\.? ?)?(\d+)\b(?:\s*(?:/|of)\s*\d+)?"
    r"|\brestart(?:ing|ed)\b.*\b(?:train|run|worker|from|process|attempt|group|policy|trainer)"
    r"|\bresum(?:e|ed|ing)\b.{0,40}\b(?:from|at|checkpoint|ckpt|step)"
    r"|\b(?:second|third|next|another) attempt\b|worker group.*restart"
    r"|(?:\d+)/\d+ attempts left; will restart worker group|=+ ?run \S+ ?=+",
    re.IGNORECASE,
)
_ENDED = re.compile(
    r"\bexit(?:ed|s|ing)?(?: return| code| status| with| rc)*[ :=(]+(?:code |status )?"
    r"(-?[1-9]\d*)\b"
    r"|\b(?:rc|exit_?code|status|returncode)[ =:]+(-?[1-9]\d{0,2})\)?\s*$"
    r"|\bfailed \(exitcode: -?[1-9]"  # torchrun of a rank; it may start it again
    r"|Error (12[67])\b(?! \(ignored\))|^\S*: \*\*\* .*Error (\d+)"
    r"|^\[\d+\][+-]? +Exit [1-9]"  # bash of a job in the background
    r"|^(?:bash: line \d+: +\d+ |.*\.sh: line \d+: +\d+ )?(?:Killed|Terminated|Aborted|Hangup|"
    r"Segmentation fault|Bus error|Floating point exception|"
    r"Illegal instruction)(?: \(core dumped\))?"
    r"(?:\s.*)?$|ChildFailedError|\bFAILED$"
)
# A shell's own complaint, or an exception's line, as the very last word of a log.
_COMPLAINT = re.compile(
    r"^(?:(?:/\S*/)?(?:bash|sh|dash|zsh|ash|ksh)|\S+\.(?:sh|bash)): (?:line )?\d+:? ?\S"
    r"|^(?:\w+\.)*\w+(?:Error|Exception|Interrupt|Exit)\b(?::\s|:?$)"
)
# One stage that is done, or a watcher's word, is not the run.
_WORKER = re.compile(
    r"(?i)target|draft|worker|loader|reader|stage|thread|supervisor|watch|eval|data|cache|gpu|"
    r"\w*\d$"
)
_GOES_ON = re.compile(
    r"(?<!lease )\b(?:retry(?:ing)?|retried|recovered|reconnected|continu(?:e|ing)|skipp(?:ed|ing)|"
    r"fall(?:ing|s)? back|fell back|succeeded|resum(?:ed|ing)|ok after|works? now|connected|"
    r"ignor(?:ed|ing)|non-?fatal|using \S+ instead)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    state: State = "unknown"
    exit: Exit | None = None
    done_line: int | None = None
    """Line of the log that said the run was done; what follows it is noise."""
    attempt_line: int = 0
    """First line of the last attempt: errors before it were survived by a restart."""
    ended: Line | None = None
    """The line that tells of the end, where there is one."""
    alive: bool | None = None
    going_on: tuple[int, ...] = field(default=(), repr=False)
    last_step_line: int = 0
    last_line: int = 0

    def moved_on(self, number: int) -> bool:
        """A line soon after ``number`` says that it was retried or passed over, and the log went
        on beyond that without an error to end it."""
        if self.state == "failed":
            return False
        return any(0 <= line - number <= 12 for line in self.going_on)


def read_outcome(
    lines: Sequence[Line], series: Series, failures: Sequence[Failure], probes: Probes
) -> Outcome:
    """From the last attempt's last words, an exit record and a process list, the record first."""
    last_step = series.steps[-1].number if series.steps else 0
    record, alive = probes.exit, probes.alive
    done = _done_line(lines, last_step)
    attempt = _attempt(lines, series)
    ended = _ended(lines, last_step, done, attempt)
    going_on = _going_on(lines, failures)
    fatal = any(
        f.headed and f.first > last_step and not any(0 <= n - f.last <= 12 for n in going_on)
        for f in failures
        if f.line.source == "log" and not f.ignored and f.first >= attempt
    )
    code = _own_code(record, done) if record is not None else None
    state: State = "unknown"
    if code:
        state = "failed"
    elif ended is None and (
        (code == 0 and not fatal) or (done is not None and (record is None or code == 0))
    ):
        state = "finished"
    elif ended is not None or (fatal and alive is not True):
        state = "failed"
    elif alive:
        state = "running"
    elif alive is False or (done is None and _complains(lines, last_step)):
        state = "failed"
    elif series.steps and not fatal and probes.now is not None:
        state = "running"
    if state == "failed" and record is not None and record.code:
        done = None  # what came after the word was no noise
    last_line = lines[-1].number if lines else 0
    return Outcome(state, record, done, attempt, ended, alive, going_on, last_step, last_line)


def _own_code(record: Exit, done: int | None) -> int | None:
    """The trainer's code, or the signal that ended it, among those that were recorded."""
    own = record.pipe[0] if record.pipe else record.code
    # A shell's code beside the trainer's 0 counts where the log has no word of an end.
    if own is None or (not record.pipe and own == 0 and record.shell and done is None):
        own = record.shell
    return own or record.signal or own


def _going_on(lines: Sequence[Line], failures: Sequence[Failure]) -> tuple[int, ...]:
    """Lines that say that something was retried or passed over; a traceback's own words, such as
    "got 'retry'", do not."""
    inside = {
        n
        for f in failures
        if f.headed and f.line.source == "log"
        for n in range(f.first, f.line.number + 1)
    }
    return tuple(
        li.number
        for li in lines
        if li.number not in inside and not li.quiet and _GOES_ON.search(li.text)
    )


def _complains(lines: Sequence[Line], last_step: int) -> bool:
    """The last word is an error, and nothing says that the run went on."""
    spoken = [li for li in lines[-8:] if li.text.strip() and not li.quiet]
    # A message that goes on below is indented.
    last = next((li for li in reversed(spoken) if not li.text[0].isspace()), None)
    return last is not None and last.number > last_step and bool(_COMPLAINT.match(last.text))


def _done_line(lines: Sequence[Line], last_step: int) -> int | None:
    for line in lines:
        if line.number < last_step or line.quiet or _WORKER.match(line.tag):
            continue
        match = _DONE.match(line.text)
        if match is None or len(line.text) > 400:
            continue
        if _PART_DONE.search(line.text) and not re.search(r"[Tt]rain|final|last", line.text):
            continue
        return line.number
    return None


def _ended(lines: Sequence[Line], last_step: int, done: int | None, attempt: int) -> Line | None:
    for line in reversed(lines[-400:]):
        if line.number <= last_step:
            return None
        if done is not None and line.number > done and not _own_failure(line):
            continue
        if line.number < attempt and "failed (exitcode: " in line.text:
            continue
        if not line.quiet and _ENDED.search(line.text) is not None:
            return line
    return None


def _own_failure(line: Line) -> bool:
    """After "done" only the launcher's word counts, not the noise of shutting down."""
    return re.search(r"ChildFailedError|\bFAILED$|exitcode: -?[1-9]", line.text) is not None


def _attempt(lines: Sequence[Line], series: Series) -> int:
    first = max(series.restarts(), default=0)
    for line in lines:
        if not line.quiet and _ATTEMPT.search(line.text) is not None and line.number > 3:
            first = max(first, line.number)
    return first
