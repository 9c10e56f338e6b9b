"""The result of an evaluation on LIBERO's suites: a table on the console, `evaluation.json`, `.md`, `.html`, videos."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.report_data import wilson_interval
from embodied_rl.report_page import page
from embodied_rl.tracking import Tracker
from embodied_rl.video import write_mp4
from envs import libero_suites
from envs.base import EnvError, Episode
from envs.libero_suites import init_state_id

if TYPE_CHECKING:
    from embodied_rl.evaluate_suite import SuiteEpisode, SuiteRun

FPS = 20  # LIBERO's control rate
WIDTH = 120  # of the table where it is not printed on a terminal
COLUMNS = ("task", "k/n", "rate", "95 % interval", "errors", "steps", "instruction")


@dataclass(frozen=True)
class Row:
    """A line of the table: k successes in n episodes. Episodes that ended in an error count in neither."""

    name: str
    instruction: str
    successes: int
    n: int
    errors: int
    mean_length: float | None

    @staticmethod
    def of(name: str, instruction: str, episodes: Sequence[SuiteEpisode]) -> Row:
        counted = [episode for episode in episodes if episode.outcome != "error"]
        lengths = [episode.length for episode in counted]
        return Row(
            name,
            instruction,
            successes=sum(episode.outcome == "success" for episode in counted),
            n=len(counted),
            errors=len(episodes) - len(counted),
            mean_length=sum(lengths) / len(lengths) if lengths else None,
        )

    @property
    def rate(self) -> float | None:
        return self.successes / self.n if self.n else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval."""
        return wilson_interval(self.successes, self.n) if self.n else None

    @property
    def cells(self) -> tuple[str, ...]:
        low, high = self.interval or (0.0, 1.0)
        rate = "–" if self.rate is None else f"{self.rate:.3f}"
        length = "–" if self.mean_length is None else f"{self.mean_length:.0f}"
        between = f"{low:.3f} to {high:.3f}"
        return self.name, f"{self.successes}/{self.n}", rate, between, str(self.errors), length, self.instruction


def rows_of(episodes: Sequence[SuiteEpisode]) -> list[Row]:
    """A row for each task, one for each suite and, of several suites, one for all."""
    rows, suites = [], list(dict.fromkeys(episode.suite for episode in episodes))
    for suite in suites:
        own = [episode for episode in episodes if episode.suite == suite]
        known = libero_suites.tasks(suite)
        for task in sorted({episode.task for episode in own}):
            of_task = [episode for episode in own if episode.task == task]
            rows.append(Row.of(known[task].name, known[task].instruction, of_task))
        rows.append(Row.of(suite, "", own))
    if len(suites) > 1:
        rows.append(Row.of("all suites", "", episodes))
    return rows


def write_report(
    out: Path,
    episodes: Sequence[SuiteEpisode],
    fingerprints: dict[str, Any],
    videos: Sequence[Path],
    tracker: Tracker,
) -> list[Row]:
    """Write `evaluation.json`, `.md` and `.html` into `out`, and hand the numbers to the tracker; the table's rows."""
    rows = rows_of(episodes)
    ordered = sorted(episodes, key=lambda episode: (episode.suite, episode.key))
    content = {
        "fingerprint": fingerprints,
        "results": [{**row.__dict__, "rate": row.rate, "interval_95": row.interval} for row in rows],
        "episodes": [episode.__dict__ for episode in ordered],
        "videos": [str(path.relative_to(out)) for path in videos],
    }
    _write(out / "evaluation.json", json.dumps(content, indent=1))
    _write(out / "evaluation.md", _markdown(out.name, rows, fingerprints))
    _write(out / "evaluation.html", _html(out, rows, fingerprints, videos))
    step = len(episodes)
    measured = {f"eval/{row.name}/success": row.rate for row in rows if row.rate is not None}
    tracker.log(step, {**measured, "eval/errors": sum(episode.outcome == "error" for episode in episodes)})
    tracker.table(step, "eval/tasks", COLUMNS, [row.cells for row in rows])
    tracker.summary(measured)
    for path in videos:
        tracker.video(step, f"videos/{path.stem}", path)
    return rows


