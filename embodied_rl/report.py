"""A run as one self-contained HTML page (`write_report`), and its success curve as an SVG (`write_curve`).

Made from what is on disk: a run that was killed, or is still going, gives a page of what there is. What is
read: `report_data.py`; what each section says: `report_sections.py`; drawing: `report_charts.py`,
`report_timeline.py`; the look: `report_page.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from embodied_rl import report_sections as sections
from embodied_rl.report_charts import line_chart
from embodied_rl.report_completions import completions
from embodied_rl.report_data import load_run
from embodied_rl.report_page import STANDALONE_CHART_STYLE, page
from embodied_rl.report_schedule import schedule

REPORT_FILE = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path.

    Raises:
        ValueError: `run_dir` is not the directory of a run; the message names what is missing.
    """
    run = load_run(run_dir)
    html = page(
        f"{run.name} · embodied-rl",
        sections.header(run) + sections.tiles(run),
        [
            ("Learning", sections.learning(run)),
            ("Final evaluation", sections.evaluation(run)),
            ("Videos", sections.videos(run)),
            ("Completions", completions(run.path)),
            ("Where the time went", sections.time_spent(run)),
            ("Schedule", schedule(run)),
            ("Timeline", sections.timeline_of(run)),
            ("Reproduce", sections.reproduce(run)),
        ],
    )
    return _write(run.path / REPORT_FILE, html)


def write_curve(run_dirs: Sequence[Path], path: Path, title: str | None = None) -> Path:
    """Write success over env steps as a stand-alone SVG, for a README, and return its path.

    Args:
        run_dirs: one run, or up to four, each in a colour of its own.
        title: default: the name of the first run.

    Raises:
        ValueError: one is not the directory of a run, has no success to draw; or `path` is not .svg.
    """
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise ValueError(f"the curve is written as SVG: give a path that ends in .svg, not {path.name!r}")
    runs = [load_run(run_dir) for run_dir in run_dirs]
    run, title = runs[0], title or runs[0].name
    if empty := [str(one.path) for one in runs if not sections.success_series(one)]:
        raise ValueError(f"{empty[0]} has no success rates to draw")
    series = sections.success_series(run) if len(runs) == 1 else sections.success_of_all(runs)
    svg = line_chart(
        series,
        label=f"Success of {title}",
        title=f"{title}: success over {sections.x_unit(run)}",
        width=760,
        height=320,
        percent=True,
        x_unit=sections.x_unit(run),
        style=STANDALONE_CHART_STYLE,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return _write(path, f"<!-- {escape(title).replace('--', '- -')} -->\n{svg}\n")


def _write(path: Path, text: str) -> Path:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return path
