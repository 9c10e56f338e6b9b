"""The timeline of a run's last iterations, drawn from `trace.json` (Chrome trace events) as HTML bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from embodied_rl.report_charts import axis

MAX_BARS = 1500
MAX_LANES = 5
COLOURS = 7
LABEL_FROM = 0.08  # of the window; a wider bar has its name inside
ONE_PIXEL = 1 / 1000  # of the window; what is shorter is merged with its neighbour of the same name


@dataclass
class Bar:
    """One drawn event: seconds, its row and lane; `count` events where neighbours were merged."""

    row: str
    group: str
    name: str
    waits: bool
    start: float
    end: float
    busy: float
    count: int = 1
    lane: int = 0


def timeline(trace: dict[str, Any], iteration_s: float | None) -> str:
    """The HTML of the last two whole iterations, or one where two have too many events.

    Iterations are the events whose name begins with "iteration"; without such events, the last two times
    `iteration_s` seconds of the trace; without that, the whole trace. Returns "" for a trace without events.
    """
    bars = _bars(trace.get("traceEvents", []))
    if not bars:
        return ""
    for iterations in (2, 1):
        start, end, title = _window(bars, iterations, iteration_s)
        inside = [bar for bar in bars if bar.end > start and bar.start < end]
        drawn = _merged(inside, start, end)
        if len(drawn) <= MAX_BARS:
            break
    shown = sorted(drawn, key=lambda bar: bar.start - bar.end)[:MAX_BARS]
    return _html(shown, start, end, title, sum(bar.count for bar in shown), len(inside))


def _bars(events: Sequence[dict[str, Any]]) -> list[Bar]:
    groups: dict[Any, str] = {}
    rows: dict[Any, str] = {}
    for event in events:
        if event.get("ph") == "M":
            named = str(event.get("args", {}).get("name", ""))
            if event.get("name") == "process_name":
                groups[event.get("pid")] = named
            elif event.get("name") == "thread_name":
                rows[event.get("pid"), event.get("tid")] = named
    bars = []
    for event in events:
        if event.get("ph") == "X" and "ts" in event:
            pid, tid = event.get("pid"), event.get("tid")
            group = groups.get(pid, f"process {pid}")
            start, length = float(event["ts"]) / 1e6, float(event.get("dur", 0)) / 1e6
            waits = event.get("cat") in ("wait", "idle")
            row = rows.get((pid, tid), f"{group} {tid}")
            bars.append(Bar(row, group, str(event.get("name", "")), waits, start, start + length, length))
    return sorted(bars, key=lambda bar: (bar.start, -bar.end))


def _window(bars: Sequence[Bar], iterations: int, iteration_s: float | None) -> tuple[float, float, str]:
    marks = [bar for bar in bars if bar.name.lower().startswith("iteration")]
    words = "the last iteration" if iterations == 1 else f"the last {iterations} iterations"
    if marks:
        chosen = marks[-iterations:]
        words = words if len(chosen) == iterations else "the last iteration"
        return chosen[0].start, max(bar.end for bar in chosen), words
    first, last = bars[0].start, max(bar.end for bar in bars)
    if iteration_s and iteration_s * iterations < last - first:
        return last - iteration_s * iterations, last, f"about {words}"
    return first, max(last, first + 1e-6), "the whole trace"


def _merged(bars: Sequence[Bar], start: float, end: float) -> list[Bar]:
    """Clipped to the window, overlapping events of a row in lanes of their own, too short ones merged."""
    pixel = (end - start) * ONE_PIXEL
    free: dict[str, list[float]] = {}
    latest: dict[tuple[str, int], Bar] = {}
    out = []
    for bar in bars:
        begin, stop = max(bar.start, start), min(bar.end, end)
        lanes = free.setdefault(bar.row, [])
        lane = next((index for index, until in enumerate(lanes) if until <= begin + 1e-7), len(lanes))
        lane = min(lane, MAX_LANES - 1)
        if lane == len(lanes):
            lanes.append(stop)
        lanes[lane] = max(lanes[lane], stop)
        before = latest.get((bar.row, lane))
        short = stop - begin < pixel and before is not None and before.end - before.start < 8 * pixel
        if short and before and before.name == bar.name and begin - before.end < pixel:
            before.end, before.busy, before.count = (
                max(before.end, stop),
                before.busy + stop - begin,
                before.count + 1,
            )
            continue
        copy = Bar(bar.row, bar.group, bar.name, bar.waits, begin, stop, stop - begin, 1, lane)
        latest[bar.row, lane] = copy
        out.append(copy)
    return out


def _html(bars: Sequence[Bar], start: float, end: float, title: str, shown: int, total: int) -> str:
    spent: dict[str, float] = {}
    for bar in bars:
        if not bar.waits:
            spent[bar.name] = spent.get(bar.name, 0.0) + bar.busy
    marks = [name for name in spent if name.lower().startswith("iteration")]
    names = [name for name in sorted(spent, key=lambda name: -spent[name]) if name not in marks]
    colour = {name: f"e{index + 1}" if index < COLOURS else "e0" for index, name in enumerate(names)}
    colour |= dict.fromkeys(marks, "mark")
    rows: dict[str, list[Bar]] = {}
    for bar in sorted(bars, key=lambda bar: bar.row):
        rows.setdefault(bar.row, []).append(bar)
    order = sorted(rows, key=lambda row: (rows[row][0].name not in marks, rows[row][0].group, _natural(row)))
    body = "".join(_row(row, rows[row], colour, start, end) for row in order)
    counted = f"{total:,} events" if shown == total else f"{shown:,} of {total:,} events drawn, the longest ones"
    legend = "".join(
        f'<span class="key"><i class="{colour[name]}"></i>{escape(name)}</span>' for name in names[:COLOURS]
    )
    if len(names) > COLOURS:
        legend += '<span class="key"><i class="e0"></i>other</span>'
    if any(bar.waits for bar in bars):
        legend += '<span class="key"><i class="wait"></i>waiting</span>'
    return (
        f'<p class="note">{title[0].upper() + title[1:]}: {_seconds(end - start)}, {counted}.</p>'
        f'<div class="legend">{legend}</div>'
        f'<div class="timeline">{body}{_scale(end - start)}</div>'
    )


def _row(row: str, bars: Sequence[Bar], colour: dict[str, str], start: float, end: float) -> str:
    lanes = max(bar.lane for bar in bars) + 1
    height = 20 if lanes == 1 else 13 * lanes
    parts = []
    for bar in bars:
        left, width = (bar.start - start) / (end - start), (bar.end - bar.start) / (end - start)
        tip = f"{bar.name}\n{_seconds(bar.busy)}" + (f" in {bar.count} events" if bar.count > 1 else "")
        tip += f", {_seconds(bar.start - start)} after the start"
        inside = escape(bar.name) if width > LABEL_FROM and lanes <= 2 and not bar.waits else ""
        shade = "wait" if bar.waits else colour[bar.name]
        parts.append(
            f'<b class="{shade}" style="left:{left:.3%};width:{width:.3%};'
            f'top:{bar.lane / lanes:.1%};height:{1 / lanes:.1%}" data-tip="{escape(tip)}">{inside}</b>'
        )
    return (
        f'<div class="row"><span class="who" title="{escape(row)}">{escape(row)}</span>'
        f'<div class="track" style="height:{height}px">{"".join(parts)}</div></div>'
    )


def _scale(length: float) -> str:
    """Round times, all in the unit of the longest."""
    factor, unit = (1e6, "µs") if length < 1e-3 else (1e3, "ms") if length < 1 else (1.0, "s")
    times, _ = axis(0, length * factor, 6, tight=True)
    ticks = "".join(
        f'<span style="left:{value / length / factor:.2%}">{value:.4g}{f" {unit}" if value else ""}</span>'
        for value in times
        if value < length * factor * 0.97
    )
    return f'<div class="row"><span class="who"></span><div class="scale">{ticks}</div></div>'


def _natural(row: str) -> tuple[str, int]:
    """Sort key under which "env[10]" follows "env[9]"."""
    name, _, rest = row.partition("[")
    return name, int(rest.rstrip("]")) if rest.rstrip("]").isdigit() else -1


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs" if value > 0 else "0"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"
