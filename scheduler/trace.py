"""Timeline events: who did what, when. Kept in memory by each worker, collected by the driver.

Times are seconds of `time.monotonic`, which one machine's processes share; `write_chrome_trace` turns them into the
Chrome trace format that Perfetto opens.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """One span of work (`category` "work"), of waiting ("wait") or of moving device memory to or from the host
    ("switch") on a track such as "rollout[0]"."""

    track: str
    name: str
    category: str
    start: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)


class Trace:
    """The events of one process; `drain` hands them over and starts afresh."""

    def __init__(self, track: str) -> None:
        self.track = track
        self.events: list[Event] = []
        self._seen: set[Hashable] = set()

    def add(
        self,
        name: str,
        start: float,
        end: float,
        category: str = "work",
        track: str | None = None,
        **args: Any,
    ) -> None:
        self.events.append(Event(track or self.track, name, category, start, end, args))

    @contextmanager
    def span(self, name: str, category: str = "work", **args: Any) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, start, time.monotonic(), category, **args)

    def is_first(self, kind: Hashable) -> bool:
        """Whether this is asked for the first time since the last `drain`."""
        known = len(self._seen)
        self._seen.add(kind)
        return len(self._seen) > known

    def drain(self) -> list[Event]:
        events, self.events, self._seen = self.events, [], set()
        return events


def busy_seconds(events: Iterable[Event], track_prefix: str, start: float, end: float) -> dict[str, float]:
    """Seconds of "work" inside [start, end] for each track whose name begins with the prefix.

    Nested or overlapping spans count once.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.category == "work" and event.track.startswith(track_prefix):
            clipped = (max(event.start, start), min(event.end, end))
            if clipped[1] > clipped[0]:
                spans.setdefault(event.track, []).append(clipped)
    return {track: _union_length(sorted(clipped)) for track, clipped in spans.items()}


def _union_length(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def write_chrome_trace(events: Iterable[Event], path: Path) -> None:
    """Write events as Chrome trace JSON: one process row for each group, one thread row for each track."""
    rows: list[dict[str, Any]] = []
    groups: dict[str, int] = {}
    tracks: dict[str, int] = {}
    for event in events:
        group = event.track.split("[")[0]
        if group not in groups:
            groups[group] = len(groups) + 1
            rows.append({"ph": "M", "name": "process_name", "pid": groups[group], "tid": 0, "args": {"name": group}})
        if event.track not in tracks:
            tracks[event.track] = len(tracks) + 1
            rows.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": groups[group],
                    "tid": tracks[event.track],
                    "args": {"name": event.track},
                }
            )
        rows.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": event.category,
                "pid": groups[group],
                "tid": tracks[event.track],
                "ts": round(event.start * 1e6, 1),
                "dur": round((event.end - event.start) * 1e6, 1),
                "args": event.args,
            }
        )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}, default=_plain))
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    """NumPy and torch values as Python's, anything else by its name."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
