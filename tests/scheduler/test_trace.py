"""Timeline events: recording, busy time, and the file that Perfetto opens."""

import json
from pathlib import Path

import numpy as np
import pytest

from scheduler.trace import Event, Trace, busy_seconds, write_chrome_trace


def work(track: str, start: float, end: float, category: str = "work") -> Event:
    return Event(track, "step", category, start, end)


def test_a_span_records_its_time_and_arguments() -> None:
    trace = Trace("env[0]")
    with trace.span("reset", envs=4):
        pass
    (event,) = trace.drain()
    assert (event.track, event.name, event.category, event.args) == ("env[0]", "reset", "work", {"envs": 4})
    assert event.end >= event.start


def test_a_span_that_raises_is_recorded() -> None:
    trace = Trace("env[0]")
    with pytest.raises(KeyError), trace.span("reset"):
        raise KeyError
    assert [event.name for event in trace.drain()] == ["reset"]


def test_drain_hands_events_over_once() -> None:
    trace = Trace("env[0]")
    trace.add("step", 0.0, 1.0)
    assert len(trace.drain()) == 1
    assert trace.drain() == []


def test_overlapping_and_nested_work_counts_once() -> None:
    events = [work("env[0]", 0, 4), work("env[0]", 1, 2), work("env[0]", 3, 6), work("env[0]", 8, 9)]
    assert busy_seconds(events, "env", 0, 10) == {"env[0]": 7.0}


def test_work_is_clipped_to_the_window() -> None:
    assert busy_seconds([work("env[0]", 0, 4), work("env[0]", 6, 9)], "env", 3, 7) == {"env[0]": 2.0}


def test_waiting_is_not_busy() -> None:
    assert busy_seconds([work("env[0]", 0, 4, "wait")], "env", 0, 10) == {}


def test_tracks_are_chosen_by_prefix_and_counted_apart() -> None:
    events = [work("env[0]", 0, 1), work("env[1]", 0, 2), work("actor[0]", 0, 3)]
    assert busy_seconds(events, "env", 0, 10) == {"env[0]": 1.0, "env[1]": 2.0}


def test_a_chrome_trace_has_a_process_for_each_group_and_a_thread_for_each_track(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace([work("env[0]", 1, 2), work("env[1]", 1, 3), work("actor[0]", 2, 3)], path)
    rows = json.loads(path.read_text())["traceEvents"]
    names = {(row["name"], row["args"]["name"]): row for row in rows if row["ph"] == "M"}
    spans = [row for row in rows if row["ph"] == "X"]
    assert set(names) == {
        ("process_name", "env"),
        ("process_name", "actor"),
        ("thread_name", "env[0]"),
        ("thread_name", "env[1]"),
        ("thread_name", "actor[0]"),
    }
    assert [row["pid"] for row in spans] == [names["process_name", group]["pid"] for group in ("env", "env", "actor")]
    assert len({row["tid"] for row in spans}) == 3


def test_a_chrome_trace_counts_in_microseconds(tmp_path: Path) -> None:
    write_chrome_trace([work("env[0]", 1.5, 2.0)], tmp_path / "trace.json")
    (span,) = [row for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if row["ph"] == "X"]
    assert (span["ts"], span["dur"]) == (1.5e6, 0.5e6)


def test_numpy_numbers_may_be_arguments(tmp_path: Path) -> None:
    event = Event("env[0]", "step", "work", 0.0, 1.0, {"envs": np.int64(4), "reward": np.float32(0.5)})
    write_chrome_trace([event], tmp_path / "trace.json")
    (span,) = [row for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if row["ph"] == "X"]
    assert span["args"] == {"envs": 4, "reward": 0.5}


def test_writing_leaves_nothing_but_the_trace(tmp_path: Path) -> None:
    write_chrome_trace([], tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
