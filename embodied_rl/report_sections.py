"""The sections of a run's report: each function turns a `Run` into markup, "" where there is nothing to show.

Text that comes from the run is escaped here, where it enters the markup.
"""

from __future__ import annotations

import base64
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import cycle
from typing import Any
from urllib.parse import quote

from embodied_rl.progress import duration
from embodied_rl.report_charts import SMOOTH_FROM, Series, line_chart, number
from embodied_rl.report_data import Run, finite, wilson_interval
from embodied_rl.report_timeline import timeline

EMBED_BYTES = 5_000_000  # a larger video is linked
EMBED_TOTAL_BYTES = 40_000_000
SUCCESS = {"success_once": "Success at any time", "success_at_end": "Success at the end"}
CHARTS = [
    ("Return", "rollout/return"),
    ("Episode length", "rollout/episode_length"),
    ("Reward", "reward/mean"),
    ("Held-out accuracy", "eval/pass@1"),
    ("Tokens in a completion", "completions/mean_length"),
    ("Policy loss", "losses/policy"),
    ("Value loss", "losses/value"),
    ("Entropy", "losses/entropy"),
    ("Approximate KL", "losses/approx_kl"),
    ("Clip fraction", "losses/clip_fraction"),
    ("Explained variance", "losses/explained_variance"),
    ("Env steps per second", "perf/env_steps_per_s"),
    ("Imitation loss", "losses/imitation"),
    ("Held-out loss", "held_out/loss"),
    ("Held-out token accuracy", "held_out/token_accuracy"),
    ("Held-out distance of actions", "held_out/action_l1"),
]


def header(run: Run) -> str:
    """Name, what was trained, status, and when."""
    env, policy, algorithm = (run.config.get(key) for key in ("env", "policy", "algorithm"))
    trained = [
        part.get(key) for part, key in ((env, "id"), (algorithm, "name"), (policy, "kind")) if isinstance(part, dict)
    ]
    if run.command == "sft":
        trained[1:2] = ["sft"]
    words = " · ".join(escape(str(part)) for part in [run.config.get("recipe"), *trained] if part)
    done, status = _status(run)
    facts = [f'<span class="status{" done" if done else ""}">{escape(status)}</span>']
    facts.append(f"<span>last written {time.strftime('%-d %B %Y, %H:%M %Z', time.localtime(run.written_at))}</span>")
    if finite(run.config.get("seed")):
        facts.append(f"<span>seed {run.config['seed']}</span>")
    problems = "".join(f'<p class="note">{escape(problem)}</p>' for problem in run.problems)
    return (
        f'<p class="over">{words or "embodied-rl run"}</p><h1>{escape(run.name)}</h1>'
        f'<div class="facts">{"".join(facts)}</div>{problems}'
    )


def tiles(run: Run) -> str:
    """The headline numbers."""
    boxes = [_headline_tile(run)]
    if finite(run.last.get("env_steps")):
        boxes.append(("Env steps", f"{run.last['env_steps']:,.0f}", _iterations(len(run.metrics))))
    wall = run.wall_s
    if wall is not None:
        iteration = run.mean("time/iteration_s")
        boxes.append(("Wall time", duration(wall), f"{iteration:.3g} s per iteration" if iteration else ""))
    speed = run.mean("perf/env_steps_per_s")
    if speed is not None:
        calls = run.mean("perf/policy_calls_per_s")
        boxes.append(
            (
                "Env steps per second",
                number(speed),
                f"{number(calls)} policy calls per second" if calls else "",
            )
        )
    made = (
        f'<div class="tile"><span>{escape(name)}</span><strong>{_small_units(value)}</strong>'
        f"<span>{escape(more)}</span></div>"
        for name, value, more in boxes
    )
    return f'<div class="tiles">{"".join(made)}</div>'


