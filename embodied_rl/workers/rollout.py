"""RolloutWorker: policy inference on streamed observations; gathers each stream's trajectories for the actor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.build import build_policy
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.config import Config
from embodied_rl.data import Observed, Trajectories
from envs.base import ChunkResult, EnvSpec, Observation
from policies import Policy, PolicyOutput, SlotNoise
from scheduler.stage import Link
from scheduler.worker import Worker

Decided = tuple[dict[str, Tensor], dict[str, Tensor]]  # an encoded observation, and the parts of an output


class RolloutWorker(Worker):
    """Serves the streams whose number falls to its rank."""

    policy: Policy
    blank: Decided  # the last one, whose shapes one without an active env has

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.device = torch.device("cuda" if self.context.device_kind == "gpu" else "cpu")
        self.policy_calls = 0
        self.has_critic = config.algorithm.name == "ppo"

    def build(self, spec: EnvSpec) -> None:
        """Build the policy for the envs."""
        self.spec = spec
        self.policy = build_policy(self.config, spec).to(self.device).eval()

    def load_checkpoint(self, checkpoint: Path) -> None:
        """Take the parameters of a checkpoint."""
        self.policy.load_learned_state(load_checkpoint(checkpoint).parts["policy"])

    def load_weights(self, weights: list[dict[str, Tensor]]) -> None:
        """Take the newest parameters from the actor."""
        self.policy.load_learned_state(weights[-1])

    def offload(self) -> None:
        self.policy.to("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self.policy.to(self.device)

    def state(self) -> dict[str, Any]:
        return {"spec": self.spec, "policy": self.policy.learned_state()}

    def restore(self, states: list[Any]) -> None:
        self.build(states[0]["spec"])
        self.policy.load_learned_state(states[0]["policy"])

    def generate(self, link: Link) -> int:
        """Serve this rank's streams through one rollout and pass their trajectories on.

        Returns the number of policy calls.
        """
        open_streams: dict[int, _Recorder] = {}
        steps, finished, calls = link.steps, 0, self.policy_calls
        while finished < link.streams:
            stream, message = link.next()
            recorder = open_streams.setdefault(stream, _Recorder(message, steps, self.config.env.score))
            with link.call(len(message.slots)):
                observation, output = self._prepare(message.observation), None
                if message.step < steps:
                    observation, output = self._act(observation, message, deterministic=False)
                if message.outcome is not None:
                    value = self._value(observation) if output is None else _first(output.value)
                    recorder.outcome(message.step - 1, message.outcome, value, self._final_values(message.outcome))
                if output is not None:
                    recorder.decision(message.step, observation, output)
                    link.reply(stream, output.action.cpu().numpy())
            if message.step == steps:
                link.emit(stream, open_streams.pop(stream).finish())
                finished += 1
        return self.policy_calls - calls

    def serve(self, link: Link, deterministic: bool) -> None:
        """Answer observations with actions, for an evaluation, until all env workers have said that they are done."""
        with self.policy.at_temperature(self.config.evaluation.temperature):
            self._serve(link, deterministic)

    def _serve(self, link: Link, deterministic: bool) -> None:
        running = link.loop.ranks[0]
        while running:
            stream, message = link.next()
            if message is None:
                running -= 1
                continue
            with link.call(len(message.slots)):
                _, output = self._act(self._prepare(message.observation), message, deterministic)
                link.reply(stream, output.action.cpu().numpy())

    # ------------------------------------------------------------------------------------------ inference

    @torch.no_grad()
    def _act(
        self, observation: dict[str, Any], message: Observed, deterministic: bool
    ) -> tuple[dict[str, Tensor], PolicyOutput]:
        """Decide for the active envs, after encoding what they observe; the others get zeros in both."""
        blocks = self._blocks(message.active)
        decided: list[Decided] = []
        for rows in blocks:
            noise = SlotNoise(self.config.seed, message.slots[rows], message.draws[rows])
            seen = self.policy.encode(_rows(observation, rows))
            self.blank = _tensors(seen), vars(self.policy.act(seen, deterministic, noise))
            self.policy_calls += 1
            decided.append(self.blank)
        rows = np.concatenate([*blocks, []]).astype(int)
        encoded, output = (
            _spread([both[part] for both in decided], rows, len(message.slots), self.blank[part]) for part in (0, 1)
        )
        return encoded, PolicyOutput(**output)

    @torch.no_grad()
    def _value(self, observation: dict[str, Any], active: np.ndarray | None = None) -> Tensor:
        """V(observation) [n]: of the first action, where each has its own; 0 without a critic and where not active."""
        count = len(next(iter(observation.values())))
        values = torch.zeros(count, device=self.device)
        if self.has_critic:
            for rows in self._blocks(np.ones(count, bool) if active is None else active):
                values[rows] = _first(self.policy.value(_rows(observation, rows)))
        return values

    def _final_values(self, outcome: ChunkResult) -> Tensor:
        """V(final observation) of the envs that ended, zero elsewhere."""
        if not self.has_critic or not outcome.ended.any():
            return torch.zeros(len(outcome.ended), device=self.device)
        values = self._value(self._prepare(outcome.final_observation), outcome.ended)
        return torch.where(torch.from_numpy(outcome.ended).to(self.device), values, 0.0)

    def _blocks(self, active: np.ndarray) -> list[np.ndarray]:
        """The rows that are inferred at once. Under `deterministic`, blocks do not depend on which of their rows are
        active."""
        if not self.config.deterministic:
            return [np.flatnonzero(active)] if active.any() else []
        size = self.config.inference_block
        blocks = np.arange(len(active)).reshape(-1, size)
        return list(blocks[active.reshape(-1, size).any(1)])

    def _prepare(self, observation: Observation) -> dict[str, Any]:
        """What the policy needs of an observation, on its device; what is recorded for learning too."""
        tensors = {
            key: torch.as_tensor(value).to(self.device) if isinstance(value, np.ndarray) else value
            for key, value in observation.items()
        }
        return self.policy.prepare(tensors)


def _rows(observation: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    return {
        key: [value[i] for i in rows] if isinstance(value, list) else value[rows] for key, value in observation.items()
    }


def _tensors(observation: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in observation.items() if isinstance(value, Tensor)}


def _spread(parts: list[dict[str, Tensor]], rows: np.ndarray, size: int, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of consecutive `rows` as such of `size` rows, zeros for the others; shapes and types as `like`."""
    whole = {key: value.new_zeros(size, *value.shape[1:]) for key, value in like.items()}
    for key, value in whole.items() if parts else ():
        value[rows] = torch.cat([part[key] for part in parts])
    return whole


