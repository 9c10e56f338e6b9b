"""The reasoning training run: sample, judge, learn, evaluate on held-out problems, save; then the report."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from embodied_rl.checkpoint import latest_checkpoint
from embodied_rl.console import interrupt_on_termination, reported
from embodied_rl.progress import duration
from embodied_rl.report import write_report
from embodied_rl.report_completions import COMPLETIONS_FILE
from embodied_rl.tracking import Tracker
from reasoning import evaluate
from reasoning.config import MathConfig
from reasoning.data import DataError, Loaded, Order, load, without_long
from reasoning.models import ModelError, encode, load_tokenizer
from reasoning.samples import Group, Prompt
from reasoning.team import MathTeam
from scheduler.cluster import Cluster
from scheduler.trace import Event, write_chrome_trace

logger = logging.getLogger(__name__)
TRACE_EVENTS = 20_000
SHOWN = {"reward/mean": "reward", "completions/mean_length": "length", "losses/entropy": "entropy"}


def train(config: MathConfig, run_dir: Path, resume: bool, command: str) -> int:
    """Run a whole training; returns the exit code.

    Args:
        run_dir: created here; holds everything that the run leaves.
        resume: go on from the newest sound checkpoint in `run_dir`.
        command: what the user typed, for the advice to resume.
    """
    try:
        problems = problems_of(config)
    except (DataError, ModelError) as error:
        print(error, file=sys.stderr)
        return 2
    run_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = None
    if resume:
        checkpoint, warnings = latest_checkpoint(run_dir)
        for warning in warnings:
            print(f"warning: {warning}")
    content = config.model_dump(mode="json")
    (run_dir / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    log_file = run_dir / "log.txt"
    logging.basicConfig(filename=log_file, level=logging.INFO, format="%(asctime)s driver %(message)s", force=True)
    step = int(checkpoint.name.removeprefix("step_")) if checkpoint else 0
    tracking = config.tracking
    tracker = Tracker(
        run_dir,
        content,
        project=tracking.project,
        name=run_dir.name,
        wandb_mode=tracking.wandb,
        tensorboard=tracking.tensorboard,
        resume_step=step if resume else None,
    )
    print(f"run {run_dir}" + (f", resumed after iteration {step}" if checkpoint else ""), flush=True)
    there = config.cluster
    with tracker, reported(command if "--resume" in command else f"{command} --resume"):
        with Cluster(there.address, there.cpu_slots, there.timeout_s, str(log_file.absolute())) as cluster:
            interrupt_on_termination()
            training = MathTraining(config, run_dir, tracker, MathTeam(config, cluster), *problems)
            try:
                training.run(checkpoint)
            finally:
                training.write_trace()
        print(f"report      {write_report(run_dir)}")
        return 0
    print(f"the run ended early; what there is: {write_report(run_dir)}", file=sys.stderr)
    return 1


def problems_of(config: MathConfig) -> tuple[Loaded, Loaded]:
    """The training and the held-out problems whose prompts are not too long. Raises DataError or ModelError."""
    tokenizer = load_tokenizer(config.model.path)
    train, test = (
        without_long(load(config.data, held_out), lambda p: len(encode(tokenizer, p)), config.data.max_prompt_tokens)
        for held_out in (False, True)
    )
    return train, test


class MathTraining:
    """The state of a running training."""

    def __init__(
        self, config: MathConfig, run_dir: Path, tracker: Tracker, team: MathTeam, train: Loaded, test: Loaded
    ) -> None:
        self.config, self.run_dir, self.tracker, self.team = config, run_dir.absolute(), tracker, team
        for name, loaded in (("training", train), ("held-out", test)):
            left_out = f"; left out: {loaded.long} too long, {loaded.bad} bad lines" if loaded.long + loaded.bad else ""
            print(f"{len(loaded.problems)} {name} problems{left_out}", flush=True)
        self.train_problems, self.test_problems = train.problems, test.problems[: config.evaluation.problems]
        self.order = Order(len(self.train_problems), config.seed)
        self.iteration, self.tokens = 0, 0
        self.first_accuracy: float | None = None
        self.earlier_s, self.started = 0.0, time.monotonic()
        self.events: deque[Event] = deque(maxlen=TRACE_EVENTS)

    def run(self, checkpoint: Path | None) -> None:
        """Train from a checkpoint or the beginning to the end of the budget, and evaluate."""
        if checkpoint:
            self._load(checkpoint)
        elif self.config.train.warm_start:
            self._warm_start()
        self.team.sync_weights(self.iteration)
        if self.first_accuracy is None:
            metrics = self._evaluate()
            self.first_accuracy = metrics["eval/pass@1"]
            self.tracker.log(0, metrics)
        while self.iteration < self.config.train.iterations:
            self._iterate()
        judged = self.team.evaluate(self.test_problems, 1, 0.0)
        self._conclude(judged)
        self.team.export(self.run_dir / "pretrained")
        self.team.close()

    def _warm_start(self) -> None:
        train, start = self.config.train, time.monotonic()
        order = Order(len(self.train_problems), self.config.seed + 1)
        batches = [self._take(order, train.warm_start_batch) for _ in range(train.warm_start)]
        loss = self.team.warm_start([[prompt.problem for prompt in batch] for batch in batches])
        seconds = duration(time.monotonic() - start)
        print(f"warm start: {train.warm_start} steps, loss {loss:.3f}, {seconds}", flush=True)

    def _take(self, order: Order, count: int) -> list[Prompt]:
        first = order.cursor
        return [Prompt(self.train_problems[index], first + place) for place, (_, index) in enumerate(order.take(count))]

    def _iterate(self) -> None:
        start, total = time.monotonic(), self.config.train.iterations
        prompts = self._take(self.order, self.config.sampling.prompts)
        done = self.team.iterate(self.iteration, prompts, total - self.iteration)
        end = time.monotonic()
        self.iteration += 1
        report = done.reports["actor.update"][0]
        metrics: dict[str, float] = dict(report["metrics"])
        self.tokens += int(metrics["completions/tokens"])
        self.events += [Event("driver", f"iteration {self.iteration}", "mark", start, end), *self.team.drain_trace()]
        metrics |= {
            "data/epoch": self.order.cursor / self.order.size,
            "data/tokens": self.tokens,
            "time/iteration_s": end - start,
            "time/wall_s": self.earlier_s + end - self.started,
            "perf/tokens_per_s": metrics["completions/tokens"] / (end - start),
            "perf/train_samples_per_s": metrics["losses/samples"] / (end - start),
        }
        metrics |= {f"verifier/{name}": count for name, count in self.team.verdicts().items()}
        every = self.config.evaluation.every
        if every and self.iteration % every == 0:
            metrics |= self._evaluate()
            self._show(report["shown"])
        self.tracker.log(self.iteration, metrics)
        shown = "  ".join(f"{label} {metrics[key]:.3g}" for key, label in SHOWN.items() if key in metrics)
        print(f"iteration {self.iteration}/{total}  {shown}  {end - start:.1f} s", flush=True)
        if self.iteration == total or self.iteration % self.config.train.checkpoint_every == 0:
            self._save()

    # ------------------------------------------------------------------------------------------ evaluation

    def _evaluate(self) -> dict[str, float]:
        """Greedy accuracy on the held-out problems, and what some completions look like."""
        judged = self.team.evaluate(self.test_problems, 1, 0.0)
        found = evaluate.accuracy(judged)["pass@1"]
        where = f"iteration {self.iteration}"
        print(f"held-out accuracy, {where}: {found} on {len(judged)} problems, greedy", flush=True)
        self._show_table(f"held-out, {where}", *evaluate.table(judged, self.config.evaluation.completions))
        return {"eval/pass@1": found.value, "eval/mean_length": sum(p.tokens[0] for p in judged) / len(judged)}

    def _show(self, groups: list[Group]) -> None:
        """Some completions that were learned from, with their rewards."""
        rows = [
            [evaluate.prompt_text(group.prompt.problem.prompt), c.text, json.dumps(c.rewards), f"{c.reward}"]
            for group in groups
            for c in group.completions[: self.config.evaluation.completions]
        ]
        columns = ["prompt", "completion", "rewards", "reward"]
        self._show_table(f"training, iteration {self.iteration}", columns, rows)

    def _show_table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """On the console, in W&B and in the report."""
        if not rows:
            return
        shown = Table(*columns, title=title, title_justify="left")
        for row in rows:
            shown.add_row(*(Console().render_str(cell[:200], markup=False, highlight=False) for cell in row))
        Console().print(shown)
        self.tracker.table(self.iteration, f"completions/{title.partition(',')[0]}", columns, rows)
        with (self.run_dir / COMPLETIONS_FILE).open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({"table": title, **dict(zip(columns, row, strict=True))}) + "\n")

    def _conclude(self, judged: list[evaluate.Judged]) -> None:
        found = evaluate.accuracy(judged)["pass@1"]
        evaluate.write(judged, self.run_dir / "problems.jsonl")
        episodes = [{"id": p.id, "answer": p.answers[0], "success_once": p.verdicts[0] is True} for p in judged]
        content = {"success_once": found.value, "n": len(judged), "episodes": episodes}
        (self.run_dir / "evaluation.json").write_text(json.dumps(content, indent=1))
        self.tracker.summary({"final/pass@1": found.value, "final/first_pass@1": self.first_accuracy})
        seconds = self.earlier_s + time.monotonic() - self.started
        print(f"\ntrained {self.iteration} iterations, {self.tokens:,} sampled tokens, {duration(seconds)}")
        print(f"held-out accuracy {self.first_accuracy:.1%} before, {found} after, {len(judged)} problems, greedy")
        print(f"model       {self.run_dir / 'pretrained'}")

    # ------------------------------------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        state: dict[str, Any] = {
            "iteration": self.iteration,
            "cursor": self.order.cursor,
            "tokens": self.tokens,
            "first_accuracy": self.first_accuracy,
            "wall_s": self.earlier_s + time.monotonic() - self.started,
        }
        logger.info("saved %s", self.team.save(self.run_dir, self.iteration, state))

    def _load(self, checkpoint: Path) -> None:
        state = self.team.load(checkpoint.absolute())
        self.iteration, self.order.cursor, self.tokens = state["iteration"], state["cursor"], state["tokens"]
        self.first_accuracy, self.earlier_s = state["first_accuracy"], state["wall_s"]

    def write_trace(self) -> None:
        """Write the timeline of the newest iterations."""
        write_chrome_trace(self.events, self.run_dir / "trace.json")
