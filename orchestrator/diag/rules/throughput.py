"""Slow runs: against the run's own best, its predecessor and its plan; who waits for whom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding, Severity
from orchestrator.diag.plan import behind, capacities, plan_of
from orchestrator.diag.probes import Probe
from orchestrator.diag.steps import Series, Step
from orchestrator.diag.text import Line

WARM_LINES = 6

STARVED = (
    r"(?i)\b(?:drafters?|trainers?|consumers?|readers?)\b[^\n]{0,40}\b(?:starv\w+|waited|"
    r"waits?|waiting|blocked|idle)\b[^\n]{0,40}"
    r"\b(?:features?|target|hidden states|queue|batch(?:es)?|data|blocks?|input|ring)\b",
    r"(?i)\b(?:queue|ring|buffer|prefetch)\b[^\n]{0,20}\b(?:empty|dry|underrun|starved)\b",
    r"(?i)\b(?:ran|running|run) dry\b|\bunderrun\b",
    r"(?i)\bdata[_ ]?(?:time|wait|load(?:ing|er)?(?: time)?)[ :=]+(\d+(?:\.\d+)?) ?s\b[^\n]*",
    r"(?i)\bget (?:waited|blocked) (\d+(?:\.\d+)?) ?s",
    r"(?i)waited? (\d+(?:\.\d+)?) ?s for (?:features|the target|data|a batch|batch|input|"
    r"the loader|hidden)",
)
BACKPRESSURE = (
    r"(?i)\b(?:put|push|enqueue|send|publish) (?:waited|blocked|waits)\b[^\n]*",
    r"(?i)\b(?:queue|ring|buffer|slots?)\b[^\n]{0,20}\b(?:is |are |all )?full\b",
    r"(?i)\btargets?\b[^\n]{0,40}\b(?:waited|waits?|waiting|blocked|idle|stalled)\b[^\n]{0,40}"
    r"\b(?:slot|drafters?|reader|consumer|free|room|queue|ring)\b",
    r"(?i)waiting for (?:a )?(?:free )?slots?|no free slots?|blocks? behind",
    r"(?i)back-?pressure",
)


def collapse(e: Evidence) -> Iterator[Finding]:
    """The last lines' median rate below half of the run's own best stretch, or below six tenths of
    the predecessor's; or below half of what its own stages have shown that
    they can, each alone. Warm-up, one slow line round a checkpoint, and a rate that came back are
    healthy, and so is whatever the plan's counted costs promised: that is only told."""
    rates = [(s, r) for s, r in Series(e.progress).rates() if r > 0] or _bar_rates(e.lines)
    if len(rates) < 3:
        return
    values = [r for _, r in rates]
    now = median(values[-min(5, max(3, len(values) // 4)) :])
    best, best_at = _best(rates)
    unit = "tok/s" if rates[-1][0].tokens_per_s is not None else "steps/s"
    what, changed = _changes(e)
    stage = _stage_at_fault(e)
    if now < 0.5 * best and len(values) >= 6:
        drop = next(
            (
                s
                for i, (s, r) in enumerate(rates)
                if s.number > best_at.number and all(v < 0.65 * best for v in values[i : i + 3])
            ),
            rates[-1][0],
        )
        yield e.found(
            "throughput.collapse",
            f"the rate fell to {_round(now)} {unit}, {now / best:.0%} of this run's best "
            f"{_round(best)}{stage}",
            [best_at.line, drop.line, rates[-1][0].line, *changed],
            _ADVICE,
            severity="warning",
            confidence=0.88,
            lasting=True,
        )
        return
    measured = list(_against_predecessor(e, now, unit, rates, what or stage, changed))
    if unit != "tok/s" or any(f.severity == "warning" for f in measured):
        yield from measured
        return
    planned = list(_against_plan(e, now, [s for s, _ in rates]))
    yield from planned or measured


def _against_predecessor(
    e: Evidence,
    now: float,
    unit: str,
    rates: list[tuple[Step, float]],
    why: str,
    changed: list[Line],
) -> Iterator[Finding]:
    """Below six tenths of the predecessor's rate. Where that did other work (longer rows, fewer
    GPUs) this is only told, and where it had another target not even that."""
    other = _predecessor(e, unit)
    if other is None or now >= 0.62 * other[0]:
        return
    unlike = _unlike(other[1])
    if any(one.startswith("target.model ") for one in unlike):
        return
    if unlike:
        why = f", which is no measure of it: {', '.join(unlike[:4])}"
    yield e.found(
        "throughput.collapse",
        f"{_round(now)} {unit}, {now / other[0]:.0%} of {other[2]}'s {_round(other[0])}{why}",
        [other[1], rates[0][0].line, rates[-1][0].line, *changed],
        _ADVICE,
        severity="info" if unlike else "warning",
        confidence=0.4 if unlike else 0.85,
        lasting=True,
    )


def _unlike(source: Line | Probe) -> list[str]:
    """Why a predecessor's rate is no measure of this run's, as ``orchestrator.same_work`` says."""
    value = source.value if isinstance(source, Probe) else None
    unlike = value.get("unlike") if isinstance(value, dict) else None
    return [str(one) for one in unlike] if isinstance(unlike, list) else []


def _against_plan(e: Evidence, now: float, steps: list[Step]) -> Iterator[Finding]:
    """``now``: context tokens a second, as our trainer counts both."""
    plan = plan_of(e)
    # The gauge looks back over 20 steps, so the first lines still hold the warm-up.
    if plan is None or len(steps) < WARM_LINES:
        return
    recent = steps[-5:]
    shown = capacities(steps[3:])
    # Two threads that only launch small kernels share one interpreter: 0.60 of the slower stage.
    reach = min(shown.values()) if len(shown) == 2 and plan.apart else None
    if reach is not None and now < 0.5 * reach and not _waits(e)[0]:
        title = (
            f"measured {_round(now)} tok/s; planned {_round(reach)}, by what each stage takes when "
            "it works; at fault is neither stage: both wait, for copies, sums over ranks or Python"
        )
        severity: Severity = "warning"
    elif not plan.on_cpu and now < 0.5 * plan.rate:
        # Of counted costs: SmolLM2's healthy stages reach a tenth.
        late = behind(plan, recent)
        fault = f"; the {late} is farthest behind its part" if late else _stage_at_fault(e)
        title = (
            f"measured {_round(now)} tok/s; planned {_round(plan.rate)} "
            f"(counted costs, an upper bound){fault}"
        )
        severity = "info"
    else:
        return
    yield e.found(
        "throughput.collapse",
        title,
        [plan.line, recent[0].line, recent[-1].line],
        _ADVICE,
        severity=severity,
        confidence=0.75,
        lasting=True,
    )


def _changes(e: Evidence) -> tuple[str, list[Line]]:
    """What differs from the run before: in a few words, and the lines."""
    for probe in e.probes.named(r"^changes$"):
        if not probe.lines:
            continue
        since, lines = probe.lines[0].text.rstrip(":"), list(probe.lines[1:])
        kinds = dict.fromkeys(li.text.partition(":")[0] for li in lines if ": " in li.text)
        if kinds:
            return f"; {since} changed: {', '.join(kinds)}", lines[:4]
        return f"; {since} nothing that is recorded changed: clocks, neighbours, disks?", lines[:1]
    return "", []


def _stage_at_fault(e: Evidence) -> str:
    """Who is waited for, by the idle shares of the last lines."""
    verdict, _ = _waits(e)
    return {
        "starved": "; the target is what is slow: drafters wait for it",
        "backpressure": "; the drafters are what is slow: the target waits for them",
    }.get(verdict, "")


_ADVICE = (
    "what changed since a good run: dflashctl env diff GOOD THIS; dflashctl status GOOD THIS\n"
    "nvidia-smi -q -d PERFORMANCE,CLOCK   # clocks held down?  nvidia-smi pmon -c 1   # "
    "neighbours?\n"
    "TORCH_LOGS=recompiles   # compiling all the time?  py-spy top --pid PID   # where it is"
)


_BAR = re.compile(r"^\s*\d+%\|[^|]*\|\s*(\d+)/(\d+) \[(?:(\d+):)?(\d+):(\d\d)<")


def _bar_rates(lines: list[Line]) -> list[tuple[Step, float]]:
    """Steps a second of tqdm's bar without a title, which is the transformers Trainer's.

    Its dictionaries give no rate, and the rate in the bar is smoothed: one validation would slow it
    for a dozen steps. So elapsed time is read, whole seconds, at points 5 s or more apart. Bars
    over rows of data run at hundreds a second and are left out.
    """
    points: dict[int, list[tuple[Line, int, int]]] = {}
    for line in lines:
        if (match := _BAR.match(line.text)) is not None:
            done, total = int(match[1]), int(match[2])
            seconds = int(match[3] or 0) * 3600 + int(match[4]) * 60 + int(match[5])
            known = points.setdefault(total, [])
            if known and done <= known[-1][1]:
                known.clear()  # begun anew
            if not known or seconds >= known[-1][2] + 5:
                known.append((line, done, seconds))
    longest = max(points.values(), key=len, default=[])
    rates = [
        (
            Step(line, done, steps_per_s=(done - before) / (now - then)),
            (done - before) / (now - then),
        )
        for (_, before, then), (line, done, now) in pairwise(longest)
    ]
    return rates if len(rates) >= 6 and median(r for _, r in rates) < 50 else []


def _best(rates: list[tuple[Step, float]]) -> tuple[float, Step]:
    """The best median of three neighbours, so that one lucky line sets no standard."""
    if len(rates) < 5:
        step, rate = max(rates, key=lambda p: p[1])
        return rate, step
    windows = [
        (median(r for _, r in rates[i : i + 3]), rates[i + 1][0]) for i in range(len(rates) - 2)
    ]
    return max(windows, key=lambda w: w[0])


def _round(rate: float) -> str:
    return f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.3g}"


_OTHER = re.compile(
    r"(?i)predecessor|parent|previous(?: run)?|prior run|baseline|last run|"
    r"before the (?:change|update)|reference run|"
    r"\bplan(?:ned)?\b|expected (?:rate|throughput|tok)|compared (?:to|with)|same config"
)


# A program's own log compares with much: a plan, another machine, its last phase.
_SAID = re.compile(
    r"(?i)predecessor|parent|(?:previous|prior|last|reference) run|baseline|same config|"
    r"before the (?:change|update)"
)
_NO_MEASURE = re.compile(r"(?i)\b(?:an)?other\b|different|\bplan|expected|paper|published")
_RECORDS = re.compile(r"^(?:events|metrics)(?:\.jsonl)?$")


def _predecessor(e: Evidence, unit: str) -> tuple[float, Line | Probe, str] | None:
    number = (
        r"(\d[\d,]*\.?\d*) ?([kKM])?\s?(?:tok(?:en)?s?\s?/\s?s\w*|tok/s|tps)|(?:tok_s|"
        r"tokens_per_s\w*|tok/s|tps)\W{1,4}(\d[\d.,]*) ?([kKM])?"
    )
    if unit != "tok/s":
        number = r"(\d+\.?\d*)()()() ?(?:it/s|steps/s)"
    scale = {"k": 1e3, "K": 1e3, "M": 1e6}
    for probe in e.probes:
        if _RECORDS.match(probe.key):
            continue  # a plan of counted costs is among them, and no run's measure
        if not (_OTHER.search(probe.key) or _OTHER.search(probe.text)):
            continue
        found = [_value(m, scale) for m in re.finditer(number, probe.text)]
        if not found and _OTHER.search(probe.key):
            found = [
                float(m)
                for m in re.findall(r"(?:median|best|mean|rate)\D{1,20}(\d[\d.]*)", probe.text)
            ]
        if isinstance(probe.value, (int, float)) and not isinstance(probe.value, bool):
            found = [float(probe.value)]
        if found:
            return (
                median(found),
                probe,
                "its predecessor" if not probe.key.startswith("plan") else "the plan",
            )
    for line in e.lines:
        said = _SAID.search(line.text) and not _NO_MEASURE.search(line.text)
        match = re.search(number, line.text) if said else None
        if match is not None and not any(s.line is line for s in e.series.steps):
            return _value(match, scale), line, "its predecessor"
    return None


def _value(match: re.Match[str], scale: dict[str, float]) -> float:
    digits, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
    try:
        return float(digits.replace(",", "").rstrip(".")) * scale.get(unit or "", 1.0)
    except ValueError:
        return 0.0


def starved(e: Evidence) -> Iterator[Finding]:
    """Drafters wait: high drafter idle share, empty queue; or the loader cannot keep up."""
    shares, waits = _waits(e)
    if waits == "full":
        return
    said = _unmeasured(e.search(*STARVED))
    said = [h for h in said if _seconds(h) is None or (_seconds(h) or 0) >= 1.0]
    said = [
        h
        for h in said
        if not h.line.tag.startswith("target")
        and not re.search(r"(?i)not empty|never|no longer", h.line.text)
    ]
    mostly = len(said) >= 3 or any((_seconds(h) or 0) >= 5 for h in said)
    timed = [s for s in e.progress if s.waiting_share is not None][-8:]
    loading = len(timed) >= 3 and median(s.waiting_share or 0.0 for s in timed) > 0.5
    if not (shares == "starved" or ((mostly or loading) and shares != "backpressure")):
        return
    data = loading or any(re.search(r"(?i)\bdata|loader|disk|nfs", h.line.text) for h in said)
    steps = _idle_steps(e)[-2:] or (timed[-2:] if loading else [])
    yield e.found(
        "throughput.starved",
        "the drafters wait for "
        + ("data: the loader cannot keep up" if data else "the target's features"),
        [*(s.line for s in steps), *said[:2], *said[-1:]],
        (
            "more loader workers, data on a local disk, tokenize beforehand; iostat -x 5 on "
            "the host\n"
            if data
            else ""
        )
        + "more pipeline.targets or fewer pipeline.drafters; a larger target batch\n"
        "is a target GPU slow or shared? nvidia-smi pmon -c 1; nvidia-smi -q -d CLOCK",
        severity="warning",
        confidence=0.86,
        lasting=True,
    )


def backpressure(e: Evidence) -> Iterator[Finding]:
    """The target waits for drafters: high target idle share, a full queue, ``put waited … (ring
    full)``; the slowest reader holds the ring for all, so other drafters may be idle as well."""
    shares, _ = _waits(e)
    said = _unmeasured(e.search(*BACKPRESSURE))
    said = [h for h in said if _seconds(h) is None or (_seconds(h) or 0) >= 1.0]
    full = len(said) >= 3 or any((_seconds(h) or 0) >= 5 for h in said)
    if not (shares == "backpressure" or (full and shares != "starved")):
        return
    slow = re.search(
        r"(?i)\b(?:reader|drafter|consumer)[- _]?(\d+)[^\n]*behind|slowest\D{0,20}(\d+)",
        " ".join(h.line.text for h in said),
    )
    who = (slow[1] or slow[2]) if slow else ""
    cause = [
        h
        for h in e.search(
            rf"(?i)\[?drafter[- _]?{who}\]?\b[^\n]*(?:\d+(?:\.\d+)? ?s|offload|cpu|slow)"
        )
        if who
    ]
    own = [li for li in e.lines if who and li.tag == f"drafter-{who}"]
    steps = _idle_steps(e)[-2:]
    yield e.found(
        "throughput.backpressure",
        "the target waits for " + (f"drafter {who}, the slowest reader" if who else "the drafters"),
        [*(s.line for s in steps), *said[:2], *said[-1:], *cause[:1], *own[:2]],
        "more pipeline.drafters or fewer pipeline.targets; fewer anchors or layers\n"
        "one slow drafter holds all: its GPU's clocks, its optimizer on the CPU, a recompile?\n"
        "py-spy top --pid PID; nvidia-smi dmon -s pucm -c 5",
        severity="warning",
        confidence=0.86,
        lasting=True,
    )


def _waits(e: Evidence) -> tuple[str, str]:
    """Verdict of the idle shares of the last lines, and of words about full rings."""
    steps = _idle_steps(e)[-8:]
    verdict = ""
    if len(steps) >= 3:
        target = median(s.target_idle or 0.0 for s in steps)
        drafter = median(s.drafter_idle or 0.0 for s in steps)
        if drafter >= 0.35 and drafter > 2 * target:
            verdict = "starved"
        elif target >= 0.35 and target > 2 * drafter:
            verdict = "backpressure"
    full = [h for h in e.search(*BACKPRESSURE[:2]) if (_seconds(h) or 2) >= 1]
    empty = e.search(STARVED[1])
    return verdict, "full" if len(full) > max(2, len(empty)) else ""


def _unmeasured(hits: list[Hit]) -> list[Hit]:
    """Without lines that give a small share themselves: "waiting for features 4 % of the time"."""
    share = re.compile(r"(?i)(?:wait|idle|starv|block)\w*[^\n|%]{0,40}?(\d+(?:\.\d+)?) ?%")
    return [h for h in hits if (m := share.search(h.line.text)) is None or float(m[1]) >= 35]


def _idle_steps(e: Evidence) -> list[Step]:
    return [s for s in e.progress if s.target_idle is not None or s.drafter_idle is not None]


def _seconds(hit: Hit) -> float | None:
    match = re.search(r"(\d+(?:\.\d+)?) ?s(?:ec(?:onds)?)?\b", hit.line.text)
    return float(match[1]) if match else None


RULES = (collapse, starved, backpressure)
