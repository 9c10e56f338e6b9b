"""The section of a report that shows what a language model wrote, from the run's `completions.jsonl`."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

COMPLETIONS_FILE = "completions.jsonl"
MOST_TABLES = 6


def completions(run_dir: Path) -> str:
    """The first and the newest tables, each folded; "" for a run that has none."""
    path = run_dir / COMPLETIONS_FILE
    if not path.is_file():
        return ""
    tables: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            tables.setdefault(row.pop("table"), []).append(row)
        except (ValueError, KeyError, AttributeError):  # a line torn by a kill
            continue
    titles = list(tables)
    shown = titles if len(titles) <= MOST_TABLES else [titles[0], *titles[1 - MOST_TABLES :]]
    return "".join(_table(title, tables[title]) for title in shown)


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td><pre>{escape(str(row.get(name, '')))}</pre></td>" for name in rows[0]) + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<details class="card"><summary>{escape(title)}</summary><div class="scroll">{table}</div></details>'
