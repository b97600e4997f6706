"""One run as one self-contained HTML page: what it is, how it went, what was wrong with it.

``render`` is pure: the verb collects the manifest, the lines and the findings, and writes the text.
The page needs no network, no script and no font of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from orchestrator.changes import flat, words
from orchestrator.diag.steps import Step
from orchestrator.report.plot import Chart, Mark, Series, draw, escape, number
from trainer.telemetry import EventLine, StepLine, compact, duration

# Which events deserve a line through the plots; the rest are listed only.
MARKED = {
    "compiling": "compile",
    "recompile": "compile",
    "eager_fallback": "alarm",
    "lock_wait": "compile",
    "nonfinite": "alarm",
    "checkpoint": "checkpoint",
    "resumed": "restart",
    "started": "restart",
    "stopping": "alarm",
    "failed": "alarm",
}


@dataclass(frozen=True)
class RunRecord:
    """All that the page shows. ``summary`` has the stable keys of ``--json``."""

    summary: dict[str, Any]
    manifest: dict[str, Any] = field(default_factory=dict)
    steps: Sequence[StepLine] = ()
    events: Sequence[EventLine] = ()
    findings: Sequence[dict[str, Any]] = ()
    last_lines: Sequence[str] = ()
    logged: Sequence[Step] = ()
    """The log's steps, where the run wrote no metrics."""
    where: str = "?"
    """The container, as ``status`` says it."""


def render(record: RunRecord) -> str:
    """The page. Every string that came from a container is escaped."""
    run_id = str(record.summary.get("run_id", "run"))
    return _PAGE.format(
        title=escape(run_id),
        style=(Path(__file__).parent / "style.css").read_text(encoding="utf-8"),
        head=_head(record),
        findings=_findings(record.findings, str(record.summary.get("state"))),
        charts=_charts(record),
        events=_events(record.events),
        manifest=_table(flat(record.manifest)),
        log=escape("\n".join(record.last_lines)) or "(nothing)",
    )


NO_STEPS = (
    "No curves: the run wrote no metrics.jsonl into $DFLASH_RUN_DIR (our trainer does; "
    "docs/reference/events.md says what is in one), and no line of its log tells a step with its "
    "loss or rate, such as: step 120 loss 2.31 10500 tok/s"
)
FROM_LOG = "Drawn from the log's lines: the run wrote no metrics.jsonl."


def _charts(record: RunRecord) -> str:
    if record.steps:
        return "".join(draw(chart) for chart in charts(record.steps, record.events))
    if record.logged:
        drawn = "".join(draw(chart) for chart in log_charts(record.logged))
        return f'<p class="none">{escape(FROM_LOG)}</p>{drawn}'
    return f'<p class="none">{escape(NO_STEPS)}</p>'


def log_charts(steps: Sequence[Step]) -> list[Chart]:
    """What the log of any trainer tells of its steps; what it never tells has no chart."""

    def chart(title: str, unit: str, key: str, from_zero: bool = True) -> Chart:
        points = [(float(s.step or 0), getattr(s, key)) for s in steps]
        return Chart(title, unit, [Series(key, points)], from_zero=from_zero)

    candidates = [
        chart("Loss", "as logged", "loss", from_zero=False),
        chart("Estimated acceptance length", "as logged", "tau", from_zero=False),
        chart("Accuracy", "as logged", "accuracy"),
        chart("Throughput", "tokens a second", "tokens_per_s"),
        chart("Pace", "steps a second", "steps_per_s"),
        chart("Gradient norm", "as logged", "gradient"),
        chart("Memory", "GB, as logged", "memory_gb"),
    ]
    return [one for one in candidates if any(y is not None for _, y in one.series[0].points)]


