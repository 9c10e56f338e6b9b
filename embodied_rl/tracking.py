"""Where the numbers of a run go: `metrics.jsonl` (the record), TensorBoard and W&B (views of it).

`metrics.jsonl` has one JSON object a line: `step` first, the other keys sorted, floats in their shortest
exact form, so that equal runs give equal files. JSON has no NaN or infinity: both are written as `null` and
read as `None`.
Keys that begin with `perf/` or `time/` are timings; every other value of a run is reproducible.

W&B's start-up, failures and threads live in `tracking_wandb.py`, the HTML page of a run in `report.py`.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from embodied_rl.tracking_wandb import WandbRun, resolve_mode

METRICS_FILE = "metrics.jsonl"
WandbMode = Literal["auto", "online", "offline", "disabled"]


class Tracker:
    """Records the metrics, videos and tables of one run under `run_dir`. Use as a context manager.

    Args:
        run_dir: the run's directory; created if it is not there.
        config: the resolved configuration, shown by W&B.
        project: W&B project.
        name: W&B run name.
        wandb_mode: "auto" follows the variable WANDB_MODE, else is online if a key is known, else offline.
        tensorboard: whether to write `run_dir/tensorboard/`.
        resume_step: the step that training continues after: what was recorded beyond it is dropped.

    Raises:
        FileExistsError: `run_dir` already holds metrics and `resume_step` was not given.
    """

    def __init__(
        self,
        run_dir: Path,
        config: dict[str, Any],
        *,
        project: str = "embodied-rl",
        name: str,
        wandb_mode: WandbMode = "auto",
        tensorboard: bool = True,
        resume_step: int | None = None,
    ) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        if resume_step is not None:
            truncate_metrics(run_dir, resume_step)
        elif path.exists() and path.stat().st_size:
            raise FileExistsError(f"{path} already holds the metrics of a run: resume it or choose another run name")
        self._metrics = path.open("a", encoding="utf-8")
        self._tensorboard = _TensorBoard(run_dir / "tensorboard", resume_step) if tensorboard else None
        mode = resolve_mode(wandb_mode, run_dir)
        self._wandb = None
        if mode != "disabled":
            self._wandb = WandbRun(run_dir, config, project, name, mode, resume=resume_step is not None)

    @property
    def wandb_location(self) -> str:
        """The run's W&B page once it is online, else the local directory; empty if W&B is disabled."""
        return self._wandb.location if self._wandb else ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step: a line of `metrics.jsonl` (flushed), TensorBoard, W&B."""
        if "step" in metrics:
            raise ValueError("the metric name 'step' is taken by the step itself")
        values = {key: _number(metrics[key]) for key in sorted(metrics)}
        self._metrics.write(_line(step, values))
        self._metrics.flush()
        if self._tensorboard:
            self._tensorboard.scalars(step, values)
        if self._wandb:
            self._wandb.call(lambda run: run.log(values, step=step))

    def video(self, step: int, key: str, path: Path) -> None:
        """Show an mp4 file in W&B; the file itself stays where it is."""
        if self._wandb:
            self._wandb.call(lambda run: run.log({key: _wandb().Video(str(path), format="mp4")}, step=step))

    def table(self, step: int, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table in W&B."""
        if self._wandb:
            names, data = list(columns), [list(row) for row in rows]
            self._wandb.call(lambda run: run.log({key: _wandb().Table(columns=names, data=data)}, step=step))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set the run's headline values in W&B, such as the final success rate."""
        if self._wandb:
            final = dict(values)
            self._wandb.call(lambda run: run.summary.update(final))

    def close(self, *, failed: bool = False) -> None:
        """Flush and close everything, waiting a bounded time for W&B. Calling it again does nothing."""
        self._metrics.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.close(exit_code=1 if failed else 0)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


class NullTracker(Tracker):
    """A tracker that records nothing, so that callers have no branches."""

    def __init__(self) -> None:
        pass

    @property
    def wandb_location(self) -> str:
        return ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def video(self, step: int, key: str, path: Path) -> None:
        pass

    def table(self, step: int, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        pass

    def summary(self, values: Mapping[str, Any]) -> None:
        pass

    def close(self, *, failed: bool = False) -> None:
        pass


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `run_dir/metrics.jsonl` as dicts, in file order; NaN and infinity come back as None.

    A last line torn by a kill is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line before the last is damaged.
    """
    path = Path(run_dir) / METRICS_FILE
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    while lines and not lines[-1].strip("\0 \r"):
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows.append({"step": int(row["step"]), **row})
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is not a JSON object with a step: {line[:80]!r}") from error
    return rows


def truncate_metrics(run_dir: Path, last_step: int) -> None:
    """Drop the lines of `metrics.jsonl` after `last_step`, atomically; no file: nothing to do."""
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        return
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for row in read_metrics(run_dir):
            step = row.pop("step")
            if step <= last_step:
                file.write(_line(step, row))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _line(step: int, values: Mapping[str, float | int | None]) -> str:
    finite = {key: value if value is None or math.isfinite(value) else None for key, value in values.items()}
    return json.dumps({"step": int(step), **finite}, allow_nan=False) + "\n"


def _number(value: Any) -> float | int:
    """A Python number of a Python, NumPy or torch scalar."""
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _wandb() -> Any:
    import wandb

    return wandb


class _TensorBoard:
    """Scalars into an event file, through TensorBoard's own writer: torch's takes seconds to import."""

    def __init__(self, directory: Path, resume_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory), flush_secs=10)
        if resume_step is not None:  # readers purge what earlier files hold from this step on
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        summary = self._summary(
            value=[self._summary.Value(tag=key, simple_value=float(value)) for key, value in values.items()]
        )
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()
