"""Line charts as SVG text, without a library: the report must open from a file, offline, for years.

Pure functions from numbers to markup. Colours are CSS variables, so that the page's light and dark
schemes apply and a chart never carries a colour of its own.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orchestrator.terminal_text import plain

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 14, 26
# A curve drawn with more points than the plot has pixels only makes the file larger.
MAX_POINTS = WIDTH - LEFT - RIGHT


@dataclass(frozen=True)
class Series:
    """One curve. ``points`` are (x, y); y may be None or not finite, which breaks the curve."""

    name: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Mark:
    """Something that happened at ``x``; ``kind`` chooses its colour, ``text`` is its tooltip."""

    x: float
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    label: Callable[[float], str] = field(default=lambda value: number(value))
    from_zero: bool = False


def escape(text: str) -> str:
    """For HTML; control sequences are no words in a page either."""
    return html.escape(plain(text))


def number(value: float) -> str:
    """At most four significant characters: ``0.04``, ``15.5k``."""
    if value == 0:
        return "0"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover ``low..high``: steps of 1, 2 or 5 times a power of ten.

    About ``count`` of them; where a step that is wide enough gives fewer than three, a finer one.
    """
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    wide = [m * magnitude for m in (10, 5, 2, 1, 0.5)]
    fits = [step for step in wide if step >= raw * (1 - 1e-9)]
    found: list[float] = []
    for step in wide[len(fits) - 1 :]:
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        found = [n * step for n in range(first, last + 1)]
        if len(found) > 2:
            break
    return found


def thin(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """At most about ``MAX_POINTS`` points, keeping the least and the greatest of every bucket.

    A mean would hide the one spike that the reader came to see.
    """
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        finite = [p for p in bucket if _finite(p[1])]
        if not finite:
            kept.append(bucket[0])
            continue
        ends = {min(finite, key=lambda p: p[1] or 0.0), max(finite, key=lambda p: p[1] or 0.0)}
        kept.extend(sorted(ends, key=lambda p: p[0]))
    return kept


def draw(chart: Chart) -> str:
    """The chart as one ``<figure>``. A chart without a finite value says so instead of axes."""
    values = [y for s in chart.series for _, y in s.points if y is not None and math.isfinite(y)]
    xs = [x for s in chart.series for x, y in s.points if _finite(y)]
    caption = f"<figcaption>{escape(chart.title)} <span>{escape(chart.unit)}</span></figcaption>"
    if not values:
        return f'<figure>{caption}<p class="none">nothing recorded</p></figure>'
    x_scale = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    low = 0.0 if chart.from_zero else min(values)
    y_scale = _Scale(low, max(values), HEIGHT - BOTTOM, TOP, pad=0.06)
    body = [
        *_grid(x_scale, y_scale, chart.label),
        *(_mark(m, x_scale) for m in chart.marks if x_scale.low <= m.x <= x_scale.high),
        *(_curve(s, i, x_scale, y_scale) for i, s in enumerate(chart.series)),
    ]
    legend = "".join(
        f'<span class="key s{i}">{escape(s.name)}</span>' for i, s in enumerate(chart.series)
    )
    keys = f'<div class="legend">{legend}</div>' if len(chart.series) > 1 else ""
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">'
        + "".join(body)
        + "</svg>"
    )
    return f"<figure>{caption}{keys}{svg}</figure>"


@dataclass(frozen=True)
class _Scale:
    """A linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float
    pad: float = 0.0

    def __post_init__(self) -> None:
        spread = (self.high - self.low) or abs(self.high) or 1.0
        object.__setattr__(self, "high", self.high + spread * self.pad)

    def __call__(self, value: float) -> float:
        spread = (self.high - self.low) or 1.0
        return self.start + (value - self.low) / spread * (self.end - self.start)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _grid(x_scale: _Scale, y_scale: _Scale, label: Callable[[float], str]) -> list[str]:
    lines = []
    for tick in ticks(y_scale.low, y_scale.high):
        y = y_scale(tick)
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        lines.append(
            f'<text class="y" x="{LEFT - 6}" y="{y + 3.5:.1f}">{escape(label(tick))}</text>'
        )
    for tick in ticks(x_scale.low, x_scale.high, 7):
        x = x_scale(tick)
        lines.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - 8}">{escape(number(tick))}</text>')
    return lines


def _mark(mark: Mark, x_scale: _Scale) -> str:
    x = x_scale(mark.x)
    return (
        f'<line class="mark {escape(mark.kind)}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" '
        f'y2="{HEIGHT - BOTTOM}"><title>{escape(mark.text)}</title></line>'
    )


def _curve(series: Series, index: int, x_scale: _Scale, y_scale: _Scale) -> str:
    path, pen_down = [], False
    for x, y in thin(series.points):
        if y is None or not math.isfinite(y):
            pen_down = False
            continue
        path.append(f"{'L' if pen_down else 'M'}{x_scale(x):.1f} {y_scale(y):.1f}")
        pen_down = True
    # A lone point has no line: round caps make a zero-length segment visible.
    if len(path) == 1:
        path.append(path[0].replace("M", "L"))
    return f'<path class="curve s{index}" d="{"".join(path)}"/>'
