"""The workers of a reasoning run that do not learn: the sampler, which writes completions, and the judge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reasoning.config import MathConfig
from reasoning.engine import make_engine
from reasoning.generate import Request
from reasoning.models import encode, load_tokenizer
from reasoning.rewards import Rewarder
from reasoning.samples import Group, Prompt, Sampling
from scheduler.worker import Worker


def use_cores(worker: Worker) -> torch.device:
    """Let torch use this rank's devices and no others; returns the device of its tensors."""
    if worker.context.device_kind == "gpu":
        return torch.device("cuda")
    torch.set_num_threads(len(worker.devices))
    return torch.device("cpu")


class Sampler(Worker):
    """Holds a copy of the model that learns, and samples from it."""

    def __init__(self, config: MathConfig) -> None:
        self.config, device = config, use_cores(self)
        self.tokenizer = load_tokenizer(config.model.path)
        self.engine = make_engine(config, self.tokenizer.eos_token_id, device)
        self.version = 0

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[tuple[int, Group]]:
        """The group of each prompt, as soon as its completions have ended."""
        requests = [
            Request(
                encode(self.tokenizer, prompt.problem),
                [_seed(self.config.seed, prompt.number, place) for place in range(sampling.count)],
            )
            for prompt in prompts
        ]
        for position, completions in self.engine.generate(requests, sampling):
            for completion in completions:
                ids = completion.ids[:-1] if completion.finished else completion.ids
                completion.text = self.tokenizer.decode(ids, skip_special_tokens=True)
            yield position, Group(prompts[position], requests[position].ids, completions, self.version)

    def load_weights(self, weights: list[dict[str, Tensor]]) -> None:
        """Take the parameters that the actor has learned in this iteration."""
        self.engine.load(weights[0])
        self.version = self.iteration + 1

    def offload(self) -> None:
        self.engine.offload()

    def onload(self) -> None:
        self.engine.onload()

    def state(self) -> Any:
        return {"weights": self.engine.weights(), "version": self.version}

    def restore(self, states: list[Any]) -> None:
        self.engine.load(states[0]["weights"])
        self.version = states[0]["version"]


class Judge(Worker):
    """Rewards completions."""

    def __init__(self, config: MathConfig) -> None:
        self.rewarder = Rewarder(config.reward, config.sampling.max_new_tokens)
        self.rewarder.verifier.start()

    def score(self, groups: list[Group]) -> Iterator[tuple[int, Group]]:
        """The same groups with their rewards."""
        for position, group in enumerate(groups):
            yield position, self.rewarder.reward(group)

    def verdicts(self) -> dict[str, int]:
        """How many answers were right, wrong and undecided, and how many comparisons were stopped, so far."""
        return dict(vars(self.rewarder.verifier.counts))

    def shutdown(self) -> None:
        self.rewarder.verifier.close()


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
