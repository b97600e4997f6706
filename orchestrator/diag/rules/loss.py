"""The numbers themselves: not finite, rising, not falling."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, pstdev

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.steps import Step

NAN_WORDS = (
    r"(?i)\b(?:loss|grad(?:ient)?s?(?:[_ ]norm)?|norm|activations?|logits|weights|parameters?|"
    r"inputs?|outputs?)\b[^\n]{0,30}"
    r"(?:is|are|was|became|went|has|have|contains?|=|:|==)\s*(?:not finite|non-?finite|nan\b|"
    r"inf\b|-inf\b|all nan)",
    r"(?i)(?:nan|non-?finite|not finite|inf(?:inite)?)\b[^\n]{0,40}\b(?:loss|grad(?:ient)?s?|"
    r"norm|logits)\b(?! ?(?:check|clip|guard|=|:|[-+]?[\d.]))",
    r"is non-finite, so it cannot be clipped",
    r"returned nan values in its \d+th output",
    r"FloatingPointError|Loss is (?:NaN|nan|inf)|NaN (?:or Inf |values? )?(?:found|detected|"
    r"encountered)",
    r"[Nn]umber of nan iterations: +[1-9]",
    r"loss scale already at minimum",
    r'"event": ?"nonfinite"',
)
_SCALER = re.compile(
    r"(?i)overflow|loss scale|scaler|skipp(?:ed|ing)|reducing|Attempted loss scale"
)


def nan(e: Evidence) -> Iterator[Finding]:
    """``loss nan`` in step lines, torch's ``The total norm … is non-finite, so it cannot be
    clipped``, anomaly mode's ``returned nan values``, Megatron's counter. A loss scaler that
    skips a step or two and goes on is healthy."""
    bad = [s for s in e.series.steps if s.loss is not None and not math.isfinite(s.loss)]
    grads = [s for s in e.series.steps if s.gradient is not None and not math.isfinite(s.gradient)]
    words = [
        h
        for h in e.search(*NAN_WORDS)
        if not re.search(r"(?i)check|detect_anomaly|nan_?guard|anomaly mode", h.line.text)
        or "detected" in h.line.text
    ]
    steps = {s.line.number for s in [*bad, *grads]}
    words = [h for h in words if h.line.number not in steps]
    # fairseq's and DeepSpeed's last word: a scale that was halved until nothing is left.
    ended = re.compile(r"FloatingPointError|[Mm]inimum loss scale|scale already at minimum")
    hard = [h for h in words if not _SCALER.search(h.line.text) or ended.search(h.line.text)]
    hard = [h for h in hard if not e.recovered(h.line)]
    hard = [*_still(e, hard), *_halved_away(e)]
    losses = e.series.losses()
    last = losses[-1] if losses else None
    stays = (
        bool(bad) and last is not None and last.loss is not None and not math.isfinite(last.loss)
    )
    lost = len(grads) >= 3 and grads[-1] is e.series.steps[-1]
    if e.outcome.state == "finished" and not stays:
        return
    if not (hard or stays or lost):
        return
    first = bad[0] if bad else grads[0] if grads else None
    before = [s for s in losses if first is not None and s.number < first.number][-2:]
    at_step = f" from step {first.step}" if first is not None and first.step is not None else ""
    yield e.found(
        "loss.nan",
        "loss or gradients are not finite" + at_step,
        [*(s.line for s in before), *([first.line] if first else []), *hard[:3]],
        "resume from a checkpoint before it, with a lower learning rate, longer warm-up and "
        "clipping\n"
        "torch.autograd.set_detect_anomaly(True) on that step names the operation\n"
        "suspects: fully masked rows in softmax, log(0), fp16 overflow (use bf16), a bad "
        "sample at that step",
        confidence=0.93,
        lasting=True,
    )


def _halved_away(e: Evidence) -> list[Hit]:
    """apex' scaler, whose scale the last lines have below all that a gradient of numbers needs."""
    hits = [h for h in e.search(r"reducing loss scale to (\S+)") if h.line.source == "log"][-3:]
    small = [h for h in hits if (scale := _number(h.match[1])) is not None and scale < 1e-4]
    return small if len(small) == 3 else []


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_NO_NUMBER = re.compile(r"(?i)\b[-+]?(?:nan|inf)\b")


def _still(e: Evidence, hits: list[Hit]) -> list[Hit]:
    """Those whose very words are not said later with a number: by the next of several trainings
    in one log, whose lines count no steps that the series reads."""
    told = [h.line for h in hits if h.line.source == "log" and _NO_NUMBER.search(h.line.text)]
    last = {_figure(line.text): line for line in told}
    for line in e.lines if last else ():
        figure = _figure(line.text)
        # A line that was copied from its middle on has lost its logger's name.
        for words in (w for w in last if figure.endswith(w)):
            last[words] = line if line.number > last[words].number else last[words]
    mended = {line.number for line in told if not _NO_NUMBER.search(last[_figure(line.text)].text)}
    return [h for h in hits if h.line.source != "log" or h.line.number not in mended]