def print_result(rows: Sequence[Row], out: Path) -> None:
    """The table and where everything is."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console, JustifyMethod
    from rich.table import Table

    fingerprints = json.loads((out / "fingerprint.json").read_text())
    shown = [row.cells for row in rows]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *shown, strict=True)]
    table = Table(title=_setting(fingerprints), title_justify="left", box=SIMPLE_HEAD)
    for column, width in zip(COLUMNS, widths, strict=True):
        side: JustifyMethod = "left" if column in ("task", "instruction") else "right"
        last = column == "instruction"  # takes what room there is left
        table.add_column(column, justify=side, min_width=None if last else width, no_wrap=not last)
    for row in rows:
        table.add_row(*row.cells, style=None if "/" in row.name else "bold")
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    print(_versions(fingerprints))
    print(f"report      {out / 'evaluation.html'}")


def record_suite_videos(out: Path, run: SuiteRun, episodes: Sequence[SuiteEpisode]) -> list[Path]:
    """Videos of `run.videos` episodes, failures first, by running their actions again; what is there already stays."""
    from embodied_rl.evaluate_suite import env_settings
    from envs.pool import EnvPool

    order = {"failure": 0, "success": 1}
    chosen = sorted((episode for episode in episodes if episode.outcome in order), key=lambda e: order[e.outcome])
    chosen = chosen[: run.videos]
    if run.videos > 1 and chosen and all(episode.outcome == "failure" for episode in chosen):
        success = next((episode for episode in episodes if episode.outcome == "success"), None)
        chosen = [*chosen[:-1], success] if success else chosen
    paths = []
    pool = EnvPool(0)
    for episode in chosen:
        path = out / "videos" / f"{episode.outcome}_{episode.stem}.mp4"
        if not path.exists():
            actions = np.load(out / "actions" / f"{episode.stem}.npy")
            settings = env_settings(run, episode.suite)
            recorded = Episode(0, run.seed, init_state_id(*episode.key), "", episode.length, 0.0, False, False, actions)
            try:
                (film,) = pool.render(settings, [recorded])
            except EnvError as error:
                print(f"no video of {episode.stem}: {str(error).strip().splitlines()[-1]}")
                continue
            write_mp4(path, film, FPS)
        paths.append(path)
    return paths


def _setting(fingerprints: dict[str, Any]) -> str:
    first = next(iter(fingerprints.values()))
    protocol, policy = first["protocol"], first["policy"]["name"]
    sampling = "greedy" if protocol["temperature"] is None else f"sampled at temperature {protocol['temperature']:g}"
    counts = f"{protocol['trials']} trials, chunk {protocol['chunk']}, {sampling}"
    return f"{policy} under the protocol {protocol['name']}: {counts}"


def _versions(fingerprints: dict[str, Any]) -> str:
    first = next(iter(fingerprints.values()))
    return "versions    " + ", ".join(f"{name} {version}" for name, version in first["versions"].items())


def _markdown(name: str, rows: Sequence[Row], fingerprints: dict[str, Any]) -> str:
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS)), *(_line(row.cells) for row in rows)]
    table = "\n".join(lines)
    exact = json.dumps(fingerprints, indent=1)
    return (
        f"# {name}\n\n{_setting(fingerprints)}\n\n{table}\n\n## What exactly was evaluated\n\n```json\n{exact}\n```\n"
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _html(out: Path, rows: Sequence[Row], fingerprints: dict[str, Any], videos: Sequence[Path]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells)}</tr>" for row in rows)
    table = f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    shown = "".join(
        f'<div class="card"><video controls muted preload="metadata" src="videos/{escape(path.name)}"></video>'
        f"<p>{escape(path.stem.replace('_', ' '))}</p></div>"
        for path in videos
    )
    exact = f'<div class="card"><pre>{escape(json.dumps(fingerprints, indent=1))}</pre></div>'
    header = f'<p class="over">Evaluation on LIBERO</p><h1>{escape(out.name)}</h1>'
    sections = [
        ("Success", f'<p class="note">{escape(_setting(fingerprints))}</p>{table}'),
        ("Videos, failures first", f'<div class="videos">{shown}</div>' if shown else ""),
        ("What exactly was evaluated", exact),
    ]
    return page(f"{out.name} · embodied-rl", header, sections)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
