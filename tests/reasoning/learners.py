"""An actor without its process, and groups to learn from."""

from __future__ import annotations

import torch

from reasoning.actor import LanguageActor
from reasoning.config import MathConfig, with_preset
from reasoning.data import Problem
from reasoning.models import LanguageModel
from reasoning.samples import Completion, Group, Prompt

Texts = list[tuple[list[int], list[list[int]]]]


def learner(name: str, model: LanguageModel, **algorithm: object) -> LanguageActor:
    """An actor without its process: rank 0 of 1."""
    values = {"name": name, **algorithm}
    content = {"algorithm": values, "sampling": {"max_new_tokens": 9, "prompts": 2}}
    config = with_preset(MathConfig.model_validate(content))
    actor = LanguageActor.__new__(LanguageActor)
    actor.config, actor.policy, actor.device, actor.reference_model = config, model, torch.device("cpu"), None
    actor.context = type("Context", (), {"rank": 0, "world_size": 1})()  # type: ignore[assignment]
    actor.generator = torch.Generator().manual_seed(0)
    actor.optimizer, actor.iteration = actor._new_optimizer(config.algorithm.lr), 0
    actor.waiting, actor.accumulated, actor.warms_up = [], None, False
    actor.has_learned = True  # log-probs of `scored` are not the model's
    return actor


def scored(groups: Texts) -> list[Group]:
    """Groups with rewards and log-probs that differ from the model's."""
    draw = torch.Generator().manual_seed(len(groups))
    found = []
    for number, (prompt, answers) in enumerate(groups):
        completions = []
        for ids in answers:
            reward = float(torch.rand((), generator=draw))
            noise = (-3.5 + 0.2 * torch.randn(len(ids), generator=draw)).tolist()
            completions.append(Completion(ids, noise, True, "", {"accuracy": reward}, reward))
        found.append(Group(Prompt(Problem(str(number), "", "1"), number), prompt, completions))
    return found