def learning(run: Run) -> str:
    """Success, then the usual curves, then every other metric, folded."""
    if not run.metrics:
        return '<p class="note">No iteration was finished, so there is nothing to draw.</p>'
    unit = x_unit(run)
    cards = []
    success = success_series(run)
    if success:
        keys = {
            "s1": '<i class="dash s1"></i>',
            "s2": '<i class="ring s2"></i>',
            "s3": '<i class="ring s3"></i>',
            "s4": '<i class="ring s4"></i>',
        }
        legend = "".join(f'<span class="key">{keys[one.colour]}{escape(one.name)}</span>' for one in success)
        sizes = {
            "broad": (1060, 300),
            "medium": (700, 270),
            "narrow": (400, 230),
        }  # the style sheet shows one
        drawn = "".join(
            f'<div class="{name}">'
            + line_chart(success, label="Success rate", width=width, height=height, percent=True, x_unit=unit)
            + "</div>"
            for name, (width, height) in sizes.items()
        )
        cards.append(
            '<div class="card wide"><div class="head"><h3>Success rate</h3></div>'
            f'<div class="legend">{legend}</div>{drawn}</div>'
        )
    cards += [_chart_card(run, title, key) for title, key in CHARTS]
    known = {key for _, key in CHARTS} | {f"rollout/{run.success}", f"eval/{run.success}", "step", "env_steps"}
    others = sorted({key for row in run.metrics for key in row} - known)
    folded = "".join(_chart_card(run, key, key) for key in others)
    more = _folded("All other metrics", f'<div class="charts">{folded}</div>') if folded else ""
    thick = "Thin lines show every iteration, thick lines a moving average." if len(run.metrics) >= SMOOTH_FROM else ""
    note = f'<p class="note">{thick}</p>' if thick else ""
    return f'{note}<div class="charts">{"".join(cards)}</div>{more}'


def success_series(run: Run) -> list[Series]:
    """Success in training episodes (line), in evaluations during training, and in the final one (points).

    Points have their 95 % intervals where the number of episodes is known.
    """
    out = []
    xs, ys = run.values(f"rollout/{run.success}")
    if xs:
        out.append(Series("training episodes", xs, ys, "s1"))
    xs, ys = run.values(f"eval/{run.success}")
    if xs:
        n = run.evaluation_episodes
        intervals = [wilson_interval(round(y * n), n) for y in ys] if n else None
        out.append(Series("evaluation during training", xs, ys, "s2", points=True, interval=intervals))
    counted = run.success_count
    if run.before and run.before.get("successes") is not None:
        before = (run.before["successes"], run.before["n"])
        name, interval = "before training", [wilson_interval(*before)]
        out.append(Series(name, [0.0], [before[0] / before[1]], "s4", points=True, interval=interval))
    if counted and finite(run.last.get(run.x_key)):
        x, rate = float(run.last[run.x_key]), counted[0] / counted[1]
        out.append(Series("final evaluation", [x], [rate], "s3", points=True, interval=[wilson_interval(*counted)]))
    return out


def success_of_all(runs: Sequence[Run]) -> list[Series]:
    """Success of several runs, a colour for each: in training episodes (line), and in evaluations (points)."""
    out = []
    for run, colour in zip(runs, cycle(["s1", "s2", "s3", "s4"]), strict=False):
        out += [replace(one, name="" if one.points else run.name, colour=colour) for one in success_series(run)]
    return out


def x_unit(run: Run) -> str:
    """What the x axis of the run's curves counts."""
    return "env steps" if run.x_key == "env_steps" else "steps"


