"""The reasoning training run: sample, judge, learn, evaluate on held-out problems, save; then the report.

Directory, lock, checkpoints and tracking are those of `embodied_rl.train`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from embodied_rl import train as runs
from embodied_rl.progress import duration
from embodied_rl.report_completions import COMPLETIONS_FILE
from embodied_rl.tracking import Tracker
from reasoning import evaluate
from reasoning.config import MathConfig
from reasoning.data import DataError, Loaded, Order, load, without_long
from reasoning.models import ModelError, encode, load_tokenizer
from reasoning.samples import Group, Prompt
from reasoning.team import MathTeam
from scheduler.cluster import Cluster
from scheduler.executor import Iteration
from scheduler.profile import Profile
from scheduler.trace import Event

logger = logging.getLogger(__name__)
SHOWN = {"reward/mean": "reward", "completions/mean_length": "length", "losses/entropy": "entropy"}


def train(config: MathConfig, run_dir: Path, resume: bool, command: str) -> int:
    """Run a whole training as `embodied_rl.train.train` does; returns the exit code."""
    try:
        problems = problems_of(config)
    except (DataError, ModelError) as error:
        print(error, file=sys.stderr)
        return 2
    return runs.train(config, run_dir, resume, command, partial(_start, problems))


def _start(
    problems: tuple[Loaded, Loaded],
    config: MathConfig,
    run_dir: Path,
    tracker: Tracker,
    cluster: Cluster,
    profile: Profile,
) -> MathTraining:
    return MathTraining(config, run_dir, tracker, MathTeam(config, cluster, profile=profile), *problems)


def problems_of(config: MathConfig) -> tuple[Loaded, Loaded]:
    """The training and the held-out problems whose prompts are not too long. Raises DataError or ModelError."""
    tokenizer = load_tokenizer(config.model.path)
    train, test = (
        without_long(load(config.data, held_out), lambda p: len(encode(tokenizer, p)), config.data.max_prompt_tokens)
        for held_out in (False, True)
    )
    return train, test


class MathTraining(runs.Training):
    """The state of a running training."""

    team_class: ClassVar = MathTeam
    team: MathTeam

    def __init__(
        self, config: MathConfig, run_dir: Path, tracker: Tracker, team: MathTeam, train: Loaded, test: Loaded
    ) -> None:
        self._begin(config, run_dir, tracker, team)
        for name, loaded in (("training", train), ("held-out", test)):
            left_out = f"; left out: {loaded.long} too long, {loaded.bad} bad lines" if loaded.long + loaded.bad else ""
            print(f"{len(loaded.problems)} {name} problems{left_out}", flush=True)
        self.train_problems, self.test_problems = train.problems, test.problems[: config.evaluation.problems]
        self.order = Order(len(self.train_problems), config.seed)
        self.tokens = 0
        self.ahead: list[Group] = []  # sampled, and still to be learned from
        self.first_accuracy: float | None = None

    def run(self) -> None:
        """Train to the end of the budget, and evaluate."""
        self._write_processes()
        if self.first_accuracy is None and self.config.train.warm_start:
            self._warm_start()
        self.team.sync_weights(self.iteration)
        if self.first_accuracy is None:
            metrics = self._evaluate()
            self.first_accuracy = metrics["eval/pass@1"]
            self.tracker.log(0, metrics)
        while self.iteration < self.config.train.iterations:
            metrics = self._iterate()
            shown = "  ".join(f"{label} {metrics[key]:.3g}" for key, label in SHOWN.items() if key in metrics)
            seconds = metrics["time/iteration_s"]
            print(f"iteration {self.iteration}/{self.config.train.iterations}  {shown}  {seconds:.1f} s", flush=True)
        self._evaluate_finally()
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

    def _learn(self) -> dict[str, float]:
        """One iteration: completions, and the update from them or, with `sampling.ahead`, from those before."""
        start, total, config = time.monotonic(), self.config.train.iterations, self.config
        take = partial(self._take, self.order)
        if config.sampling.ahead:
            groups = self.ahead or self.team.sample(take(config.sampling.prompts))
            prompts = take(config.sampling.prompts) if self.iteration + 1 < total else []
            done, schedule = self.team.iterate(self.iteration, prompts, total - self.iteration, groups)
            self.ahead = done.outputs.get("judge.score", [])
        else:
            done, schedule = self._rounds(take(config.sampling.prompts), total - self.iteration)
        end = time.monotonic()
        self.iteration += 1
        self._take_notes()
        report = done.reports["actor.update"][0]
        metrics: dict[str, float] = dict(report["metrics"])
        self.shown = report["shown"]
        self.tokens += int(metrics["completions/tokens"])
        self.events += [Event("driver", f"iteration {self.iteration}", "mark", start, end), *self.team.drain_trace()]
        return {
            **metrics,
            **schedule,
            "data/epoch": self.order.cursor / self.order.size,
            "data/tokens": self.tokens,
            "time/iteration_s": end - start,
            "time/wall_s": self.earlier_s + end - self.started,
            "perf/tokens_per_s": metrics["completions/tokens"] / (end - start),
            "perf/train_samples_per_s": metrics["losses/samples"] / (end - start),
            **{f"verifier/{name}": count for name, count in self.team.verdicts().items()},
        }

    def _rounds(self, prompts: list[Prompt], left: int) -> tuple[Iteration, dict[str, float]]:
        """An iteration, in which groups of equal rewards are replaced by those of other problems if that is wanted."""
        for number in range(self.config.algorithm.refill + 1):
            is_last = number == self.config.algorithm.refill
            done, schedule = self.team.iterate(self.iteration, prompts, left, is_last=is_last)
            missing = done.reports["actor.update"][0]["missing"]
            if not missing:
                break
            prompts = self._take(self.order, max(missing, len(self.team.actor)))
        return done, {**schedule, "sampling/rounds": number + 1.0}

    # ------------------------------------------------------------------------------------------ evaluation

    def _evaluate_if_due(self) -> dict[str, float]:
        every = self.config.evaluation.every
        if not every or self.iteration % every:
            return {}
        self._show(self.shown)
        return self._evaluate()

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
        evaluate.show(title, columns, rows)
        self.tracker.table(self.iteration, f"completions/{title.partition(',')[0]}", columns, rows)
        with (self.run_dir / COMPLETIONS_FILE).open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({"table": title, **dict(zip(columns, row, strict=True))}) + "\n")

    def _evaluate_finally(self) -> None:
        judged = self.team.evaluate(self.test_problems, 1, 0.0)
        found = evaluate.accuracy(judged)["pass@1"]
        evaluate.write(judged, self.run_dir / "problems.jsonl")
        episodes = [{"id": p.id, "answer": p.answers[0], "success_once": p.verdicts[0] is True} for p in judged]
        content = {"success_once": found.value, "n": len(judged), "episodes": episodes}
        (self.run_dir / "evaluation.json").write_text(json.dumps(content, indent=1))
        self.tracker.summary({"final/pass@1": found.value, "final/first_pass@1": self.first_accuracy})
        self._show_table("held-out, at the end", *evaluate.table(judged, self.config.evaluation.completions))
        seconds = duration(self.earlier_s + time.monotonic() - self.started)
        self.results = [
            f"trained {self.iteration} iterations, {self.tokens:,} sampled tokens, {seconds}",
            f"held-out accuracy {self.first_accuracy:.1%} before, {found} after, {len(judged)} problems, greedy",
            f"model       {self.run_dir / 'pretrained'}",
        ]

    # ------------------------------------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        state: dict[str, Any] = {
            "iteration": self.iteration,
            "cursor": self.order.cursor,
            "tokens": self.tokens,
            "first_accuracy": self.first_accuracy,
            "wall_s": self.earlier_s + time.monotonic() - self.started,
        }
        self.checkpoint = self.team.save(self.run_dir, self.iteration, state, self.ahead)
        logger.info("saved %s", self.checkpoint)

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint exactly where it was written."""
        state, self.ahead = self.team.load(checkpoint.absolute())
        self.iteration, self.order.cursor, self.tokens = state["iteration"], state["cursor"], state["tokens"]
        self.first_accuracy, self.earlier_s, self.checkpoint = state["first_accuracy"], state["wall_s"], checkpoint