def charts(steps: Sequence[StepLine], events: Sequence[EventLine]) -> list[Chart]:
    """Loss, acceptance, accuracy by slot, throughput, idle shares, queue, memory."""
    marks = _marks(steps, events)

    def curve(name: str, key: str) -> Series:
        return Series(name, [(s.step, getattr(s, key)) for s in steps])

    slots = max((len(s.accuracy) for s in steps), default=0)
    shown = sorted({0, slots // 2, slots - 1}) if slots else []
    accuracy = [
        Series(
            f"slot {slot + 1}",
            [(s.step, s.accuracy[slot] if slot < len(s.accuracy) else None) for s in steps],
        )
        for slot in shown
    ]
    return [
        Chart("Loss", "weighted cross-entropy", [curve("loss", "loss")], marks),
        Chart("Estimated acceptance length", "tokens a block", [curve("tau", "tau")], marks),
        Chart("Accuracy", "share right, by slot", accuracy, marks, from_zero=True),
        Chart(
            "Throughput",
            "context tokens a second",
            [curve("tok/s", "tokens_per_s")],
            marks,
            compact,
            from_zero=True,
        ),
        Chart(
            "Idle",
            "share of the interval",
            [curve("target", "target_idle"), curve("drafter", "drafter_idle")],
            marks,
            lambda v: f"{v:.0%}",
            from_zero=True,
        ),
        Chart("Queue", "filled slots", [curve("queue", "queue_depth")], marks, from_zero=True),
        Chart(
            "Memory", "GB, fullest device", [curve("memory", "memory_gb")], marks, from_zero=True
        ),
    ]


def _marks(steps: Sequence[StepLine], events: Sequence[EventLine]) -> list[Mark]:
    """Events carry a time and the plots a step: the last step done at that time places them."""
    times = [s.time for s in steps]
    marks = []
    for event in events:
        kind = MARKED.get(event.event)
        if kind is None or not steps:
            continue
        at = max(0, bisect_right(times, event.time) - 1)
        marks.append(Mark(steps[at].step, kind, f"{event.event} {_detail(event.detail)}".strip()))
    return marks


def _head(record: RunRecord) -> str:
    last = record.steps[-1] if record.steps else None
    facts: list[tuple[str, str]] = [
        ("state", str(record.summary.get("state", "unknown"))),
        ("where", record.where),
    ]
    if last is not None:
        facts += [
            ("step", f"{last.step} of {last.steps}"),
            ("loss", "not finite" if last.loss is None else f"{last.loss:.4f}"),
            ("tau", "–" if last.tau is None else f"{last.tau:.2f}"),
            ("tok/s", "–" if last.tokens_per_s is None else compact(last.tokens_per_s)),
            ("tokens", number(float(last.tokens))),
            ("steps took", duration(last.time - record.steps[0].time)),
        ]
    elif record.logged:
        facts += _logged_facts(record.logged[-1])
    return "".join(f"<dl><dt>{k}</dt><dd>{escape(v)}</dd></dl>" for k, v in facts)


def _logged_facts(last: Step) -> list[tuple[str, str]]:
    found = [("step", f"{last.step} of {last.total}" if last.total else str(last.step))]
    if last.loss is not None:
        found.append(("loss", f"{last.loss:.4f}"))
    if last.tokens_per_s is not None:
        found.append(("tok/s", compact(last.tokens_per_s)))
    return found


def _findings(findings: Sequence[dict[str, Any]], state: str) -> str:
    if not findings and state == "failed":
        return '<p class="none">It failed, and nobody has asked why: dflashctl diag</p>'
    if not findings:
        return '<p class="good">Nothing is wrong with this run.</p>'
    return "".join(_finding(f) for f in findings)


def _finding(finding: dict[str, Any]) -> str:
    evidence = "\n".join(_quote(e) for e in finding.get("evidence", ()))
    severity = escape(str(finding.get("severity", "")))
    remedy = str(finding.get("remedy", ""))
    effects = "".join(
        f"<p>therefore <code>{escape(str(effect.get('code', '')))}</code> "
        f"{escape(str(effect.get('title', '')))}</p>"
        for effect in finding.get("consequences", ())
    )
    return (
        f'<article class="finding {severity}">'
        f"<h3><span>{severity}</span> <code>{escape(str(finding.get('code', '')))}</code> "
        f"{escape(str(finding.get('title', '')))}</h3>"
        + (f"<pre>{escape(evidence)}</pre>" if evidence else "")
        + effects
        + (f"<h4>what to do</h4><pre>{escape(remedy)}</pre>" if remedy else "")
        + "</article>"
    )


def _quote(evidence: dict[str, Any]) -> str:
    """``log:88121  the line``, as the terminal's report has it."""
    source = str(evidence.get("source", "")).removeprefix("probe:")
    line = f":{evidence['line']}" if evidence.get("line") else ""
    return f"{source}{line}  {evidence.get('text', '')}"


def _events(events: Sequence[EventLine]) -> str:
    rows = "".join(
        f"<tr><td>{_clock(e.time)}</td><td>{escape(e.event)}</td>"
        f"<td>{escape(_detail(e.detail))}</td></tr>"
        for e in events
    )
    return f"<table>{rows}</table>" if rows else '<p class="none">none</p>'


def _detail(detail: dict[str, Any], limit: int = 160) -> str:
    text = ", ".join(f"{key} {_value(value)}" for key, value in detail.items())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _value(value: Any) -> str:
    """For a reader: a float's first digits, a command's words, of a path in the run its end."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return text.rpartition("/runs/")[2].partition("/")[2] if "/runs/" in text else text


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def _table(facts: Mapping[str, Any]) -> str:
    body = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(words(value))}</td></tr>"
        for key, value in facts.items()
    )
    return f"<table>{body}</table>" if body else '<p class="none">none</p>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1><div class="facts">{head}</div>
<h2>Findings</h2>{findings}
<h2>Curves</h2>
<p class="none marks">Dashed lines: <span class="compile">compile</span> <span
class="checkpoint">checkpoint</span> <span class="restart">restart</span> <span
class="alarm">alarm</span> (hover over one to read which)</p>
<div class="charts">{charts}</div>
<h2>Events</h2>{events}
<h2>Last lines</h2><pre>{log}</pre>
<h2>Manifest</h2>{manifest}
</body></html>
"""
