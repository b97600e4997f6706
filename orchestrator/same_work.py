"""Whether two runs do the same work, so that one's speed says something of the other's. Pure.

Tokens a second measure a machine only where a token costs the same: another program, another target
or rows twice as long are slower or faster by what was asked for.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.changes import flat, last_detail

TARGET = "target.model"

_SHELLS = frozenset({"bash", "sh", "dash", "zsh"})
_RUNS_MODULES = re.compile(r"python[\d.]*$|torchrun$|accelerate$|deepspeed$")
_LAUNCHES = re.compile(
    r"torch\.distributed\.\w+|trainer\.torchrun|accelerate\.commands\.\w+|deepspeed\.launcher\.\w+|"
    r"cProfile|pdb|coverage|memray|scalene|viztracer"
)
"""Modules that run another program."""
_IN_FRONT = re.compile(
    r"(?:python[\d.]*|bash|sh|dash|zsh|env|exec|nice|nohup|stdbuf|time|timeout|numactl|taskset|sudo|"
    r"setsid|torchrun|accelerate|launch|deepspeed|mpirun|srun|uv|conda|poetry|run|cd|source|set|"
    r"export|ulimit)$|"
    r"[\d.:,-]+[smhd]?$|\w+=|-|[;&|()<>]+$"
)
"""Words before a program that has no telling ending: launchers, their options and numbers."""
_SCRIPT = re.compile(r"[^\s=-][^\s=]*\.(?:py|sh|bash)")
_MODULE = re.compile(r"[A-Za-z_][\w.]*")
_CONFIG_FILE = re.compile(r"[^\s=]+\.(?:ya?ml|json|toml|gin|cfg)$")

# Of our trainer's config: what decides how much is computed for a token. What decides only how
# fast (attention, dtype, fp8, executor, graphs) is what a slow run is to be blamed on.
_OURS = re.compile(
    rf"{re.escape(TARGET)}|drafter\.(?!start$|initializer_range$|mask_token_id$).*|"
    r"data\.(?:sequence_length|anchors)|objective\.labels|"
    r"optimization\.(?:rows|microbatches|optimizer|head_sample)"
)
# Of anybody else's config and options the names are all that is known.
_THEIRS = re.compile(
    r"(?!.*(?:out|sav|export|log|eval|valid|test|resume|checkpoint))"
    r"(?:.*[._])?(?:\w*model\w*(?:\..*)?|teacher|student|config\w*|\w*seq\w*|\w*len(?:gth)?|context\w*|"
    r"block_size|\w*batch\w*|rows|\w*layers?|hidden\w*|\w*heads|width|depth|dim|anchors|"
    r"optim(?:izer)?|nproc\w*|nnodes|num_(?:processes|machines|gpus|nodes))"
)
_DEVICES = re.compile(r"GPUs|nodes|nproc\w*|nnodes|num_(?:processes|machines|gpus|nodes)")


@dataclass(frozen=True)
class Work:
    """What a run was asked to do, as far as its records tell."""

    program: str
    """The script, as it was named, or the module; empty if nothing tells."""
    config: Mapping[str, Any] | None = None
    """Of its ``started`` event, flat, what makes a token dear; None if it wrote none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of its command, the same."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """How many GPUs and nodes, where that is known."""


def work_of(record: Mapping[str, Any], events: str) -> Work:
    """By ``run.json`` and the beginning of ``events.jsonl``."""
    command = record.get("command")
    words = list(map(str, command)) if isinstance(command, list) else []
    told = last_detail(events, "started").get("config")
    config = None
    if isinstance(told, dict):
        fields = flat(told)
        sizes = _OURS if TARGET in fields else _THEIRS
        config = {name: value for name, value in fields.items() if sizes.fullmatch(name)}
    options = {name: value for name, value in _options(words) if _THEIRS.fullmatch(name)}
    return Work(program(words), config, options, _devices(record, events))


def is_other_program(before: Work, now: Work) -> bool:
    """Whether nothing that the one did says anything of the other."""
    return before.program != now.program


def differences(before: Work, now: Work) -> list[str]:
    """Why their rates are no measure of each other, a few words for each reason; a target first.

    More devices are none: they make no run slower. Nor is the loss of the last one: that is what is
    wrong with it.
    """
    if before.config is not None and now.config is not None:
        old, new = before.config, now.config
        # A field that only one of them knows came with another version.
        names = sorted(old.keys() & new.keys(), key=lambda name: (name != TARGET, name))
    else:
        old, new = before.options, now.options
        names = sorted(old.keys() | new.keys())
    told = [(name, old.get(name), new.get(name)) for name in names]
    told += [
        (name, before.devices[name], now.devices[name])
        for name in sorted(before.devices.keys() & now.devices.keys())
    ]
    return [f"{name} {a} → {b}" for name, a, b in told if a != b and not _is_more(name, a, b)]


def _is_more(name: str, before: Any, now: Any) -> bool:
    try:
        return bool(_DEVICES.fullmatch(name)) and not 0 < int(now) < int(before)
    except (TypeError, ValueError):
        return False


def program(command: Sequence[str]) -> str:
    """What a command runs, past whatever launches it: ``train.py`` of ``torchrun
    --nproc-per-node 8 ./train.py --lr 1``, ``trainer`` of ``bash -c 'exec python -m trainer …'``.

    The first word that ends in ``.py`` or follows ``-m``, else the first that ends in ``.sh``, else
    the first that is no launcher.
    """
    words = list(_words(command))
    runs_modules = False
    for at, word in enumerate(words):
        if (
            runs_modules
            and words[at - 1] in ("-m", "--module")
            and _MODULE.fullmatch(word)
            and not _LAUNCHES.fullmatch(word)
        ):
            return word
        if _SCRIPT.fullmatch(word) and word.endswith(".py"):
            return posixpath.normpath(word)
        runs_modules = runs_modules or bool(_RUNS_MODULES.match(posixpath.basename(word)))
    scripts = [word for word in words if _SCRIPT.fullmatch(word)]
    plain = [word for word in words if not _is_in_front(word)]
    return posixpath.normpath(next(iter([*scripts, *plain, *words]), "")) if words else ""


def _is_in_front(word: str) -> bool:
    return any(_IN_FRONT.match(said) for said in (word, posixpath.basename(word)))


def _words(command: Sequence[str]) -> Iterator[str]:
    """Also those of a line that a shell is given after ``-c``."""
    for at, word in enumerate(command):
        if _takes_a_line(command[:at]):
            yield from _shell_words(word)
        else:
            yield word


def _takes_a_line(before: Sequence[str]) -> bool:
    """Whether a shell takes what follows as a line: ``bash -lc``, ``bash -euo pipefail -c``."""
    if not before or not re.fullmatch(r"-[a-z]*c", before[-1]):
        return False
    at = len(before) - 2
    while at > 0 and (before[at].startswith("-") or re.fullmatch(r"-[a-z]*o", before[at - 1])):
        at -= 1
    return at >= 0 and posixpath.basename(before[at]) in _SHELLS


def _shell_words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:
        # A quote that nobody closes: the shell will say so.
        return line.split()


def _options(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """``--name value``, ``--name=value``, ``NAME=value``, and a config file's name alone."""
    words = list(_words(command))
    for at, word in enumerate(words):
        follows = words[at + 1] if at + 1 < len(words) else ""
        if match := re.fullmatch(r"-{0,2}([A-Za-z][\w.-]*)=(.*)", word, re.DOTALL):
            yield _name(match[1]), match[2]
        elif re.fullmatch(r"--[A-Za-z][\w.-]*", word):
            yield _name(word), "" if follows.startswith("-") else follows
        elif _CONFIG_FILE.fullmatch(word) and not (at and words[at - 1].startswith("--")):
            yield "config", word


def _name(word: str) -> str:
    return word.lstrip("-").replace("-", "_").lower()


def _devices(record: Mapping[str, Any], events: str) -> dict[str, int]:
    found: dict[str, int] = {}
    plan, given = last_detail(events, "plan"), record.get("gpus")
    parts = [part for part in (plan.get("targets"), plan.get("drafters")) if isinstance(part, list)]
    if used := {str(device) for part in parts for device in part}:
        found["GPUs"] = sum(not device.startswith("cpu") for device in used)
    elif isinstance(given, list) and given:
        found["GPUs"] = len(given)
    nodes = record.get("nodes")
    if isinstance(nodes, Mapping) and isinstance(nodes.get("of"), int):
        found["nodes"] = nodes["of"]
    return found
