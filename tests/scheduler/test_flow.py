"""The macro flow: how it is written down, and what is wrong with a wrong one."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from scheduler.flow import Flow, FlowError


def embodied_ppo() -> Flow:
    """PPO on robots, written down: this is all there is to it."""
    flow = Flow("ppo")
    states = flow.source("init_states")
    trajectories = flow.loop("env.chunk_step", "rollout.act", states, steps=80, items=64)
    advantages = flow.stage("actor.advantages", trajectories, gather=True)
    flow.stage("actor.update", advantages, gather=True)
    return flow.validate()


def test_embodied_ppo_is_two_stages_and_a_loop_in_order() -> None:
    flow = embodied_ppo()
    assert [node.name for node in flow.nodes] == [
        "init_states",
        "env.chunk_step <> rollout.act",
        "actor.advantages",
        "actor.update",
    ]
    assert flow.groups() == ["env", "rollout", "actor"]
    assert list(flow.calls()) == ["env.chunk_step", "rollout.act", "actor.advantages", "actor.update"]


def test_a_flow_prints_its_graph() -> None:
    assert str(embodied_ppo()).splitlines() == [
        "flow ppo",
        "  source init_states",
        "  loop env.chunk_step <> rollout.act <- init_states (80 steps, 64 items)",
        "  stage actor.advantages <- env.chunk_step <> rollout.act (gather)",
        "  stage actor.update <- actor.advantages (gather)",
    ]


def test_worker_methods_are_stages() -> None:
    class Reward:
        def score(self) -> None: ...

    group = SimpleNamespace(name="reward", _worker_class=Reward)
    flow = Flow("rewards")
    flow.stage(SimpleNamespace(group=group, name="score"), flow.source("samples"))
    assert flow.calls()["reward.score"].handle.group is group
    with pytest.raises(FlowError, match="unknown method 'scored': the workers of group 'reward' are Reward"):
        flow.stage(SimpleNamespace(group=group, name="scored"), flow.source("more"))


@pytest.mark.parametrize("method", ["score", "reward.score.all", "", print, 3])
def test_what_is_no_method_is_refused_by_name(method: object) -> None:
    flow = Flow("rewards")
    with pytest.raises(FlowError, match="not a (stage|worker method)") as error:
        flow.stage(method, flow.source("samples"))  # type: ignore[arg-type]
    assert str(method) in str(error.value)


def test_a_stage_without_input_is_refused() -> None:
    with pytest.raises(FlowError, match="stage 'reward.score' has no input"):
        Flow("rewards").stage("reward.score")


def test_a_name_is_used_once() -> None:
    flow = embodied_ppo()
    with pytest.raises(FlowError, match="'rollout.act' is in flow 'ppo' already"):
        flow.stage("rollout.act", flow.nodes[0])
    flow.stage("rollout.act", flow.nodes[0], name="rollout.values")
    with pytest.raises(FlowError, match="'init_states' is in flow 'ppo' already"):
        flow.source("init_states")


def test_stages_of_another_flow_are_refused() -> None:
    other = Flow("other").source("prompts")
    with pytest.raises(FlowError, match="'prompts', an input of 'reward.score', belongs to flow 'other'"):
        Flow("mine").stage("reward.score", other)


def test_a_cycle_outside_a_loop_is_named() -> None:
    flow = Flow("cyclic")
    first = flow.stage("a.run", flow.source("items"))
    second = flow.stage("b.run", first)
    third = flow.stage("c.run", second)
    with pytest.raises(FlowError, match="cycle: a.run -> b.run -> c.run -> a.run"):
        flow.connect(third, first)
    flow.validate()
    flow.connect(first, third)
    assert [node.name for node in third.inputs] == ["b.run", "a.run"]


def test_all_faults_are_reported_together() -> None:
    flow = Flow("faulty")
    flow.source("unused")
    stage = flow.stage("a.run", flow.source("items"))
    stage.inputs.clear()
    with pytest.raises(FlowError) as error:
        flow.validate()
    for fault in ("source 'unused' feeds no stage", "source 'items' feeds no stage", "stage 'a.run' has no input"):
        assert fault in str(error.value)


def test_an_edge_added_later_orders_the_stages() -> None:
    flow = Flow("later")
    items = flow.source("items")
    late, early = flow.stage("late.run", items), flow.stage("early.run", items)
    flow.connect(early, late)
    assert [node.name for node in flow.stages()] == ["early.run", "late.run"]


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 2, "items": 0}, {"steps": 2, "granularity": -1}])
def test_counts_are_positive(wrong: dict[str, int]) -> None:
    with pytest.raises(FlowError, match="is not a positive number"):
        Flow("loop").loop("env.step", "policy.act", **wrong)  # type: ignore[arg-type]


def test_planning_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, scheduler.flow, scheduler.profile, scheduler.plan, scheduler.simulate; "
        "print([name for name in ('ray', 'torch') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
