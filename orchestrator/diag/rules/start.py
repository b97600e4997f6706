"""A start that came to nothing: no trainer ever spoke."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding, Severity
from orchestrator.diag.probes import Probe
from orchestrator.diag.rules.shared import run_of, spoke, target_of
from orchestrator.diag.steps import read_series
from orchestrator.diag.text import Line
from trainer.telemetry import duration

PROMPT = (
    r"\[[yY]/[nN]\]|\(y/n\)|\(yes/no(?:/\[fingerprint\])?\)|[Pp]ass(?:word|phrase)[^\n]{0,40}:\s*$|"
    r"[Pp]ress (?:any key|enter|return)|\b(?:overwrite|proceed|continue|are you sure)[^\n]{0,80}\?|"
    r"Username for|Enter your choice|\bread -p\b|wandb: (?:Enter|\(1\))"
)
NEVER = (
    r"duplicate session",
    r"^(?:\[exited\]|Pane is dead)",
    r"(?:^|: )\S+\.(?:sh|py): (?:Permission denied|cannot execute)|"
    r"\b(?:start\S*|run|train)\S*\.sh: (?:No such file or directory|Permission denied|not found)",
    r"cannot (?:open|execute)[^\n]*\.sh|can't open '?\S*\.sh|bad interpreter",
    r"syntax error near unexpected token|unexpected EOF while looking for|syntax error: ",
    r"can't open file '[^']+\.py'",
    r"create (?:session|window|pane) failed|fork failed|spawn failed",
    r"open terminal failed|missing or unsuitable terminal",
    r"error creating /\S*tmux-\d+|/\S*tmux-\d+ has unsafe permissions",
    # Our own supervisor's words; a program by its bare name that is not there is env.path's.
    r"\bcannot start ['\"](?:[^'\"]*/|[\w.+-]+\.(?:sh|py)['\"])",
    r"\bcannot start ['\"][^\n]*(?:Permission denied|Exec format error|there is no folder)",
)
PATIENCE = 600.0
"""Seconds that a program may take to its first word: imports and weights over a network mount."""
# A carriage return at the end of a script's lines, as bash, env, Python and dash show it.
CRLF = (
    r"\$'[^']*\\r'",
    r"\benv: ['‘][^'’]*\\r['’]: No such file",
    r"can't open file '[^']*\\r'",
    r"\^M: (?:bad interpreter|not found|No such file|command not found)",
    r"\bcannot start [^\n]*CRLF",
)
# Of a script that goes on after it, sudo's refusal is no end: only as the last word it counts.
SUDO = (
    r"\bsudo: (?:a terminal is required|no tty present|a password is required|"
    r"sorry, you must have a tty|\d+ incorrect password attempt)"
)
_NO_WORD = re.compile(
    r"still nothing|no output|waiting for (?:the )?first (?:line|word)|"
    r"never (?:spoke|wrote|printed)|no line(?:s)? (?:yet|from)"
)
_CUT = re.compile(r"(?:: (?:invalid option|not found|No such file|command not found|bad interp)|')")
_SHELL = re.compile(r"(?:\S+: (?:line )?\d+: |\S+\.(?:ba)?sh: )")


def not_started(e: Evidence) -> Iterator[Finding]:
    """A session without a trainer: it waits at a prompt, the script is absent or not executable,
    tmux had a session of that name, or it ended at once without a word. Of one that lives and says
    nothing this is only told for ten minutes, and is then a warning."""
    if e.progress or (e.outcome.state == "finished" and spoke(e)):
        return
    crlf = [h.line for h in e.unrecovered(*CRLF)] + _returns(e)
    words = e.unrecovered(*NEVER)
    words += [h for h in e.unrecovered(SUDO) if _last_words(e, h)]
    prompt = [li for li, _ in e.probes.search(PROMPT)]
    prompt += [li for li in e.lines[-3:] if re.search(PROMPT, li.text)]
    silent = [li for li in e.lines if _NO_WORD.search(li.text)]
    reason = bool(words or crlf or prompt)
    if not reason and (e.errors or not (silent or _empty(e))):
        return
    why = "the trainer never spoke"
    if prompt:
        why += f": the session waits at “{prompt[0].text.strip()[:80]}”"
    elif crlf:
        why += ": the lines of its script end in CRLF, as on Windows"
    elif words:
        why += ": " + words[0].line.text.strip()[:200]
    mend = _mend(crlf, words)
    severity = _severity(e, reason)
    if severity == "info" and e.probes.alive:
        why = f"not a word yet, {duration(e.probes.age or 0.0)} after its launch"
    told: list[Hit | Line] = [*crlf[:2], *words[:2], *prompt[:2], *silent[:1], *silent[-1:]]
    yield e.found(
        "run.not_started",
        why,
        [*told, *([] if reason else _bookkeeping(e))],
        mend + f"dflashctl attach {run_of(e)}   # its pane; Ctrl-b d leaves it\n"
        f"dflashctl launch {target_of(e)} --follow -- bash -x start_training.sh   # where it ends\n"
        "a run has nobody to answer prompts: give -y / --yes or remove the question",
        severity=severity,
        confidence=0.9 if reason else 0.7,
    )


def _last_words(e: Evidence, hit: Hit) -> bool:
    after = [li for li in e.lines if li.number > hit.line.number and li.text.strip()]
    return len(after) <= 3 and all(re.search(rf"exit|{SUDO}", li.text) for li in after)


def _severity(e: Evidence, reason: bool) -> Severity:
    """:param reason: something tells why nothing was said."""
    record, alive, age = e.outcome.exit, e.probes.alive, e.probes.age
    stopped = record is not None and bool(record.stopped_by)
    if not reason and (stopped or (alive and age is not None and age < PATIENCE)):
        return "info"
    # A command may have nothing to say; that nothing was trained is still worth a word.
    return "warning" if e.outcome.state == "finished" or (alive and not reason) else "fatal"


def _empty(e: Evidence) -> bool:
    """Nothing but bookkeeping was ever said. A container that was not reached shows no log either:
    then nothing is known of the start."""
    asked = bool(e.probes.named(r"run_state|exit|tmux|^ps(?!_host)|pane|session"))
    return asked and not spoke(e) and not _stands_still(e) and not _stepped(e)


def _bookkeeping(e: Evidence) -> list[Probe]:
    """What tells of a run without a word: how it ended, what its pane shows."""
    return (e.probes.named(r"exit|run_state|pane|tmux|session") or list(e.probes))[:2]


def _mend(crlf: list[Line], words: list[Hit]) -> str:
    """What to do about a script that could not run; empty where it is not known."""
    script = _script([*crlf, *(h.line for h in words)])
    if crlf:
        return (
            f"make its lines end in LF: sed -i 's/\\r$//' {script}; then launch again\n"
            "in git: echo '*.sh text eol=lf' >> .gitattributes; git add --renormalize .\n"
        )
    if any("sudo: " in h.line.text for h in words):
        return "sudo asks for a password: in the container the run is root's, and needs no sudo\n"
    if any("Permission denied" in h.line.text for h in words):
        return f"chmod +x {script}; then launch again, or name its program: -- bash {script}\n"
    if any("cannot start" in h.line.text for h in words):
        return (
            "a path counts from the run's code: dflashctl launch --dry-run lists what is sent\n"
            "its first line must name a program that the container has: "
            f"head -1 {script} | cat -A\n"
        )
    return ""


def _script(lines: list[Line]) -> str:
    """The script's name in our supervisor's words or a shell's; ``SCRIPT`` if they have none."""
    named = r"cannot start ['\"]([^'\"]+)['\"]|(?:^|: )(\S+\.(?:sh|py|bash)): "
    found = next((m for li in lines if (m := re.search(named, li.text)) is not None), None)
    return (found[1] or found[2]) if found is not None else "SCRIPT"


def _returns(e: Evidence) -> list[Line]:
    """A shell's complaint that a carriage return cut in two: its end is drawn over its begin."""
    pairs = zip(e.lines, e.lines[1:], strict=False)
    return [
        one
        for one, two in pairs
        if one.number == two.number and _SHELL.match(one.text) and _CUT.match(two.text)
    ]


def _stands_still(e: Evidence) -> bool:
    """The container is frozen or not running now: an empty log may be one that was not read."""
    words = r"\bfrozen[ :=]+1\b|\b(?:FROZEN|FREEZING)\b|status: (?:stopped|frozen|paused)"
    return e.probes.has(words)


def _stepped(e: Evidence) -> bool:
    """The trainer's own records hold a step: it spoke, whatever became of its log."""
    return any(read_series(p.lines).steps for p in e.probes.named(r"metrics"))


RULES = (not_started,)
