"""Step lines of any trainer as numbers: step, loss, rate, accuracy, idle shares, queue depth.

Read are our own line and JSON record, and the habits of nanoGPT, torchtitan, Megatron, Lightning,
Keras and the transformers Trainer. A number that a line does not give is ``None``.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from orchestrator.diag.text import Line

_NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf|NaN|Inf|-inf|Infinity))"
_STEP = re.compile(
    r"(?:^|[\s\[|{,'\"])(?:global_step|step|iter(?:ation)?|it|update)s?['\"]?\s*[:=#]?\s*"
    r"(\d[\d,]*)(?:\s*(?:/|of)\s*(\d[\d,]*))?",
    re.IGNORECASE,
)
_LOSS = re.compile(
    r"(?:^|[\s|,{(\[])['\"]?(?:train[_/ ]|lm[_ ]|total[_ ])?loss['\"]?\s*[:=]?\s*['\"]?" + _NUMBER,
    re.IGNORECASE,
)
_ACCURACY = re.compile(r"\bacc(?:uracy)?['\"]?\s*[:=]?\s*" + _NUMBER, re.IGNORECASE)
_TAU = re.compile(r"\b(?:tau|accept(?:ance)?(?:_len(?:gth)?)?)['\"]?\s*[:=]?\s*" + _NUMBER)
_GRADIENT = re.compile(r"\bg(?:rad)?[_ ]?norm['\"]?\s*[:=]?\s*['\"]?" + _NUMBER, re.IGNORECASE)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s?Gi?B\b")
_TOKENS = re.compile(
    # Not of `lr 3e-4 tok/s 10500`: a number of its own follows, and nothing but a separator it.
    r"(?<![\w.-])([\d,]*\.?\d+)\s*([kKM])?\s?tok(?:en)?s?\s?(?:/|per )\s?s(?:ec(?:ond)?)?\b"
    r"(?!\s*[:=]?\s*[\d,.]+[kKM]?\s*(?:$|[|,;]))"
    r"|\b(?:tps|tok_s|tok/s|tokens?_per_s(?:ec(?:ond)?)?|tokens?/s(?:ec)?|throughput)"
    r"['\"]?\s*[:=]?\s*([\d,]*\.?\d+)\s*([kKM])?",
)
_RATE = re.compile(r"([\d.]+)\s?(it/s|s/it|steps/s|s/step|iter/s|s/iter|samples/s)\b")
_SECONDS = re.compile(
    r"^\[?step\s+(\d+)\]?:?\s+(?:took\s+)?([\d.]+) ?s\b"
    r"|\b(?:step_time|time per iteration|iter_time|dt)\w*(?: "
    r"\((ms)\))?['\"]?\s*[:=]\s*([\d.]+)\s?(ms|s)?"
    r"|\bt(?:ime|ook) ([\d.]+) ?(ms|s)\b"
)
_IDLE = re.compile(
    r"\bidle\s+t(?:arget)?\s+(\d+(?:\.\d+)?)\s?%\s+d(?:rafter)?\s+(\d+(?:\.\d+)?)\s?%"
)
_TARGET_IDLE = re.compile(
    r"\btarget[_ ](?:idle|wait|stall)\w*['\"]?\s*[:=]?\s*(\d+(?:\.\d+)?)\s?(%?)"
)
_DRAFTER_IDLE = re.compile(
    r"\bdraft(?:er)?s?[_ ](?:idle|wait|stall)\w*['\"]?\s*[:=]?\s*(\d+(?:\.\d+)?)\s?(%?)"
)
_QUEUE = re.compile(r"\b(?:queue|q)(?:_depth)?['\"]?\s*[:=]?\s*(\d+(?:\.\d+)?)(?:\s*/\s*(\d+))?")
BAR = re.compile(r"(\d+)/(\d+) \[[\d:?]+<[\d:?]+")
_EPOCH_BAR = re.compile(r"(\d+)/\1 \[=+\] - ")  # Keras, once an epoch is through
_EVAL_ONLY = re.compile(r"\b(?:eval|val|valid|validation|test)[_ /](?:loss|acc)", re.IGNORECASE)
_JSON_KEYS = {
    "step": ("step", "global_step", "iter", "iteration", "it"),
    "total": ("steps", "max_steps", "total_steps"),
    "loss": ("loss", "train_loss", "train/loss", "lm_loss"),
    "tokens": (
        "tokens_per_s",
        "tok_s",
        "tps",
        "tokens_per_sec",
        "tokens_per_second",
        "tok/s",
        "throughput",
    ),
    "seconds": ("step_time", "step_s", "dt", "sec_per_step", "step_seconds"),
    "accuracy": ("accuracy", "acc"),
    "tau": ("tau", "acceptance"),
    "target_idle": ("target_idle", "idle_target", "target_wait"),
    "drafter_idle": ("drafter_idle", "idle_drafter", "draft_idle", "drafter_wait"),
    "queue": ("queue_depth", "queue", "q"),
    "gradient": ("gradient_norm", "grad_norm", "gnorm"),
    "memory": ("memory_gb", "mem_gb", "mem"),
    "recompiles": ("recompiles",),
    "target_capacity": ("target_capacity",),
    "drafter_capacity": ("drafter_capacity",),
}


@dataclass(frozen=True, slots=True)
class Step:
    """What one line said of one step."""

    line: Line
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    steps_per_s: float | None = None
    accuracy: float | None = None
    tau: float | None = None
    target_idle: float | None = None
    """0..1"""
    drafter_idle: float | None = None
    queue: float | None = None
    gradient: float | None = None
    memory_gb: float | None = None
    recompiles: int | None = None
    waiting_share: float | None = None
    """Share of the step that went by waiting for data, if it is timed."""
    target_capacity: float | None = None
    """Context tokens a second if the targets never waited, as our trainer's record has it."""
    drafter_capacity: float | None = None

    @property
    def number(self) -> int:
        return self.line.number

    @property
    def rate(self) -> float | None:
        """Tokens a second, else steps a second: only ratios of one series mean anything."""
        return self.tokens_per_s if self.tokens_per_s is not None else self.steps_per_s