def _first(value: Tensor) -> Tensor:
    """Values [n] or [n, C] -> [n]."""
    return value if value.ndim == 1 else value[:, 0]


class _Recorder:
    """Fills one stream's trajectories as its messages come."""

    def __init__(self, first: Observed, steps: int, score: str) -> None:
        self.first, self.steps, self.score = first, steps, score
        self.decisions: list[tuple[dict[str, Tensor], PolicyOutput]] = []
        self.outcomes: list[tuple[ChunkResult, Tensor]] = []

    def decision(self, step: int, observation: dict[str, Tensor], output: PolicyOutput) -> None:
        assert step == len(self.decisions)
        self.decisions.append((observation, output))

    def outcome(self, step: int, result: ChunkResult | None, next_value: Tensor, final_value: Tensor) -> None:
        assert result is not None and step == len(self.outcomes)
        ended = torch.from_numpy(result.ended).to(next_value.device)
        kept = ChunkResult(**{**result.__dict__, "observation": {}, "final_observation": {}})
        self.outcomes.append((kept, torch.where(ended, final_value, next_value)))

    def finish(self) -> Trajectories:
        results = [result for result, _ in self.outcomes]
        outputs = [output for _, output in self.decisions]
        stack = lambda name: torch.stack([getattr(output, name) for output in outputs]).cpu()  # noqa: E731
        numbers = lambda name: torch.from_numpy(np.stack([getattr(result, name) for result in results]))  # noqa: E731
        success = np.zeros((self.steps, len(self.first.slots)), bool)
        column = {int(slot): i for i, slot in enumerate(self.first.slots)}
        for step, result in enumerate(results):
            for episode in result.episodes:
                success[step, column[episode.env_id]] |= getattr(episode, self.score)
        observation = {
            key: torch.stack([kept[key] for kept, _ in self.decisions]).cpu() for key in self.decisions[0][0]
        }
        return Trajectories(
            observation=observation,
            token=stack("token"),
            logprob=stack("logprob"),
            value=stack("value"),
            next_value=torch.stack([value for _, value in self.outcomes]).cpu(),
            reward=numbers("reward"),
            terminated=numbers("terminated"),
            truncated=numbers("truncated"),
            valid=numbers("valid"),
            success=torch.from_numpy(success),
            lost=numbers("lost"),
            env_ids=torch.from_numpy(np.array(self.first.slots)),
        )
