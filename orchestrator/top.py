"""The dashboard: every run of every container, as rows of text. Pure but for :class:`Board`."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator import logged_steps
from orchestrator.alarm import Notice, Throughput, Watched
from orchestrator.channel import AgentChannel
from orchestrator.errors import DflashctlError, silence
from orchestrator.fleet import Fleet
from orchestrator.gpu_use import Cards, Look, Looks, mean_use
from orchestrator.run import RunSummary
from orchestrator.run_files import SEED_LINES, read_metrics
from orchestrator.target import Target
from orchestrator.terminal_text import fit, fit_name
from orchestrator.watch import keep_asking
from trainer.telemetry import StepLine, compact, duration

EVERY_S = 3.0
# The newest runs of a container; one that lives is always among them.
PER_CONTAINER = 5
ALARMS_SHOWN = 8
# Read every time of a run that writes no metrics.jsonl: a step line is among the last few.
LOG_LINES = 20
# No full block: rows would grow together.
BARS = "▁▂▃▄▅▆▇"
PLAIN_BARS = "_.-=+*#"

# Name, width at 80 columns, share of what is wider than that.
COLUMNS = (
    ("RUN", 20, 4),
    ("WHERE", 10, 2),
    ("STATE", 9, 1),
    ("STEP", 11, 1),
    ("TOK/S", 6, 0),
    ("", 7, 4),
    ("ETA", 6, 0),
    ("GPU", 4, 0),
)
COLOURS = {
    "training": "green",
    "preparing": "cyan",
    "compiling": "cyan",
    "starting": "cyan",
    "stalled": "bold red",
    "failed": "red",
    "unreachable": "yellow",
}
SHORT = {"unreachable": "no answer", "not running": "off"}
"""Where a column is too narrow for the word."""


@dataclass
class Row:
    """One run, or a container that has none or does not answer."""

    where: str
    watched: Watched = field(default_factory=Watched)
    run_id: str | None = None
    rates: list[float] = field(default_factory=list)
    gpu: float | None = None
    """Mean utilization of its GPUs, in percent."""

    @property
    def is_live(self) -> bool:
        return self.run_id is not None and not self.watched.is_over


@dataclass(frozen=True)
class Alarm:
    """When, which run or container, and what."""

    stamp: str
    who: str
    text: str

    def line(self, width: int = 100) -> str:
        """At most ``width`` characters of the name, so that room is left for the words."""
        return f"{self.stamp} {fit_name(self.who, width)}: {self.text}"


@dataclass(frozen=True)
class Line:
    """A line of the frame: its text, and the style of (start, end) parts of it."""

    text: str
    styles: tuple[tuple[int, int, str], ...] = ()


def frame(
    rows: Sequence[Row], alarms: Sequence[Alarm], width: int, clock: str, *, bars: str = BARS
) -> list[Line]:
    """The whole screen: a heading, a line a run, the newest alarms; none wider than ``width``."""
    states = Counter(row.watched.state for row in rows if row.run_id)
    counts = ", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "no runs"
    lines = [Line(fit(f"dflashctl top  {clock}  {counts}", width), ((0, 13, "bold"),)), Line("")]
    widths = column_widths(width)
    heads = [name for name, _, _ in COLUMNS]
    lines.append(Line(_join(heads, widths), ((0, width, "bold"),)))
    for row in sorted(rows, key=_order):
        lines.append(_row(row, widths, bars))
    if alarms:
        lines += [Line(""), Line("alarms", ((0, 6, "bold"),))]
        lines += [
            Line(fit(alarm.line(width // 4), width), ((0, width, "yellow"),))
            for alarm in alarms[-ALARMS_SHOWN:]
        ]
    return lines


def column_widths(width: int) -> list[int]:
    """Widths that fill ``width``; below 80 the first column gives way."""
    base = [w for _, w, _ in COLUMNS]
    spare = width - sum(base) - (len(base) - 1)
    if spare < 0:
        return [max(8, base[0] + spare), *base[1:]]
    shares = [share for _, _, share in COLUMNS]
    return [w + spare * share // sum(shares) for w, share in zip(base, shares, strict=True)]


def sparkline(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """The last ``width`` values as bars from zero to the greatest of all: a fall stays seen."""
    known = [v for v in values if v >= 0]
    top = max(known, default=0.0)
    if not top > 0:
        return ""
    return "".join(bars[min(len(bars) - 1, int(v / top * len(bars)))] for v in known[-width:])


def _order(row: Row) -> tuple[bool, bool, str, str]:
    summary = row.watched.summary
    created = -(summary.created or 0.0) if summary else 0.0
    return (not row.is_live, row.run_id is None, row.where, f"{created:020.3f}")


def _row(row: Row, widths: list[int], bars: str) -> Line:
    watched, summary = row.watched, row.watched.summary
    live = summary is not None and not summary.is_over
    cells = [""] * len(COLUMNS)
    cells[0] = fit_name(row.run_id, widths[0]) if row.run_id else "-"
    cells[1] = fit_name(row.where, widths[1])
    cells[2] = state_text(row)
    if summary is not None:
        cells[3] = summary.progress or ""
    if live and summary is not None and summary.tokens_per_s is not None:
        cells[4] = compact(summary.tokens_per_s)
    cells[5] = sparkline(row.rates, widths[5], bars)
    if live and watched.eta_s is not None:
        cells[6] = duration(watched.eta_s)
    if row.gpu is not None:
        cells[7] = f"{row.gpu:.0f}%"
    start = widths[0] + widths[1] + 2
    style = COLOURS.get(cells[2], "dim")
    if len(cells[2]) > widths[2]:
        cells[2] = SHORT.get(cells[2], cells[2])
    slow = ((start + widths[2] + widths[3] + 2, start + sum(widths[2:6]) + 3, "yellow"),)
    styles = ((start, start + widths[2], style), *(slow if watched.throughput.is_slow else ()))
    return Line(_join([fit(c, w) for c, w in zip(cells, widths, strict=True)], widths), styles)


def state_text(row: Row) -> str:
    if row.watched.unreachable is not None:
        return silence(row.watched.unreachable)
    return "idle" if row.run_id is None else row.watched.state


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(f"{c:<{w}}" for c, w in zip(cells, widths, strict=True)).rstrip()


@dataclass(frozen=True)
class _Answer:
    target: Target
    runs: tuple[RunSummary, ...] = ()
    past: dict[str, list[StepLine]] = field(default_factory=dict)
    cards: Cards = field(default_factory=dict)
    error: DflashctlError | None = None


class Board:
    """Asks every container again and again, one thread each, and keeps their rows."""

    def __init__(self, fleet: Fleet, targets: Sequence[Target], *, drop: float) -> None:
        self.alarms: list[Alarm] = []
        self._fleet = fleet
        self._targets = targets
        self._drop = drop
        self._rows: dict[str, dict[str | None, Row]] = {}
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._over = threading.Event()
        self._crowd = Counter(target.host for target in targets)
        self._looks = Looks(fleet)
        fleet.expect(targets)

    def start(self) -> None:
        for target in self._targets:
            threading.Thread(
                target=self._ask_on, args=(target,), daemon=True, name=f"top {target.name}"
            ).start()

    def stop(self) -> None:
        self._over.set()

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self._rows.values() for row in rows.values()]

    def wait(self, seconds: float) -> None:
        """Take in whatever is answered within ``seconds``."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                self._take(self._answers.get(timeout=left))
            except queue.Empty:
                return

    def wait_for_all(self, seconds: float) -> None:
        """Until every container was heard of once, or did not answer within ``seconds``."""
        until = time.monotonic() + seconds
        while len(self._rows) < len(self._targets) and time.monotonic() < until:
            self.wait(min(0.05, max(0.0, until - time.monotonic())))

    def _take(self, answer: _Answer) -> None:
        name = answer.target.name
        rows = self._rows.setdefault(name, {})
        if answer.error is not None:
            live = [row for row in rows.values() if row.is_live]
            for row in live:
                self._tell(row, row.watched.miss(answer.error))
            if not live:
                # Nothing of it was known to run: shown, and no alarm.
                self._rows[name] = {None: self._bare(name, answer.error)}
            return
        runs = [run for run in answer.runs if not run.is_over] or list(answer.runs[:1])
        kept: dict[str | None, Row] = {
            run.run_id: rows.get(run.run_id) or self._new(name, run.run_id) for run in runs
        }
        self._rows[name] = kept or {None: self._new(name, None)}
        for run in runs:
            row = kept[run.run_id]
            past = answer.past.get(run.run_id)
            if past is not None:
                row.rates = [line.tokens_per_s or 0.0 for line in past]
                self._tell(row, row.watched.seed(past))
            elif run.step != (row.watched.summary.step if row.watched.summary else None):
                row.rates = [*row.rates, run.tokens_per_s or 0.0][-SEED_LINES:]
            self._tell(row, row.watched.feed(run))
            row.gpu = mean_use(answer.cards.get(run.run_id, ()))

    def _new(self, where: str, run_id: str | None) -> Row:
        return Row(where, Watched(Throughput(drop=self._drop)), run_id)

    def _bare(self, name: str, error: DflashctlError) -> Row:
        row = self._new(name, None)
        row.watched.miss(error)
        return row

    def _tell(self, row: Row, notices: list[Notice]) -> None:
        stamp = time.strftime("%H:%M:%S")
        self.alarms += [
            Alarm(stamp, row.run_id or row.where, n.text) for n in notices if n.is_alarm
        ]

    # In the threads

    def _ask_on(self, target: Target) -> None:
        seen: set[str] = set()

        def ask(channel: AgentChannel) -> bool:
            look = self._looks.begin(target, channel)
            self._answers.put(_ask(channel, target, look, seen))
            return False

        keep_asking(
            self._fleet,
            target,
            ask,
            lambda error: self._answers.put(_Answer(target, error=error)),
            every_s=EVERY_S,
            crowd=self._crowd[target.host],
            over=self._over,
        )


def _ask(channel: AgentChannel, target: Target, look: Look, seen: set[str]) -> _Answer:
    listing = channel.request("run.list", limit=PER_CONTAINER)
    runs = tuple(RunSummary.model_validate(run) for run in listing.result()["runs"])
    fresh = [run.run_id for run in runs if run.run_id not in seen]
    past = {run_id: read_metrics(channel, run_id, SEED_LINES) for run_id in fresh}
    runs = tuple(_with_log(channel, run, past) for run in runs)
    seen.update(fresh)
    return _Answer(target, runs, past, look.cards(runs))


def _with_log(
    channel: AgentChannel, run: RunSummary, past: dict[str, list[StepLine]]
) -> RunSummary:
    """Of a program that writes no metrics: its log's steps, and ``past`` from there too."""
    fresh = run.run_id in past
    if run.step is not None or (run.is_over and not fresh):
        return run
    steps = logged_steps.ask(channel, run.run_id, SEED_LINES if fresh else LOG_LINES)
    if fresh:
        past[run.run_id] = logged_steps.as_lines(steps)
    return logged_steps.filled(run, steps)