def read_step(line: Line) -> Step | None:
    """``None`` unless the line reports a training step."""
    text = line.text
    if len(text) > 4000 or line.quiet:
        return None
    if text[:1] == "{":
        return _record(line, text)
    bar = BAR.search(text)
    step = _STEP.search(text)
    epoch = _EPOCH_BAR.match(text) if bar is None else None
    # As most lines are: the rest is half of reading them.
    if bar is None and step is None and epoch is None:
        return None
    loss = _LOSS.search(text)
    seconds = _SECONDS.search(text)
    rate = _rate(text, seconds)
    tokens = _tokens(text)
    number: int | None
    total: int | None
    if epoch is not None and loss is not None:
        number = total = None
    elif bar is not None and loss is not None:
        number, total = int(bar[1]), int(bar[2])
    elif step is not None and (loss is not None or tokens is not None or rate is not None):
        number = _whole(step[1])
        total = _whole(step[2]) if step[2] else None
    else:
        return None
    if _EVAL_ONLY.search(text) and not re.search(r"\btrain", text):
        return None
    idle = _IDLE.search(text)
    queue = _QUEUE.search(text)
    return Step(
        line,
        number,
        total,
        _float(loss),
        tokens,
        rate,
        _float(_ACCURACY.search(text)),
        _float(_TAU.search(text)),
        float(idle[1]) / 100 if idle else _share(_TARGET_IDLE.search(text)),
        float(idle[2]) / 100 if idle else _share(_DRAFTER_IDLE.search(text)),
        float(queue[1]) if queue else None,
        _float(_GRADIENT.search(text)),
        float(memory[1]) if (memory := _MEMORY.search(text)) else None,
    )


def _record(line: Line, text: str) -> Step | None:
    try:
        record = json.loads(text)
    except ValueError:
        if "'" not in text:
            return None
        try:  # a Python dictionary, as the transformers Trainer prints it
            record = json.loads(text.replace("'", '"').replace(": nan", ": NaN"))
        except ValueError:
            return None
    if not isinstance(record, dict):
        return None
    values: dict[str, float | None] = {}
    for name, keys in _JSON_KEYS.items():
        values[name] = next((_value(record[k]) for k in keys if k in record), None)
    has_loss = any(k in record for k in _JSON_KEYS["loss"])
    if not has_loss and (values["step"] is None or values["tokens"] is None):
        return None
    if record.get("loss", 0) is None:
        values["loss"] = math.nan
    seconds = values["seconds"]
    step, total, recompiles = values["step"], values["total"], values["recompiles"]
    return Step(
        line,
        int(step) if step is not None and math.isfinite(step) else None,
        int(total) if total is not None and math.isfinite(total) else None,
        values["loss"],
        values["tokens"],
        1 / seconds if seconds else None,
        values["accuracy"],
        values["tau"],
        _fraction(values["target_idle"]),
        _fraction(values["drafter_idle"]),
        values["queue"],
        values["gradient"],
        values["memory"],
        int(recompiles) if recompiles is not None else None,
        _waiting(record),
        values["target_capacity"],
        values["drafter_capacity"],
    )


