"""Line charts as SVG, written by hand: small, crisp, and coloured by the page's CSS variables.

Takes numbers, returns markup; knows nothing of runs. What to draw is decided in `report.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, repeat

MAX_POINTS = 600
SMOOTH_FROM = 30  # points from which a moving average is drawn over the raw line


@dataclass(frozen=True)
class Series:
    """One line or set of points; x ascending, all values finite.

    `colour` is a CSS class, `s1` to `s4`. One without a name is not in the legend.
    `interval`: low and high of each point, drawn as whiskers.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = "s1"
    points: bool = False
    interval: Sequence[tuple[float, float]] | None = None


@dataclass(frozen=True)
class Frame:
    """The plot's rectangle in the image, and the data range it shows."""

    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: int = 46
    right: int = 14
    top: int = 12
    bottom: int = 26

    def px(self, x: float) -> float:
        low, high = self.x_range
        return self.left + (x - low) / (high - low) * (self.width - self.left - self.right)

    def py(self, y: float) -> float:
        low, high = self.y_range
        return self.height - self.bottom - (y - low) / (high - low) * (self.height - self.top - self.bottom)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    width: int = 420,
    height: int = 200,
    percent: bool = False,
    x_unit: str = "env steps",
    title: str = "",
    style: str = "",
) -> str:
    """An SVG element. `percent` fixes the y axis to 0..100 %.

    `title` and `style` (CSS) make a stand-alone file of it, with a legend and a background.
    """
    series = [_thinned(one) for one in series if len(one.x)]
    xs = [x for one in series for x in one.x]
    ys = [y for one in series for y in one.y]
    x_from = 0.0 if 0 < min(xs) < 0.1 * max(xs) or 0 < min(xs) == max(xs) else min(xs)
    x_ticks, x_range = axis(x_from, max(xs), max(3, width // 95), tight=True)
    y_ticks, y_range = ([0, 0.25, 0.5, 0.75, 1.0], (-0.02, 1.02)) if percent else axis(min(ys), max(ys), 4)
    frame = Frame(width, height, x_range, y_range)
    if style:
        frame = replace(frame, left=58, right=24, top=70, bottom=36)
    parts = [_grid(frame, x_ticks, y_ticks, percent, x_unit)]
    parts += [_drawn(frame, one) for one in series]
    hover = "" if style else f' data-hover="{escape(_hover_data(frame, series, percent, x_unit))}"'
    namespace = f' xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"' if style else ""
    sheet = f"<style>{style}</style>" if style else ""
    background = f'<rect class="background" width="{width}" height="{height}" rx="8"/>' if style else ""
    parts += [_caption(title, series, frame.left)] if style else []
    return (
        f'<svg{namespace} class="chart" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{escape(label)}"{hover}>'
        f"{sheet}{background}{''.join(parts)}</svg>"
    )


def number(value: float, digits: int = 3) -> str:
    """A short, readable form: 0, 0.0123, 12.5, 3,400, 46k, 1.2M."""
    size = abs(value)
    for limit, scale, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            scaled = value / scale
            return f"{scaled:.{digits}g}{unit}" if abs(scaled) < 999.5 else f"{scaled:.{digits - 3}f}{unit}"
    if size >= 999.5:
        return f"{value:,.{max(0, digits - 4)}f}"
    return f"{value:.{digits}g}" if size >= 1e-3 or value == 0 else f"{value:.{digits - 1}g}"


def smoothed(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a fifteenth of the line, over what there is of that at its ends."""
    reach = max(2, len(values) // 30)
    sums = [0.0, *accumulate(values)]
    out = []
    for index in range(len(values)):
        low, high = max(0, index - reach), min(len(values), index + reach + 1)
        out.append((sums[high] - sums[low]) / (high - low))
    return out


def axis(low: float, high: float, wanted: int, tight: bool = False) -> tuple[list[float], tuple[float, float]]:
    """Round ticks and the range to show: the data's own if `tight`, else with a margin."""
    if high - low <= 1e-12 * max(abs(high), abs(low)):
        pad = abs(high) * 0.1 or 1.0
        low, high = (low, high + pad) if tight else (low - pad, high + pad)
    elif not tight:
        pad = (high - low) * 0.06
        low, high = low - pad, high + pad
    rough = (high - low) / wanted
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    ticks = [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
    return ticks, (low, high)


def _thinned(one: Series) -> Series:
    """At most about MAX_POINTS points: the lowest and highest of each bucket, so that spikes stay."""
    count = len(one.x)
    if count <= MAX_POINTS:
        return one
    keep = {0, count - 1}
    for bucket in range(MAX_POINTS // 2):
        indices = range(bucket * count // (MAX_POINTS // 2), (bucket + 1) * count // (MAX_POINTS // 2))
        keep |= {min(indices, key=lambda i: one.y[i]), max(indices, key=lambda i: one.y[i])}
    chosen = sorted(keep)
    interval = [one.interval[i] for i in chosen] if one.interval else None
    return Series(one.name, [one.x[i] for i in chosen], [one.y[i] for i in chosen], one.colour, one.points, interval)


def _grid(frame: Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], percent: bool, x_unit: str) -> str:
    end, floor = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    y_labels = [f"{tick:.0%}" for tick in y_ticks] if percent else _labels(y_ticks)
    for tick, name in zip(y_ticks, y_labels, strict=True):
        y = frame.py(tick)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{frame.left - 8}" y="{y + 3.5:.1f}" text-anchor="end">{name}</text>')
    for tick, name in zip(x_ticks, _labels(x_ticks), strict=True):
        x, anchor = frame.px(tick), "middle"
        if tick == x_ticks[-1]:  # the last tick names the unit, and must not run out of the image
            name = f"{name} {escape(x_unit)}"
            if x > end - 60:
                x, anchor = min(x + 14, end), "end"
        parts.append(f'<text x="{x:.1f}" y="{floor + 17}" text-anchor="{anchor}">{name}</text>')
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{end}" y1="{floor}" y2="{floor}"/>')
    return "".join(parts)


def _labels(ticks: Sequence[float]) -> list[str]:
    """With as many digits as it takes to tell the ticks apart."""
    candidates = ([number(tick, digits) for tick in ticks] for digits in range(3, 12))
    return next((labels for labels in candidates if len(set(labels)) == len(ticks)), [f"{tick:g}" for tick in ticks])


def _caption(title: str, series: Sequence[Series], left: int) -> str:
    parts = [f'<text class="title" x="{left}" y="28">{escape(title)}</text>']
    x = float(left)
    for one in (one for one in series if one.name):
        sign = f'<circle class="point {one.colour}" cx="{x + 6:.0f}" cy="46.5" r="3.5"/>'
        if not one.points:
            sign = f'<line class="line {one.colour}" x1="{x:.0f}" x2="{x + 13:.0f}" y1="46.5" y2="46.5"/>'
        parts.append(f'{sign}<text x="{x + 19:.0f}" y="50">{escape(one.name)}</text>')
        x += 42 + 6.1 * len(one.name)
    return "".join(parts)


def _drawn(frame: Frame, one: Series) -> str:
    places = [(frame.px(x), frame.py(y)) for x, y in zip(one.x, one.y, strict=True)]
    parts = []
    if not one.points and len(places) > 1:
        kind = "raw" if len(places) >= SMOOTH_FROM else "line"
        parts.append(_polyline(places, f"{kind} {one.colour}"))
        if kind == "raw":
            ys = smoothed(one.y)
            parts.append(
                _polyline([(x, frame.py(y)) for (x, _), y in zip(places, ys, strict=True)], f"line {one.colour}")
            )
        return "".join(parts)
    for (x, y), bounds in zip(places, one.interval or repeat(None, len(places)), strict=True):
        if bounds:
            low, high = frame.py(bounds[0]), frame.py(bounds[1])
            parts.append(
                f'<line class="whisker {one.colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            )
        parts.append(f'<circle class="point {one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
    return "".join(parts)


def _polyline(places: Sequence[tuple[float, float]], classes: str) -> str:
    return f'<polyline class="{classes}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'


def _hover_data(frame: Frame, series: Sequence[Series], percent: bool, x_unit: str) -> str:
    """JSON for the page's script: for each x position its label, and each series' height and value there."""
    xs = sorted({x for one in series for x in one.x})
    rows = []
    for one in series:
        at = dict(zip(one.x, one.y, strict=True))
        heights = [round(frame.py(at[x]), 1) if x in at else None for x in xs]
        values = [(f"{at[x]:.1%}" if percent else f"{at[x]:.5g}") if x in at else None for x in xs]
        rows.append({"name": one.name, "colour": one.colour, "y": heights, "text": values})
    data = {
        "x": [round(frame.px(x), 1) for x in xs],
        "label": [f"{x:,.0f} {x_unit}" for x in xs],
        "top": frame.top,
        "bottom": frame.height - frame.bottom,
        "series": rows,
    }
    return json.dumps(data, separators=(",", ":"))
