"""The workers of a run under one plan after another: where they are changes nothing that they compute."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.config import Config
from embodied_rl.flows import training_flow
from embodied_rl.team import Team
from scheduler.cluster import Cluster
from scheduler.flow import PlannedGroup
from scheduler.plan import Plan
from scheduler.profile import Profile, Sample

APART = {"env": [0], "rollout": [1], "actor": [1]}
TOGETHER = {"env": [0], "rollout": [0], "actor": [0]}
HYBRID = {"env": [0], "rollout": [1], "actor": [0, 1]}


def config(**changes: Any) -> Config:
    return Config(
        env={"kind": "gymnasium", "id": "CartPole-v1", "num_envs": 8, "processes": 1},
        policy={"hidden": [16]},
        rollout={"steps": 24, **changes.pop("rollout", {})},
        algorithm={"epochs": 2, "minibatches": 2, **changes.pop("algorithm", {})},
        cluster={"cpu_slots": 2, "timeout_s": 60},
        **changes,
    )


def known(flow_items: int) -> Profile:
    names = ("env.rollout", "rollout.generate", "actor.update", "rollout.load_weights")
    return Profile().add(*(Sample(name, flow_items, 1, 0.01) for name in names))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(cpu_slots=2, timeout_s=60) as started:
        yield started


def parameters_after(
    cluster: Cluster, settings: Config, placements: list[dict[str, list[int]] | None], cuts: list[int]
) -> Tensor:
    """Two iterations under each placement (None: as started), the envs cut into so many groups."""
    team = Team(settings, cluster)
    team.sync_weights()
    executor = team.schedule.executor
    for placement, groups in zip(placements, cuts, strict=True):
        if placement is not None:
            plan = Plan.from_placement(executor.flow, placement, known(settings.env.num_envs), 8, 2)
            executor.apply(plan)
            assert executor.placement == {name: tuple(devices) for name, devices in placement.items()}
        executor.cut({"env.rollout <> rollout.generate": groups}, {})
        for _ in range(2):
            executor.iterate()
    (weights,) = team._weights.groups["actor"].weights([]).result()[0]
    team.close()
    cluster.end(list(team.groups.values()))
    return torch.cat([weights[name].flatten().double() for name in sorted(weights)])


def test_collocated_disaggregated_hybrid_and_replanned_runs_are_the_same(cluster: Cluster) -> None:
    settings = config(rollout={"pipeline_stages": 2})
    same = parameters_after(cluster, settings, [None] * 3, [2] * 3)
    replanned = parameters_after(cluster, settings, [APART, TOGETHER, HYBRID], [2] * 3)
    assert torch.equal(same, replanned)


def test_so_is_a_run_cut_into_other_groups_on_the_way_if_it_infers_in_blocks(cluster: Cluster) -> None:
    settings = config(rollout={"pipeline_stages": "auto"}, deterministic=True, inference_block=2)
    assert settings.pipeline_choices == (1, 2, 4)
    same = parameters_after(cluster, settings, [None] * 3, [1] * 3)
    assert torch.equal(same, parameters_after(cluster, settings, [None, APART, None], [4, 1, 2]))


def test_grpo_is_never_cut_inside_a_group() -> None:
    settings = config(
        rollout={"pipeline_stages": "auto", "steps": 500},
        algorithm={"name": "grpo", "group_size": 4},
        deterministic=True,
    )
    assert settings.pipeline_choices == (1, 2)
    (loop, *_) = training_flow(settings, *map(PlannedGroup, ("env", "rollout", "actor"))).stages()
    assert (loop.granularity, loop.pipeline, loop.steps) == (4, (1, 2), 500)


@pytest.mark.parametrize(("stages", "can_run"), [(1, False), (2, True)])
def test_a_plan_must_leave_every_actor_worker_a_pipeline_group(stages: int, can_run: bool) -> None:
    settings = config(rollout={"pipeline_stages": stages})
    flow = training_flow(settings, *(PlannedGroup(name) for name in ("env", "rollout", "actor")))
    plan = Plan.from_placement(flow, HYBRID, known(8), 8, 2)
    team: Any = SimpleNamespace(config=settings, env=SimpleNamespace(cluster=SimpleNamespace(kind="gpu")))
    assert Team._can_run(team, plan) is can_run
