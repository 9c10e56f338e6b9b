"""The embodied training run: roll out, learn, evaluate, save; then the final evaluation and the report."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from embodied_rl.checkpoint import best_checkpoint, latest_checkpoint, mark_best
from embodied_rl.config import Config
from embodied_rl.console import reported
from embodied_rl.data import RolloutReport
from embodied_rl.evaluate import (
    BEFORE,
    TEST_SEED,
    VALIDATION_SEED,
    compare,
    describe,
    evaluation_metrics,
    record_videos,
    write_record,
)
from embodied_rl.profiles import known_profile, save_profile
from embodied_rl.progress import TrainProgress, duration
from embodied_rl.report import write_report
from embodied_rl.runs import resume_command
from embodied_rl.team import Team
from embodied_rl.tracking import Tracker
from envs.base import EnvError
from scheduler.cluster import Cluster
from scheduler.execute import Replan
from scheduler.profile import Profile
from scheduler.trace import Event, busy_seconds, write_chrome_trace

logger = logging.getLogger(__name__)
TRACE_EVENTS = 20_000  # newest events kept for the timeline


def train(config: Any, run_dir: Path, resume: bool, command: str, start: Start | None = None) -> int:
    """Run a whole training; returns the exit code.

    Args:
        run_dir: created here; holds everything the run leaves.
        resume: go on from the newest sound checkpoint in `run_dir`.
        command: what the user typed, for the report.
        start: makes the training, which starts its workers; default: reinforcement of a robot policy.
    """
    start = start or Training.start
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = _lock(run_dir)
    if lock is None:
        print(f"{run_dir} is in use by another run; wait for it, or choose another name=...", file=sys.stderr)
        return 2
    checkpoint = None
    if resume:
        checkpoint, warnings = latest_checkpoint(run_dir)
        for warning in warnings:
            print(f"warning: {warning}")
        if checkpoint is None:
            print("no checkpoint had been saved: the run starts again from its beginning")
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    (run_dir / "command.txt").write_text(command + "\n")
    log_file = run_dir / "log.txt"
    logging.basicConfig(
        filename=log_file,
        level=logging.INFO,
        format="%(asctime)s driver %(levelname)s %(message)s",
        force=True,
    )
    step = int(checkpoint.name.removeprefix("step_")) if checkpoint else 0
    tracker = Tracker(
        run_dir,
        config.model_dump(mode="json"),
        project=config.tracking.project,
        name=run_dir.name,
        wandb_mode=config.tracking.wandb,
        tensorboard=config.tracking.tensorboard,
        resume_step=step if resume else None,
    )
    print(f"run {run_dir}" + (f", resumed after iteration {step}" if checkpoint else ""), flush=True)
    with tracker, reported(resume_command(config, run_dir)):
        with Cluster(
            config.cluster.address,
            config.cluster.cpu_slots,
            config.cluster.timeout_s,
            str(log_file.absolute()),
        ) as cluster:
            profile = known_profile(config)
            training = start(config, run_dir, tracker, cluster, profile)
            try:
                if checkpoint:
                    training.load(checkpoint)
                training.run()
            finally:
                training.write_trace()
                if profile.samples:
                    save_profile(profile, run_dir)
        _print_results(run_dir, tracker, training)
        return 0
    write_report(run_dir)
    return 1


class Training:
    """The state of a running training."""

    team_class: ClassVar[type[Team]] = Team

    def __init__(self, config: Config, run_dir: Path, tracker: Tracker, team: Team) -> None:
        self._begin(config, run_dir, tracker, team)
        if not team.spec.has_success:
            _refuse_success_settings(config)
        for address, versions in team.server_versions.items():
            print(f"env server {address}: {', '.join(f'{name} {version}' for name, version in versions.items())}")
        self.env_steps = 0
        self.episodes = 0
        self.replaced = 0

    def _begin(self, config: Any, run_dir: Path, tracker: Tracker, team: Any) -> None:
        self.config, self.run_dir, self.tracker, self.team = config, run_dir.absolute(), tracker, team
        self.iteration = 0
        self.reached = False
        self.best: tuple[float, int] | None = None  # the best score of an evaluation, and its iteration
        self.earlier_s = 0.0
        self.started = time.monotonic()
        self.events: deque[Event] = deque(maxlen=TRACE_EVENTS)
        self.results: list[str] = []
        self.videos: list[Path] = []
        self.checkpoint: Path | None = None

    @classmethod
    def start(cls, config: Any, run_dir: Path, tracker: Tracker, cluster: Cluster, profile: Profile) -> Training:
        """Start the workers of a training."""
        return cls(config, run_dir, tracker, cls.team_class(config, cluster, profile=profile))

    # ------------------------------------------------------------------------------------------ the run

    def run(self) -> None:
        """Train to the end of the budget or the success aimed at, then evaluate."""
        self._write_processes()
        self.team.sync_weights()
        self._evaluate_before()
        total = self.config.train.iterations
        with TrainProgress(total, start_iteration=self.iteration, success=self.config.env.score) as progress:
            while self.iteration < total and not self.reached:
                metrics = self._iterate()
                progress.update(self.iteration, self.env_steps, metrics)
        seconds = self.earlier_s + time.monotonic() - self.started
        self.results.append(f"trained {self._amount()} in {duration(seconds)}, {self.iteration} iterations")
        self._evaluate_finally()
        if self.config.policy.vla is not None:
            exported, key = self.run_dir / "pretrained", f"policy.{self.config.policy.kind}.checkpoint"
            self.team.export(exported)
            self.results.append(f"for other runs: {key}={exported}")
        self.team.close()

    def _amount(self) -> str:
        return f"{self.env_steps:,} env steps"

    def _write_processes(self) -> None:
        processes = {"driver": os.getpid(), **self.team.process_ids()}
        temporary = self.run_dir / "processes.json.tmp"  # whoever reads it finds it whole
        temporary.write_text(json.dumps(processes, indent=1))
        temporary.replace(self.run_dir / "processes.json")

    def _iterate(self) -> dict[str, float]:
        metrics = self._learn()
        metrics |= self._evaluate_if_due()
        self.tracker.log(self.iteration, metrics)
        is_last = self.iteration == self.config.train.iterations or self.reached
        is_best = self.best is not None and self.best[1] == self.iteration
        if is_last or is_best or self.iteration % self.config.train.checkpoint_every == 0:
            self._save()
        return metrics

    def _learn(self) -> dict[str, float]:
        """One iteration: a rollout and the update from it."""
        start = time.monotonic()
        done = self.team.iterate(self.iteration, self.config.train.iterations - self.iteration)
        end = time.monotonic()
        report = done.rollout
        self.iteration += 1
        self._take_notes()
        self.events.append(Event("driver", f"iteration {self.iteration}", "mark", start, end))
        self.env_steps += report.env_steps
        self.episodes += len(report.episodes)
        return {
            **self._rollout_metrics(report),
            **done.learned,
            **done.schedule,
            **self._performance(report, done.policy_calls, start, end),
        }

    def _take_notes(self) -> None:
        while self.team.schedule.changes:
            self._take_note(self.team.schedule.changes.pop(0))

    def _take_note(self, change: Replan) -> None:
        """A new plan: said, written beside the run's other files, and marked in the timeline."""
        self._write_processes()
        plan, now = change.plan, time.monotonic()
        (self.run_dir / "plan.yaml").write_text(plan.to_yaml())
        groups = ", ".join(map(str, plan.loop_groups.values()))
        entry = {"iteration": change.iteration + 1, "placement": plan.placement_text, "groups": groups}
        with (self.run_dir / "plans.jsonl").open("a") as file:
            file.write(json.dumps({**entry, "reason": change.reason, "seconds": change.seconds}) + "\n")
        where = f"{plan.placement_text}, S = {groups}"
        print(f"plan from iteration {change.iteration + 1}: {where}: {change.reason}", flush=True)
        self.events.append(Event("driver", "new plan", "mark", now, now, {"plan": str(plan), "why": change.reason}))

    def _rollout_metrics(self, report: RolloutReport) -> dict[str, float]:
        metrics = evaluation_metrics(report.episodes, self.team.score, "rollout", bool(self.config.env.mix))
        metrics |= {"env_steps": self.env_steps, "rollout/episodes": len(report.episodes)}
        metrics |= {
            "env/replaced_processes": report.replaced_processes,
            "env/lost_episodes": report.lost_episodes,
        }
        if report.replaced_processes > self.replaced:
            self.replaced = report.replaced_processes
            self._write_processes()
            processes = "1 env process" if self.replaced == 1 else f"{self.replaced} env processes"
            lost = f"{report.lost_episodes} lost episodes were restarted"
            print(f"replaced {processes} so far; {lost} (see {self.run_dir / 'log.txt'})", flush=True)
        return metrics

    def _performance(self, report: RolloutReport, calls: int, start: float, end: float) -> dict[str, float]:
        events = self.team.drain_trace()
        self.events += events
        seconds = end - start
        metrics = {
            "time/iteration_s": seconds,
            "time/rollout_s": report.seconds,
            "time/wall_s": self.earlier_s + end - self.started,
            "perf/env_steps_per_s": report.env_steps / seconds,
            "perf/policy_calls_per_s": calls / seconds,
            "perf/env_busy_in_rollout": report.busy_fraction,
        }
        for group in self.team.groups:
            busy = busy_seconds(events, group, start, end)
            mean = sum(busy.values()) / max(len(busy), 1)
            metrics[f"perf/idle_fraction/{group}"] = 1.0 - mean / seconds
            if group == "actor":
                metrics["time/update_s"] = mean
        return metrics

    def _evaluate_if_due(self) -> dict[str, float]:
        every = self.config.evaluation.every
        if not every or self.iteration % every:
            return {}
        settings = self.config.evaluation
        episodes = self.team.evaluate(settings.episodes, VALIDATION_SEED, settings.deterministic)
        metrics = evaluation_metrics(episodes, self.team.score, by_env=bool(self.config.env.mix))
        aim = self.config.train.stop_at_success
        key = f"eval/{self.team.score}"
        score = metrics[key]
        self.reached = aim is not None and score >= aim
        print(
            f"check after iteration {self.iteration}: {key} {score:.3f} on {len(episodes)} held-out seeds", flush=True
        )
        if self.reached:
            print(f"stopping: that is at least {aim:g}", flush=True)
        if self.best is None or score >= self.best[0]:
            self.best = (score, self.iteration)
        return metrics

    # ------------------------------------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        state = {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "reached": self.reached,
            "best": list(self.best) if self.best else None,
            "wall_s": self.earlier_s + time.monotonic() - self.started,
        }
        path = self.team.save(self.run_dir, self.iteration, state)
        mark_best(self.run_dir, self.best[1] if self.best else None)
        logger.info("saved %s", path)

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint exactly where it was written."""
        state = self.team.load(checkpoint.absolute())
        self.iteration, self.env_steps, self.episodes = (
            state["iteration"],
            state["env_steps"],
            state["episodes"],
        )
        self.reached, self.earlier_s = state["reached"], state["wall_s"]
        self.best = tuple(state["best"]) if state["best"] else None
        mark_best(self.run_dir, self.best[1] if self.best else None)

    # ------------------------------------------------------------------------------------------ the end

    def _evaluate_before(self) -> None:
        """Evaluate what the run begins with, on the seeds of the final evaluation, if that is wanted and not done."""
        settings, file = self.config.evaluation, self.run_dir / BEFORE
        if not settings.before or self.iteration or file.exists():
            return
        print(f"before training: evaluating {settings.final_episodes} episodes", flush=True)
        episodes = self.team.evaluate(settings.final_episodes, TEST_SEED, settings.deterministic)
        record = write_record(self.run_dir, self.team, episodes, TEST_SEED, settings.deterministic, "", BEFORE)
        print(f"before training: {describe(record)}", flush=True)
        record_videos(self.team, episodes, settings.videos, self.run_dir, self.tracker, 0, "before_")

    def _evaluate_finally(self) -> None:
        """Evaluate the best checkpoint by the evaluations during training, the last one where there were none."""
        settings = self.config.evaluation
        checkpoint = best = best_checkpoint(self.run_dir)
        if best is None or self.best is None:
            checkpoint, _ = latest_checkpoint(self.run_dir)
        elif self.best[1] != self.iteration:
            self.team.load_policy(best)
            self.results.append(f"best check during training: {self.best[0]:.3f}, after iteration {self.best[1]}")
        print(f"evaluating {settings.final_episodes} episodes on seeds that training never used", flush=True)
        episodes = self.team.evaluate(settings.final_episodes, TEST_SEED, settings.deterministic)
        name = checkpoint.name if checkpoint else ""
        record = write_record(self.run_dir, self.team, episodes, TEST_SEED, settings.deterministic, name)
        self.results.append(describe(record))
        before = self.run_dir / BEFORE
        if before.exists() and self.team.spec.has_success:
            self.results.append(compare(json.loads(before.read_text()), record))
        shown = {f"final/{key}": value for key, value in record.items() if isinstance(value, int | float)}
        self.tracker.summary(shown)
        rows = [list(episode.values()) for episode in record["episodes"]]
        self.tracker.table(self.iteration, "final/episodes", list(record["episodes"][0]), rows)
        paths, why_none = record_videos(
            self.team, episodes, settings.videos, self.run_dir, self.tracker, self.iteration
        )
        self.results += [f"no videos: {why_none}"] if why_none else []
        self.videos = paths
        self.checkpoint = checkpoint

    def write_trace(self) -> None:
        """Write the timeline of the newest iterations."""
        write_chrome_trace(self.events, self.run_dir / "trace.json")


Start = Callable[[Any, Path, Tracker, Cluster, Profile], Training]


def _refuse_success_settings(config: Config) -> None:
    """An env without a success test cannot serve settings that need one. Raises EnvError."""
    algorithm = config.algorithm
    needs = {
        "train.stop_at_success": config.train.stop_at_success is not None,
        "env.success=at_end": config.env.success == "at_end",
        "algorithm.group_score=success": algorithm.name == "grpo" and algorithm.group_score == "success",
        "algorithm.filter_low and filter_high": (algorithm.filter_low, algorithm.filter_high) != (None, None),
    }
    if wrong := [key for key, is_set in needs.items() if is_set]:
        raise EnvError(f"{config.env.id} has no success test, which {' and '.join(wrong)} need; leave that out")


def _lock(run_dir: Path) -> Any:
    """Claim a run directory for this process's life; None if another run holds it."""
    lock = (run_dir / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return lock


def _print_results(run_dir: Path, tracker: Tracker, training: Training) -> None:
    report = write_report(run_dir)
    lines: list[tuple[str, Any]] = [("report", report), ("checkpoint", training.checkpoint)]
    lines += [("video", path) for path in training.videos]
    if tracker.wandb_location:
        lines.append(("W&B run", tracker.wandb_location))
    print()
    for result in training.results:
        print(result)
    for label, value in lines:
        print(f"{label:<12}{value}")
