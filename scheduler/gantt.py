"""Pictures of a simulation: which device works on what when, as text and as SVG."""

from __future__ import annotations

from html import escape

from scheduler.plan_tree import device_text
from scheduler.simulate import Interval, Simulation

IDLE, SWITCH = ".", "~"
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#9d755d", "#bab0ac", "#79706e")


def gantt_text(simulation: Simulation, width: int = 72) -> str:
    """One row for each set of devices that do the same; a letter for each stage, "~" a switch, "." idle."""
    letters = dict(zip(_labels(simulation), "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" * 9, strict=False))
    rows = _rows(simulation)
    margin = max(len(name) for name, _ in rows)
    lines = []
    for name, intervals in rows:
        cells: list[dict[str, float]] = [{} for _ in range(width)]
        scale = width / simulation.makespan
        for interval in intervals:
            mark = letters.get(interval.label, SWITCH)
            begin, end = interval.start * scale, interval.end * scale
            for place in range(int(begin), min(width, int(end) + 1)):
                covered = min(end, place + 1) - max(begin, place)
                if covered > 0:
                    cells[place][mark] = cells[place].get(mark, 0.0) + covered
        marks = []
        for place, cell in enumerate(cells):
            cell[IDLE] = 1.0 - sum(cell.values())
            large = [mark for mark, share in cell.items() if share > 0.3]  # what alternates faster than a cell: "ABAB"
            marks.append(large[place % len(large)] if large else max(cell, key=cell.__getitem__))
        lines.append(f"{name:>{margin}} |{''.join(marks)}|")
    lines.append(f"{'':>{margin}}  0 s{f'{simulation.makespan:.3g} s':>{width - 3}}")
    return "\n".join([*lines, *(f"{'':>{margin}}  {letter} {label}" for label, letter in letters.items())])


def gantt_svg(simulation: Simulation, title: str = "", width: int = 960) -> str:
    """The same as an SVG document; spans narrower than half a pixel are joined with their neighbours."""
    labels, rows = _labels(simulation), _rows(simulation)
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}
    left, top, height, gap = 110, 34, 22, 6
    scale = (width - left - 10) / simulation.makespan
    bottom = top + len(rows) * (height + gap)
    parts = [f'<text x="{left}" y="20" font-size="14">{escape(title)}</text>']
    for place, (name, intervals) in enumerate(rows):
        y = top + place * (height + gap)
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{width - left - 10}" height="{height}" fill="#eee"/>')
        for interval in _joined(intervals, 0.5 / scale):
            x, w = left + interval.start * scale, max(0.5, (interval.end - interval.start) * scale)
            tip = escape(f"{interval.label}: {interval.start:.4g} s to {interval.end:.4g} s")
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{height}" stroke="white" stroke-width="0.3" '
                f'fill="{colours.get(interval.label, "#444")}"><title>{tip}</title></rect>'
            )
    parts.append(f'<text x="{left}" y="{bottom + 12}">0 s</text>')
    parts.append(f'<text x="{width - 10}" y="{bottom + 12}" text-anchor="end">{simulation.makespan:.4g} s</text>')
    for place, (label, colour) in enumerate([*colours.items(), ("switch", "#444")]):
        y = bottom + 24 + 18 * place
        parts.append(f'<rect x="{left}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18}" y="{y + 11}">{escape(label)}</text>')
    full = bottom + 34 + 18 * (len(colours) + 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{full}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="12">', *parts, "</svg>"])


def _labels(simulation: Simulation) -> list[str]:
    work = sorted((i for i in simulation.intervals if i.kind == "work"), key=lambda i: i.start)
    return list(dict.fromkeys(interval.label for interval in work))


def _rows(simulation: Simulation) -> list[tuple[str, list[Interval]]]:
    same: dict[tuple[Interval, ...], list[int]] = {}
    for device, intervals in simulation.busy.items():
        same.setdefault(tuple(intervals), []).append(device)
    return [(device_text(tuple(devices)), list(intervals)) for intervals, devices in same.items()]


def _joined(intervals: list[Interval], shortest: float) -> list[Interval]:
    joined: list[Interval] = []
    for interval in intervals:
        last = joined[-1] if joined else None
        close = last is not None and interval.start - last.end <= shortest and last.label == interval.label
        if close and last is not None and min(interval.end - interval.start, last.end - last.start) <= 4 * shortest:
            joined[-1] = Interval(last.label, last.devices, last.start, interval.end, last.kind)
        else:
            joined.append(interval)
    return joined