def _waiting(record: dict[str, object]) -> float | None:
    """Data time over all the times in the record."""
    times = {
        k: v
        for k, v in ((k, _value(v)) for k, v in record.items())
        if v is not None
        and re.search(r"_s$|_time$|_sec(?:onds)?$|_ms$", k)
        and k not in ("tok_s", "eta_s")
    }
    data = sum(v for k, v in times.items() if re.match(r"data|load|fetch|batch_wait|wait", k))
    whole = max(sum(times.values()), 1e-9)
    return data / whole if data and len(times) >= 2 else None


def _value(value: object) -> float | None:
    if isinstance(value, list) and value and all(isinstance(v, (int, float)) for v in value):
        return float(sum(value) / len(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None


def _fraction(value: float | None) -> float | None:
    if value is None:
        return None
    return value / 100 if value > 1.5 else value


def _float(match: re.Match[str] | None) -> float | None:
    if match is None:
        return None
    try:
        return float(match[1].replace(",", ""))
    except ValueError:
        return None


def _whole(text: str) -> int:
    return int(text.replace(",", "") or 0)


def _share(match: re.Match[str] | None) -> float | None:
    if match is None:
        return None
    value = float(match[1])
    return value / 100 if match[2] or value > 1.5 else value


def _tokens(text: str) -> float | None:
    match = _TOKENS.search(text)
    if match is None:
        return None
    digits, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
    try:
        value = float(digits.replace(",", ""))
    except ValueError:
        return None
    return value * {"k": 1e3, "K": 1e3, "M": 1e6}.get(unit or "", 1.0)


def _rate(text: str, seconds: re.Match[str] | None) -> float | None:
    match = _RATE.search(text)
    try:
        if match is not None:
            value = float(match[1])
            inverse = match[2].startswith("s/")
            return (1 / value if value else None) if inverse else value
        if seconds is not None:
            if seconds[2]:
                value, unit = float(seconds[2]), "s"
            elif seconds[4]:
                value, unit = float(seconds[4]), seconds[3] or seconds[5] or "s"
            else:
                value, unit = float(seconds[6]), seconds[7]
            value = value / 1000 if unit == "ms" else value
            return 1 / value if value else None
    except ValueError:
        return None
    return None


@dataclass
class Series:
    """The steps of a run in the order of the log."""

    steps: list[Step] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    def after(self, number: int) -> list[Step]:
        """Steps printed after line ``number``."""
        return self.steps[bisect_right(self._numbers, number) :]

    @cached_property
    def _numbers(self) -> list[int]:
        return [s.number for s in self.steps]

    def losses(self) -> list[Step]:
        return [s for s in self.steps if s.loss is not None]

    def rates(self) -> list[tuple[Step, float]]:
        """Of the unit that most lines give; of a step that is told twice, by all devices and by
        each, the first."""
        tokens = [
            (s, s.tokens_per_s)
            for before, s in zip([None, *self.steps], self.steps, strict=False)
            if s.tokens_per_s is not None and not (before is not None and _told_again(before, s))
        ]
        if len(tokens) * 2 >= len(self.steps) and tokens:
            return [(s, float(r)) for s, r in tokens if r is not None]
        both = [(s, s.steps_per_s) for s in self.steps if s.steps_per_s is not None]
        return [(s, r) for s, r in both if r is not None] or [
            (s, float(r)) for s, r in tokens if r is not None
        ]

    @property
    def total(self) -> int | None:
        return next((s.total for s in reversed(self.steps) if s.total), None)

    def restarts(self) -> list[int]:
        """Line numbers where the step counter fell back: a later attempt began before them."""
        found = []
        numbered = [(s.step, s) for s in self.steps if s.step is not None]
        for i in range(1, len(numbered)):
            (before, a), (now, b) = numbered[i - 1], numbered[i]
            if now >= before or a.line.rank != b.line.rank:
                continue
            following = numbered[i + 1][0] if i + 1 < len(numbered) else now
            if following < before or before - now > 1:  # not two threads printing out of order
                found.append(b.number)
        return found


def _told_again(before: Step, now: Step) -> bool:
    return (
        now.step is not None
        and (before.step, before.line.tag) == (now.step, now.line.tag)
        and before.tokens_per_s is not None
    )


def read_series(lines: Sequence[Line]) -> Series:
    """All step lines among ``lines``."""
    return Series([step for line in lines if (step := read_step(line)) is not None])
