"""The schedule in a run's report: predicted and measured seconds of the iterations, the plan, and why it changed."""

from __future__ import annotations

import json
from html import escape

from embodied_rl.report_charts import Series, line_chart
from embodied_rl.report_data import Run


def schedule(run: Run) -> str:
    """Markup; "" for a run that never had a plan."""
    return _prediction(run) + _changes(run) + _picture(run)


def _prediction(run: Run) -> str:
    measured, predicted = (run.values(f"schedule/{key}") for key in ("measured_s", "predicted_s"))
    if not predicted[0]:
        return ""
    series = [Series("measured", *measured), Series("predicted", *predicted, colour="s2")]
    unit = "env steps" if run.x_key == "env_steps" else "iterations"
    errors = sorted(abs(error) for error in run.values("schedule/error")[1])
    chart = line_chart(series, label="Seconds of an iteration, measured and predicted", width=760, x_unit=unit)
    return (
        '<div class="card"><div class="head"><h3>Seconds of an iteration: <span class="s1">measured</span> and '
        f'<span class="s2">predicted</span></h3><span class="now">median error <b>{errors[len(errors) // 2]:.1%}</b>'
        f"</span></div>{chart}</div>"
    )


def _changes(run: Run) -> str:
    try:
        entries = [json.loads(line) for line in (run.path / "plans.jsonl").read_text().splitlines()]
        rows = [(entry["iteration"], entry["placement"], entry["groups"], entry["reason"]) for entry in entries]
    except (OSError, ValueError, KeyError):
        return ""
    cells = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    head = "<tr><th>from iteration</th><th>placement</th><th>S</th><th>why</th></tr>"
    return f'<div class="card"><h3>Plans</h3><table>{head}{cells}</table></div>'


def _picture(run: Run) -> str:
    from scheduler.plan import Plan  # with what draws trees in a terminal

    try:
        plan = Plan.from_yaml((run.path / "plan.yaml").read_text())
    except (OSError, ValueError):
        return ""
    tree = f"<pre>{escape(str(plan))}</pre>"
    return f'<div class="card"><h3>The last plan, as it was predicted</h3>{tree}{plan.gantt_svg()}</div>'
