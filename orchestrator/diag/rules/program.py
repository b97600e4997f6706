"""Programs that a shell, or our own way in, could not find or execute."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.shared import container_of, target_of

PATH = (
    r"(?:^|: )(?:line \d+: )?([\w./+-]+): (?:command )?not found\b",
    r"(?:^|: )command not found: ([\w./+-]+)",
    # bash in de, fr, es, it, pt, nl, pl, ru, zh, ja
    r": ([\w./+-]+) ?: (?:Kommando nicht gefunden|Befehl nicht gefunden|commande introuvable|"
    r"orden no encontrada|comando non trovato|comando não encontrado|opdracht niet gevonden|"
    r"nie znaleziono polecenia|команда не найдена|未找到命令|コマンドが見つかりません)",
    r"exec: \"([^\"]+)\": executable file not found in \$PATH",
    # nohup, timeout, nice, env, stdbuf of coreutils; setsid and chrt of util-linux
    r"failed to (?:run command|execute) ['‘`]?([\w./+-]+)['’`]?: No such file or directory",
    r"/usr/bin/env: ['‘]?([\w./+-]+)['’]?: No such file or directory",
    r"FileNotFoundError: \[Errno 2\] No such file or directory: '((?:\w[\w+-]*)|"
    r"/usr/\S*bin/\S+)'\s*$",
    r'Failed to exec "([^"]+)"',
    r"(?:which: no|no) ([\w+-]+) in \(",
    r"(?:bash|sh): (?:line \d+: )?(/\S*bin/[\w.+-]+): No such file or directory",
    # Our own supervisor, of a program by its bare name.
    r"\bcannot start ['\"]([\w.+-]+)['\"] in [^\n]*: No such file or directory(?!; there is no)",
)
NVCC = (
    r"CUDA_HOME environment variable is not set",  # torch.utils.cpp_extension
    r"(?:No such file or directory|not found): '?\S*/bin/nvcc\b",
)
USUAL = (
    *("python3", "python", "torchrun", "accelerate", "deepspeed", "bash", "sh", "env", "uv"),
    *("conda", "nohup", "numactl", "nsys", "mpirun", "jupyter", "tensorboard"),
)
_TOOLS_ELSEWHERE = re.compile(r"^(?:tmux|pct|ssh|nvidia-smi)$|/tmux$|\.sh$|\.py$")
_NO_FIRST_LINE = (
    # bash 5.2 and later; before it, and zsh
    r": (/\S+/)([\w.+-]+): cannot execute: required file not found",
    r": (/\S+/)([\w.+-]+): /\S+: bad interpreter: No such file or directory",
)


def moved_environment(e: Evidence) -> Iterator[Finding]:
    """A program whose first line names an interpreter that is gone: ``torchrun`` and ``pip`` of a
    virtual environment that was moved or copied keep the old path."""
    hits = [h for h in e.search(*_NO_FIRST_LINE, probes=False) if not h[2].endswith(".sh")]
    if not hits or e.progress:
        return
    folder, name = hits[-1][1], hits[-1][2]
    module = {"torchrun": "torch.distributed.run"}.get(name, name.replace("-", "_"))
    yield e.found(
        "env.path",
        f"{folder}{name} names an interpreter that is not there: was its environment moved?",
        hits[-3:],
        f"in the container: head -1 {folder}{name}   # the interpreter that it asks for\n"
        f"{folder}python -m {module} …   # needs no first line\n"
        "or make the environment anew where it is to stay",
        confidence=0.9,
    )


def no_nvcc(e: Evidence) -> Iterator[Finding]:
    """A library builds an extension when it is first used (DeepSpeed, flash-attn), and torch's
    wheels bring no compiler for CUDA."""
    hits = e.unrecovered(*NVCC, probes=False)
    if hits:
        yield e.found(
            "env.path",
            "nvcc is not found: an extension is to be built, and the CUDA toolkit is not here",
            hits[:3],
            "in the container: ls -d /usr/local/cuda*; export CUDA_HOME=/usr/local/cuda "
            "PATH=/usr/local/cuda/bin:$PATH\n"
            "none there: install the toolkit of torch.version.cuda (cuda-toolkit-12-8), or a wheel "
            "that is built",
        )


def command_path(e: Evidence) -> Iterator[Finding]:
    """127 and the shells' ways to say it (``bash: line 1: torchrun: command not found``, dash's
    ``python: not found``, lxc-attach's ``Failed to exec "x"``). pct exec's PATH lacks
    /usr/local."""
    hits = [
        h for h in e.search(*PATH) if not _TOOLS_ELSEWHERE.search(_name(h)) and not _ignored(e, h)
    ]
    log = [h for h in hits if h.line.source == "log"]
    if not log and (tried := [h for h in hits if h.line.source in OWN_WAY]):
        yield _no_interpreter(e, tried)
    if not log or e.progress:
        return
    name = _name(log[-1])
    near = [] if name in USUAL else difflib.get_close_matches(name, USUAL, n=1, cutoff=0.75)
    where = e.probes.search(rf"/\S+/{re.escape(name)}\b|/\S*venv\S*/bin/python") if name else []
    yield e.found(
        "env.path",
        f"{name} is not on the container's PATH" + (f"; did you mean {near[0]}?" if near else ""),
        [*log[-3:], *(li for li, _ in where[:1])],
        f"in the container: command -v {name}; ls /usr/local/bin /opt/*/bin | grep {name}\n"
        "pct exec gives PATH=/sbin:/bin:/usr/sbin:/usr/bin: export "
        "PATH=/opt/venv/bin:/usr/local/bin:$PATH\n"
        "in start_training.sh, or set `python:` in the inventory; Debian has python3, not python",
        confidence=0.9,
    )


OWN_WAY = ("probe:pct", "probe:ssh")
"""What our own way into a container said: there the program is the inventory's interpreter."""


def _no_interpreter(e: Evidence, hits: list[Hit]) -> Finding:
    hit = hits[-1]
    path = _name(hit) or e.place.python
    number = container_of(e)
    denied = "Permission denied" in hit.line.text
    folder = path.rpartition("/bin/")[0]
    system = folder in ("", "/usr")  # the package's place: no virtual environment belongs there
    make = "apt install -y python3" if system else f"python3 -m venv {folder}"
    return e.found(
        "env.path",
        f"{path} in the container is not executable"
        if denied
        else f"the container has no {path}, which the inventory names as its interpreter",
        hits[:3],
        f"in the inventory: `python:` of {target_of(e)}; what there is: pct exec {number} -- sh -c "
        f"'ls -l {path} /usr/bin/python3* /opt/*/bin/python*'\n"
        f"or make it: pct exec {number} -- {make}\n"
        "what runs there is unknown, not failed: the agent needs an interpreter to look",
        confidence=0.95,
        lasting=True,
    )


def _name(hit: Hit) -> str:
    """The program, by whichever pattern found it."""
    return hit[hit.match.lastindex or 0]


def _ignored(e: Evidence, hit: Hit) -> bool:
    if e.recovered(hit.line):
        return True
    following = next((li for li in e.lines if li.number == hit.line.number + 1), None)
    return following is not None and "(ignored)" in following.text


RULES = (moved_environment, no_nvcc, command_path)
