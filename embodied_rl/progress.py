"""Live progress of a training run or a collection: a bar on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

SHOWN = {
    "rollout/return": ("return", ".3g"),
    "losses/imitation": ("loss", ".3g"),
    "held_out/token_accuracy": ("tokens right", ".0%"),
    "held_out/action_l1": ("distance", ".3g"),
}


class TrainProgress:
    """Shows iteration k of n, env steps, speed, success, return and the time left. Use as a context manager.

    Args:
        total_iterations: iterations of the whole run.
        start_iteration: iterations that were done before (a resumed run).
        line_every_s: without a terminal, the least time between two lines; the last update is always printed.
        terminal: whether to draw the bar; default: whether stdout is a terminal.
        what: the command, as the bar's label.
        unit: what is counted.
        success: name of the success that counts.
    """

    def __init__(
        self,
        total_iterations: int,
        *,
        start_iteration: int = 0,
        line_every_s: float = 5.0,
        terminal: bool | None = None,
        what: str = "train",
        unit: str = "iteration",
        success: str = "success_once",
    ) -> None:
        self._shown = {f"rollout/{success}": ("success", ".0%"), **SHOWN}
        self._what, self._unit = what, unit
        self._total = total_iterations
        self._done = start_iteration
        self._line_every_s = line_every_s
        self._terminal = sys.stdout.isatty() if terminal is None else terminal
        self._bar: Progress | None = None
        self._ticks: deque[tuple[float, int, int]] = deque(maxlen=20)  # time, iteration, env steps
        self._printed_at = -math.inf
        self._pending = ""

    def __enter__(self) -> TrainProgress:
        if self._terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn(f"[bold]{self._what}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
            )
            self._bar.start()
            self._bar.add_task("starting", total=self._total, completed=self._done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._pending:
            self._print(self._pending)

    def update(self, iteration: int, env_steps: int, metrics: Mapping[str, float]) -> None:
        """Show the state after `iteration` iterations and `env_steps` env steps (0: there are none) since the start."""
        now = time.monotonic()
        self._done = iteration
        self._ticks.append((now, iteration, env_steps))
        text = self._text(env_steps, metrics)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=iteration, description=text)
            return
        width = len(str(self._total))
        self._pending = f"{self._unit} {iteration:>{width}}/{self._total}  {text}"
        if now - self._printed_at >= self._line_every_s or iteration >= self._total:
            self._print(self._pending)

    def _text(self, env_steps: int, metrics: Mapping[str, float]) -> str:
        (first, first_iteration, first_steps), (last, last_iteration, last_steps) = (
            self._ticks[0],
            self._ticks[-1],
        )
        parts = [f"{env_steps:,} env steps"] if env_steps else []
        speed = metrics.get("perf/env_steps_per_s")
        if env_steps and speed is None and last > first:
            speed = (last_steps - first_steps) / (last - first)
        if speed is not None and math.isfinite(speed):
            parts.append(f"{speed:,.0f}/s")
        for key, (label, form) in self._shown.items():
            if key in metrics and math.isfinite(metrics[key]):
                parts.append(f"{label} {metrics[key]:{form}}")
        if first_iteration < last_iteration < self._total:
            left = (last - first) / (last_iteration - first_iteration) * (self._total - last_iteration)
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def _print(self, line: str) -> None:
        print(line, flush=True)
        self._printed_at = time.monotonic()
        self._pending = ""


def duration(seconds: float) -> str:
    """Seconds as people say them: "4.2 s", "42 s", "3 min 05 s", "2 h 07 min"."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