def _figure(text: str) -> str:
    """A line's words without what it counts."""
    return re.sub(r"[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?", "#", _NO_NUMBER.sub("#", text.strip()))


def diverged(e: Evidence) -> Iterator[Finding]:
    """The loss climbed from its best for many lines and stays up: at least half as much again and
    half a nat. A spike that comes back, and noise, are not it."""
    points = _points(e)
    if len(points) < 8:
        return
    values = [v for _, v in points]
    smooth = [fmean(values[max(0, i - 2) : i + 1]) for i in range(len(values))]
    best = min(range(2, len(smooth)), key=lambda i: smooth[i])
    tail = smooth[best:]
    if len(tail) < 5:
        return
    end = fmean(values[-3:])
    rising = sum(b > a for a, b in pairwise(tail)) / (len(tail) - 1)
    burst = min(values[-5:]) > 100 * max(values[0], 0.1)
    climbed = end > 1.4 * smooth[best] and end > smooth[best] + 0.5
    high = (rising > 0.6 or end > 1.1 * values[0]) and end > 0.8 * max(values[best:])
    if not ((climbed and high) or burst):
        return
    a, b = points[best][0], points[-1][0]
    yield e.found(
        "loss.diverged",
        f"the loss rises: {smooth[best]:.2f} at step {a.step if a.step is not None else '?'}, "
        f"now {end:.2f}",
        [a.line, points[(best + len(points)) // 2][0].line, b.line],
        "stop it: dflashctl stop; resume from the checkpoint before the rise\n"
        "lower the peak learning rate or lengthen the warm-up; clip gradients at 1.0\n"
        "did it begin at the peak of the schedule, at an epoch's start, or at a resume?",
        severity="warning" if e.outcome.state == "running" or e.errors else "fatal",
        confidence=0.88,
        lasting=True,
    )


def stuck(e: Evidence) -> Iterator[Finding]:
    """Hundreds of steps from the start without a fall, or accuracy and τ at nothing after a
    thousand. A plateau late in a run is no finding."""
    points = _points(e)
    if len(points) < 10:
        return
    first, last = points[0][0], points[-1][0]
    values = [v for _, v in points]
    quarter = max(2, len(values) // 4)
    start, end = fmean(values[:quarter]), fmean(values[-quarter:])
    span = (
        (last.step - first.step)
        if first.step is not None and last.step is not None
        else len(points) * 10
    )
    total = e.series.total
    early = (
        first.step is None or first.step <= 100 or (total is not None and first.step < 0.02 * total)
    )
    flat = end > 0.985 * start and abs(end - start) < 0.02 * max(abs(start), 1e-9)
    dead = _dead(points)
    if flat and not dead and _falls(values, span, total):
        return
    if flat and span >= 200 and ((early and start > 1.0) or dead):
        yield e.found(
            "loss.stuck",
            f"the loss does not fall: {start:.2f} at the start, {end:.2f} after {span} steps",
            [first.line, points[len(points) // 2][0].line, last.line],
            "is anything trained? sum(p.requires_grad for p in model.parameters()); gradient "
            "norm above 0?\n"
            "is the learning rate above 0 (the lr column)? does the optimizer hold the "
            "drafter's parameters?\n"
            "overfit one batch first: it must go to zero; check that labels are shifted once, "
            "not twice",
            severity="warning" if e.outcome.state == "running" or e.errors else "fatal",
            confidence=0.82,
            lasting=True,
        )


def _falls(values: Sequence[float], span: int, total: int | None) -> bool:
    """Slowly but surely, as in a long warm-up: every quarter's mean below the one before by more
    than the noise, and at this pace a twentieth of the whole by the run's end."""
    quarter = len(values) // 4
    if quarter < 4 or total is None:
        return False
    parts = [values[i * quarter : (i + 1) * quarter] for i in range(4)]
    means = [fmean(part) for part in parts]
    # Within a quarter the fall itself counts as noise: that errs on the side of the warning.
    noise = max(pstdev(part) for part in parts) / math.sqrt(quarter)
    surely = all(before - after > 2 * noise for before, after in pairwise(means))
    return surely and (means[0] - means[-1]) / span * total > 0.05 * means[0]


def _dead(points: Sequence[tuple[Step, float]]) -> bool:
    last = [s for s, _ in points[-5:]]
    accuracy = [s.accuracy for s in last if s.accuracy is not None]
    tau = [s.tau for s in last if s.tau is not None]
    step = last[-1].step or 0
    return (
        step >= 1000
        and bool(accuracy or tau)
        and all(a < 0.05 for a in accuracy)
        and all(t < 1.15 for t in tau)
    )


def _points(e: Evidence) -> list[tuple[Step, float]]:
    """Finite losses of the last attempt, of one rank if ranks report apart."""
    steps = [s for s in e.progress if s.loss is not None]
    ranks = {s.line.rank for s in steps}
    if len(ranks) > 1:
        first = steps[0].line.rank
        steps = [s for s in steps if s.line.rank == first]
    return [(s, s.loss) for s in steps if s.loss is not None and math.isfinite(s.loss)]


RULES = (nan, diverged, stuck)