def evaluation(run: Run) -> str:
    """The final evaluation: its numbers, each episode as a square, and the table of episodes."""
    if run.evaluation is None:
        return '<p class="note">This run has no final evaluation: it was stopped, or is still running.</p>'
    counted, episodes = run.success_count, run.episodes
    rows: list[tuple[str, str]] = []
    if counted:
        low, high = wilson_interval(*counted)
        rows.append((SUCCESS[run.success], f"{counted[0]} of {counted[1]}, {counted[0] / counted[1]:.1%}"))
        rows.append(("95 % interval (Wilson)", f"{low:.1%} to {high:.1%}"))
    if run.before and run.before.get("successes") is not None:
        (low, high), successes, n = run.before["interval_95"], run.before["successes"], run.before["n"]
        rows.append(("Before training", f"{successes} of {n}, {successes / n:.1%} ({low:.1%} to {high:.1%})"))
    for other in SUCCESS.keys() - {run.success}:
        known = [bool(episode[other]) for episode in episodes if other in episode]
        if known:
            rows.append((SUCCESS[other], f"{sum(known)} of {len(known)}, {sum(known) / len(known):.1%}"))
    for key, name in (("return", "Mean return"), ("length", "Mean length, env steps")):
        found = [episode[key] for episode in episodes if finite(episode.get(key))]
        if found:
            rows.append((name, f"{sum(found) / len(found):.4g}"))
    if run.evaluation.get("seeds") is not None:
        rows.append(("Seeds", _plain(run.evaluation["seeds"])))
    strip = "".join(_episode_square(episode, run.success) for episode in episodes)
    legend = (
        '<div class="legend"><span class="key"><i style="--c:var(--good)"></i>success</span>'
        '<span class="key"><i class="hollow"></i>failure</span></div>'
    )
    head = '<div class="head"><h3>Episodes</h3></div>'
    drawn = f'<div class="card">{head}<div class="strip">{strip}</div>{legend}</div>'
    setting = _setting_table(run.evaluation.get("fingerprint"))
    return (
        f'<div class="two"><div class="card">{_pairs(rows)}</div>{drawn if counted and episodes else ""}</div>'
        f"{_episode_table(episodes)}{setting}"
    )


def videos(run: Run) -> str:
    """Videos inside the page, smaller ones first in line to be embedded; the rest as links."""
    left = EMBED_TOTAL_BYTES
    cards = []
    for path in run.videos:
        size = path.stat().st_size
        caption = escape(path.stem.replace("_", " "))
        if 0 < size < EMBED_BYTES and size <= left:
            left -= size
            source = "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
            cards.append(
                '<div class="card"><video controls muted loop playsinline preload="metadata"'
                f' src="{source}"></video><p>{caption}</p></div>'
            )
        else:
            link = f'<a href="videos/{quote(path.name)}">{escape(path.name)}</a>'
            cards.append(f'<div class="card"><p>{link}, {size / 1e6:.1f} MB, beside this page</p></div>')
    return f'<div class="videos">{"".join(cards)}</div>' if cards else ""


def time_spent(run: Run) -> str:
    """An iteration cut into its phases, and how busy each worker group was, as means over the run."""
    bars = []
    whole = run.mean("time/iteration_s")
    if whole:
        phases = [(name, run.mean(key)) for name, key in (("rollout", "time/rollout_s"), ("update", "time/update_s"))]
        known = [(name, seconds) for name, seconds in phases if seconds]
        rest = whole - sum(seconds for _, seconds in known)
        parts = [(f"{name} {seconds:.3g} s", seconds / whole, f"e{i + 1}") for i, (name, seconds) in enumerate(known)]
        if known and rest > 0.005 * whole:
            parts.append((f"other {rest:.2g} s", rest / whole, "rest"))
        if known:
            bars.append(_stacked("iteration", parts))
    prefix = "perf/idle_fraction/"
    for key in sorted({key for row in run.metrics for key in row if key.startswith(prefix)}):
        idle = run.mean(key)
        if idle is not None:
            idle = min(1.0, max(0.0, idle))
            parts = [(f"busy {1 - idle:.0%}", 1 - idle, "e3"), (f"idle {idle:.0%}", idle, "rest")]
            bars.append(_stacked(key.removeprefix(prefix), parts))
    if not bars:
        return ""
    note = '<p class="note">Means over the run, each iteration weighted by its duration.</p>'
    return f'{note}<div class="card">{"".join(bars)}</div>'


def timeline_of(run: Run) -> str:
    if run.trace is None:
        return ""
    drawn = timeline(run.trace, run.mean("time/iteration_s"))
    return f'<div class="card">{drawn}</div>' if drawn else ""


def reproduce(run: Run) -> str:
    """The command that repeats the run, and the whole configuration, folded."""
    path = _shown_path(run)
    lines = [
        f"embodied-rl {run.command} {shlex.quote(path + '/config.yaml')} name={shlex.quote(run.name + '-again')}",
        f"embodied-rl report {shlex.quote(path)}",
    ]
    commands = escape("\n".join(lines))
    config = _folded("Resolved configuration", f"<pre>{escape(run.config_text.strip())}</pre>")
    return f'<div class="card"><pre>{commands}</pre></div>{config}'


