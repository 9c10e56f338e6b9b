"""The report of whole, partial and hostile runs, read as text and as a browser sees it."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied_rl.report import write_curve, write_report
from embodied_rl.report_charts import axis, number, smoothed
from embodied_rl.report_data import load_run, wilson_interval
from embodied_rl.tracking import Tracker
from embodied_rl.video import write_mp4

HOSTILE = "<script>document.title='taken'</script>&\"'"
CONFIG = {
    "name": "push",
    "run_root": "runs",
    "seed": 7,
    "env": {"id": "PushCube-v1"},
    "algorithm": {"name": "ppo"},
    "train": {"iterations": 40},
    "evaluation": {"episodes": 16},
}


def line(step: int) -> dict[str, float]:
    metrics = {
        "env_steps": step * 100,
        "rollout/success_once": step / 40,
        "rollout/return": step / 10,
        "losses/value": math.nan if step == 3 else 1 / step,
        "losses/approx_kl": 0.01,
        "perf/env_steps_per_s": 250.0,
        "perf/idle_fraction/env": 0.25,
        "perf/idle_fraction/actor": 0.75,
        "time/iteration_s": 0.4,
        "time/rollout_s": 0.25,
        "time/update_s": 0.1,
        "time/wall_s": 0.4 * step,
        "extra/own_metric": 1.0 * step,
    }
    if step % 10 == 0:
        metrics["eval/success_once"] = step / 40
    return metrics


def make_run(path: Path, steps: int = 40, config: dict[str, Any] = CONFIG) -> Path:
    with Tracker(path, config, name="t", wandb_mode="disabled", tensorboard=False) as tracker:
        for step in range(1, steps + 1):
            tracker.log(step, line(step))
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def evaluation(path: Path, successes: int = 45, n: int = 50, **more: Any) -> None:
    episodes = [
        {"seed": 900 + i, "success_once": i < successes, "success_at_end": i < 40, "return": 2.0, "length": 9}
        for i in range(n)
    ]
    content = {
        "episodes": episodes,
        "success_once": successes / n,
        "n": n,
        "seeds": list(range(900, 900 + n)),
    }
    (path / "evaluation.json").write_text(json.dumps(content | {"fingerprint": {"env": "PushCube-v1"}} | more))


def trace(path: Path, iterations: int = 3, events: int = 10, name: str = "chunk_step") -> None:
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "env"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "env[0]"}},
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 2, "args": {"name": "driver"}},
    ]
    for iteration in range(iterations):
        start = iteration * 1e6
        rows.append(event(f"iteration {iteration}", start, 1e6, 2, 2))
        rows += [event(name, start + k * 1e6 / events, 0.6e6 / events, 1, 1) for k in range(events)]
    (path / "trace.json").write_text(json.dumps({"traceEvents": rows}))


def event(name: str, start: float, duration: float, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": "work", "ts": start, "dur": duration, "pid": pid, "tid": tid}


class Checker(HTMLParser):
    """Collects what a page would load and whether its tags match."""

    VOID = {"meta", "link", "br", "line", "circle", "rect", "polyline", "img", "input"}

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for key, value in attrs if key in ("src", "href", "poster", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> does not match"


def report(run_dir: Path) -> tuple[str, Checker]:
    path = write_report(run_dir)
    assert path == run_dir.resolve() / "report.html"
    html = path.read_text()
    checker = Checker(html)
    assert checker.open == []
    return html, checker


def test_a_whole_run_shows_its_numbers_curves_episodes_time_and_timeline(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "push")
    evaluation(run_dir)
    trace(run_dir)
    html, checker = report(run_dir)
    assert "finished, 40 of 40 iterations" in html
    assert "<strong>90%</strong>" in html and "45 of 50 episodes" in html
    assert "78.6% to 95.7%" in html  # Wilson, 45 of 50
    assert "<strong>4,000</strong>" in html and "<strong>16 <small>s</small></strong>" in html
    assert html.count('class="chart"') == 3 + 4 + 7  # success in three widths, the usual, the others
    assert len(re.findall(r'<i(?: class=yes)? data-tip="seed: ', html)) == 50
    assert "busy 75%" in html and "busy 25%" in html and "rollout 0.25 s" in html
    assert "The last 2 iterations: 2 s, 22 events." in html and html.count("chunk_step\n") == 20
    assert "embodied-rl train runs/push/config.yaml name=push-again" in html
    assert "extra/own_metric" in html and "iterations: 40" in html


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "push")
    write_mp4(run_dir / "videos/final.mp4", np.zeros((4, 16, 16, 3), np.uint8), fps=4)
    html, checker = report(run_dir)
    assert checker.loads and all(value.startswith("data:") for value in checker.loads)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|<iframe", html)


def test_small_videos_are_inside_and_large_ones_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path / "push", steps=2)
    small = write_mp4(run_dir / "videos/small one.mp4", np.zeros((4, 16, 16, 3), np.uint8), fps=4)
    (run_dir / "videos/too large.mp4").write_bytes(b"0" * 20_000)
    monkeypatch.setattr("embodied_rl.report_sections.EMBED_BYTES", 19_999)
    _, checker = report(run_dir)
    assert checker.tags.count("video") == 1
    embedded = next(value for value in checker.loads if value.startswith("data:video/mp4;base64,"))
    assert base64.b64decode(embedded.split(",")[1]) == small.read_bytes()
    assert "videos/too%20large.mp4" in checker.loads


def test_text_from_the_run_is_never_markup(tmp_path: Path) -> None:
    config = CONFIG | {"env": {"id": HOSTILE}, "note": HOSTILE}
    run_dir = make_run(tmp_path / "<b>'push' & \"co\"", steps=1, config=config)
    with Tracker(run_dir, config, name="t", wandb_mode="disabled", tensorboard=False, resume_step=1) as tracker:
        tracker.log(2, line(2) | {HOSTILE: 1.0, "perf/idle_fraction/" + HOSTILE: 0.5})
    evaluation(
        run_dir,
        fingerprint={HOSTILE: [HOSTILE]},
        seeds=HOSTILE,
        episodes=[{HOSTILE: HOSTILE, "success_once": True}],
    )
    trace(run_dir, name=HOSTILE)
    (run_dir / "videos").mkdir()
    (run_dir / "videos" / "<i>'.mp4").write_bytes(b"0")
    html, checker = report(run_dir)
    assert checker.tags.count("script") == 1 and "taken'</script>" not in html
    assert "&lt;script&gt;document.title=" in html
    assert checker.tags.count("h1") == 1 and "&lt;b&gt;&#x27;push&#x27; &amp; &quot;co&quot;</h1>" in html
    ElementTree.fromstring(write_curve([run_dir], tmp_path / "curve.svg").read_text())


def test_a_killed_run_says_what_is_missing(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "push", steps=12)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "env_st')
    (run_dir / "trace.json").write_text('{"traceEvents": [')
    html, _ = report(run_dir)
    assert "no final evaluation yet, 12 of 40 iterations" in html
    assert "This run has no final evaluation" in html
    assert "Success so far" in html and "<strong>25%</strong>" in html  # the evaluation at step 10
    assert "trace.json cannot be read" in html and ">Timeline<" not in html


def test_where_success_at_the_end_counts_it_is_what_the_page_shows(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "push", config={**CONFIG, "env": {"id": "PushCube-v1", "success": "at_end"}})
    evaluation(run_dir)
    html, _ = report(run_dir)
    assert "40 of 50 episodes" in html and "45 of 50 episodes" not in html
    assert html.index("Success at the end") < html.index("Success at any time") and "45 of 50, 90.0%" in html
    assert html.count("class=yes") == 40


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_of_hardly_any_lines_has_a_report(tmp_path: Path, steps: int) -> None:
    html, _ = report(make_run(tmp_path / "push", steps=steps))
    assert ("No iteration was finished" in html) == (steps == 0)
    assert "nan" not in html.lower()


def test_metrics_without_env_steps_are_drawn_over_steps(tmp_path: Path) -> None:
    with Tracker(tmp_path, {}, name="t", wandb_mode="disabled", tensorboard=False) as tracker:
        for step in range(1, 4):
            tracker.log(step, {"rollout/return": float(step), "losses/policy": math.nan})
    (tmp_path / "config.yaml").write_text("")
    html, _ = report(tmp_path)
    assert "3 steps" in html and "env steps" not in html.split("<section>")[1] and "Policy loss" not in html


def test_what_is_not_a_run_is_refused_by_name_of_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        write_report(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"no config.yaml and no metrics.jsonl"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ValueError, match=r"it has no metrics.jsonl"):
        write_report(tmp_path)


def test_a_timeline_of_too_many_events_draws_a_bounded_number(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "push", steps=2)
    trace(run_dir, iterations=2, events=100_000)
    html, _ = report(run_dir)
    assert html.count("chunk_step\n") <= 1500
    assert "100,001 events" in html or "200,002 events" in html


def test_wall_time_adds_up_over_a_resume_that_counts_anew(tmp_path: Path) -> None:
    with Tracker(tmp_path, {}, name="t", wandb_mode="disabled", tensorboard=False) as tracker:
        for step, wall in enumerate([5.0, 10.0, 3.0, 6.0]):
            tracker.log(step, {"time/wall_s": wall})
    (tmp_path / "config.yaml").write_text("{}")
    assert load_run(tmp_path).wall_s == 16.0


def test_wilson_intervals_match_published_values() -> None:
    # Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29
    for successes, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_the_curve_is_a_standalone_svg(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "push")
    evaluation(run_dir)
    path = write_curve([run_dir], tmp_path / "docs" / "curve.svg")
    root = ElementTree.fromstring(path.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    tags = [element.tag.split("}")[1] for element in root.iter()]
    assert tags.count("polyline") == 2 and tags.count("circle") == 4 + 1 + 2  # evaluations, final, legend
    assert not re.search(r"(href|src)=|@import|url\(", path.read_text())
    with pytest.raises(ValueError, match=r"ends in \.svg"):
        write_curve([run_dir], tmp_path / "curve.png")


def test_a_curve_of_several_runs_names_and_colours_each(tmp_path: Path) -> None:
    run_dirs = [make_run(tmp_path / name) for name in ("seed_0", "seed_1")]
    text = write_curve(run_dirs, tmp_path / "curve.svg", "push").read_text()
    root = ElementTree.fromstring(text)
    assert "push" in text and [text.count(f">{run.name}<") for run in run_dirs] == [1, 1]
    lines = [element.get("class") for element in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert {"line s1", "line s2"} <= set(lines)


def test_a_moving_average_keeps_a_constant_and_does_not_lag() -> None:
    assert smoothed([2.0] * 50) == pytest.approx([2.0] * 50)
    ramp = [float(i) for i in range(100)]
    assert smoothed(ramp)[10:90] == pytest.approx(ramp[10:90])


def test_ticks_are_round_and_inside_the_range() -> None:
    assert axis(0, 40_320, 4, tight=True)[0] == [0, 20_000, 40_000]
    ticks, (low, high) = axis(0.3, 0.3, 4)
    assert low < 0.3 < high and all(low <= tick <= high for tick in ticks)
    assert [number(value) for value in (0, 0.012345, 999.96, 12_345, 1.2e6)] == [
        "0",
        "0.0123",
        "1,000",
        "12.3k",
        "1.2M",
    ]


def test_a_browser_shows_the_page_and_its_script_runs(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine to open the report with")
    run_dir = make_run(tmp_path / "push", config=CONFIG | {"note": HOSTILE})
    evaluation(run_dir)
    trace(run_dir, name=HOSTILE)
    path = write_report(run_dir)
    probe = """<script>
      const chart = document.querySelector('svg[data-hover]'), box = chart.getBoundingClientRect();
      const at = {clientX: box.right, clientY: box.top, bubbles: true};
      chart.dispatchEvent(new PointerEvent('pointermove', at));
      document.body.dataset.seen = [document.querySelectorAll('svg.chart').length,
        document.querySelectorAll('.track b').length, document.documentElement.scrollWidth <= innerWidth,
        document.getElementById('tip').textContent].join('|');
    </script></body>"""
    path.write_text(path.read_text().replace("</body>", probe))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--window-size=1280,900", "--dump-dom"]
    done = subprocess.run(
        [browser, *flags, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "<title>push · embodied-rl</title>" in done.stdout
    seen = re.search(r'data-seen="([^"]*)"', done.stdout, re.DOTALL)
    assert seen is not None
    charts, bars, fits, tip = seen.group(1).split("|")
    assert (charts, bars, fits) == ("14", "22", "true")
    assert tip.startswith("4,000 env steps\ntraining episodes  100.0%")