def _status(run: Run) -> tuple[bool, str]:
    done, planned = len(run.metrics), run.planned_iterations
    count = f"{done:,} of {planned:,} iterations" if planned else _iterations(done)
    if run.evaluation is not None:
        return True, f"finished, {count}"
    return False, f"no final evaluation yet, {count}"


def _iterations(count: int) -> str:
    return f"{count:,} iteration{'' if count == 1 else 's'}"


def _headline_tile(run: Run) -> tuple[str, str, str]:
    counted = run.success_count
    if counted:
        low, high = wilson_interval(*counted)
        interval = f"95\u202f%\u00a0interval {low:.0%}\u00a0to\u00a0{high:.0%}"
        more = f"{counted[0]} of {counted[1]} episodes, {interval}"
        return "Final success", _percent(counted[0] / counted[1]), more
    returns = [episode["return"] for episode in run.episodes if finite(episode.get("return"))]
    if returns:
        return "Final return", number(sum(returns) / len(returns)), f"mean of {len(returns)} episodes"
    for key, name in (
        (f"eval/{run.success}", "last evaluation in training"),
        (f"rollout/{run.success}", "training episodes"),
    ):
        value = run.latest(key)
        if value is not None:
            return "Success so far", _percent(value), f"{name}, not a final evaluation"
    return "Success", "–", "not measured yet"


def _chart_card(run: Run, title: str, key: str) -> str:
    xs, ys = run.values(key)
    if not xs:
        return ""
    chart = line_chart([Series(title, xs, ys)], label=title, width=350, height=185, x_unit=x_unit(run))
    return (
        f'<div class="card"><div class="head"><h3>{escape(title)}</h3>'
        f'<span class="now">last <b>{number(ys[-1])}</b></span></div>{chart}</div>'
    )


def _folded(summary: str, body: str) -> str:
    return f'<details class="card"><summary>{escape(summary)}</summary>{body}</details>'


def _stacked(name: str, parts: Sequence[tuple[str, float, str]]) -> str:
    drawn = "".join(
        f'<b class="{colour}{" slim" if share < 0.09 else ""}" style="flex:{max(share, 0.002):.4f} 1 0" '
        f'data-tip="{escape(text)} ({share:.1%})">{escape(text)}</b>'
        for text, share, colour in parts
    )
    return f'<div class="bar"><span>{escape(name)}</span><div>{drawn}</div></div>'


def _percent(rate: float) -> str:
    return f"{rate:.0%}" if abs(rate * 100 - round(rate * 100)) < 1e-6 else f"{rate:.1%}"


def _pairs(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f'<table class="pair"><tbody>{body}</tbody></table>'


def _setting_table(fingerprint: Any) -> str:
    if not fingerprint:
        return ""
    rows = [(str(key), _plain(value)) for key, value in fingerprint.items()] if isinstance(fingerprint, dict) else []
    rows = rows or [("fingerprint", _plain(fingerprint))]
    return _folded("What exactly was evaluated", _pairs(rows))


def _episode_table(episodes: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for episode in episodes for key in episode))
    if not columns:
        return ""
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_plain(episode.get(column)))}</td>" for column in columns) + "</tr>"
        for episode in episodes
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return _folded(f"Table of the {len(episodes)} episodes", f'<div class="scroll">{table}</div>')


def _episode_square(episode: dict[str, Any], success: str) -> str:
    tip = "\n".join(f"{key.replace('_', ' ')}: {_plain(value)}" for key, value in episode.items())
    return f'<i{" class=yes" if episode.get(success) else ""} data-tip="{escape(tip)}"></i>'


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list) and len(value) > 8 and all(isinstance(item, int) for item in value):
        return f"{value[0]} to {value[-1]} ({len(value)})"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return str(value)


def _shown_path(run: Run) -> str:
    """Relative to where runs are started from, as the user typed it: `runs/<name>`."""
    root = run.config.get("run_root", "runs")
    return f"{str(root).rstrip('/')}/{run.name}"


def _small_units(value: str) -> str:
    """Units in small type: "3 min 05 s"."""
    words = escape(value).split(" ")
    return " ".join(
        word if any(c.isdigit() for c in word) or word == "–" else f"<small>{word}</small>" for word in words
    )
