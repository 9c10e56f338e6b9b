"""Loops whose stages share cores: processes overlap there as far as each leaves cores idle."""

from __future__ import annotations

import itertools

import pytest

from scheduler.flow import Flow
from scheduler.plan import Plan, make_plan
from scheduler.plan_tree import loop_seconds
from scheduler.profile import CostModel, Profile, Sample
from scheduler.simulate import simulate

E, P, HOP = 6.0, 2.0, 0.5  # seconds of a call on both cores, and of a round's messages


def flow(pipeline: tuple[int, ...] = ()) -> Flow:
    made = Flow("loop")
    made.loop("env.step", "policy.act", steps=10, items=8, pipeline=pipeline)
    return made


def policy_s(groups: int) -> float:
    return P * (0.25 + 0.75 / groups)


def profile(env_busy: float = 1.0, policy_busy: float = 1.0, hop: float = 0.0) -> Profile:
    """Twice the envs take twice as long; a quarter of the policy's time is the same for any number."""
    known = Profile(hops={"env.step <> policy.act": hop} if hop else {})
    for groups in (1, 2, 4):
        known.add(Sample("env.step", 8 // groups, 2, E / groups, busy=env_busy))
        known.add(Sample("policy.act", 8 // groups, 2, policy_s(groups), busy=policy_busy))
    return known


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_round_takes_the_longest_of_its_bounds(groups: int) -> None:
    e, p = E / groups, policy_s(groups)
    for share, hop in itertools.product((0.0, 0.5, 1.0), (0.0, HOP)):
        contended = share * (e + p)
        bounds = {
            "the first stage": groups * e,
            "the second": groups * p,
            "one group": e + p + hop,
            "the cores": groups * contended,
        }
        rounds = float(loop_seconds(11, groups, e, p, contended, hop) - loop_seconds(10, groups, e, p, contended, hop))
        assert rounds == pytest.approx(max(bounds.values()))


def test_stages_that_fill_their_cores_take_turns() -> None:
    plan = make_plan(flow(), profile(), 2, 8, style="collocated")
    assert plan.loop_groups == {"env.step <> policy.act": 1}
    assert plan.predicted_s == pytest.approx(10 * (E + P))


def test_a_policy_with_one_thread_leaves_a_core_to_the_envs() -> None:
    plan = make_plan(flow(), profile(policy_busy=0.5), 2, 8, style="collocated")
    assert plan.loop_groups == {"env.step <> policy.act": 2}
    rounds = 2 * (E / 2 + policy_s(2) * 0.5)  # the cores are full
    assert plan.predicted_s == pytest.approx(10 * rounds)
    assert plan.predicted_s < 10 * (E + P)
    assert plan.idle_share == pytest.approx(0.0, abs=0.01)


def test_time_on_the_way_is_hidden_by_a_second_group() -> None:
    alone = make_plan(flow((1,)), profile(policy_busy=0.5, hop=HOP), 2, 8)
    assert alone.predicted_s == pytest.approx(9 * (E + P + HOP) + E + P + HOP)
    assert make_plan(flow(), profile(policy_busy=0.5, hop=HOP), 2, 8).predicted_s < alone.predicted_s


def test_only_the_allowed_numbers_of_groups_are_used() -> None:
    for groups in (1, 2, 4):
        plan = make_plan(flow((groups,)), profile(policy_busy=0.5), 2, 8)
        assert plan.loop_groups == {"env.step <> policy.act": groups}
    with pytest.raises(ValueError, match="not a positive number"):
        flow((0,))


def test_devices_in_common_count_even_if_they_are_not_all() -> None:
    known = profile(policy_busy=0.5)
    placed = Plan.from_placement(flow((2,)), {"env": [0, 1], "policy": [1]}, known, 8, 2)
    apart = Plan.from_placement(flow((2,)), {"env": [0], "policy": [1]}, known, 8, 2)
    common = E / 2 + policy_s(2)  # the policy fills the one core that it has
    assert placed.predicted_s == pytest.approx(10 * 2 * common)
    assert apart.predicted_s == pytest.approx(9 * 2 * E + 2 * E + policy_s(2)), "on one core envs take twice as long"


def test_a_stage_needs_no_more_cores_than_it_keeps_busy() -> None:
    one_thread = CostModel.fit([Sample("s", 1, 2, 1.0, busy=0.5), Sample("s", 8, 2, 8.0, busy=0.5)])
    assert float(one_thread.seconds(4, 2)) == pytest.approx(4.0)
    assert float(one_thread.seconds(4, 1)) == pytest.approx(4.0), "one core does as well"
    assert float(one_thread.busy_share(1)) == pytest.approx(1.0)
    both = CostModel.fit([Sample("s", 2, 2, 1.0), Sample("s", 8, 2, 4.0)])
    assert float(both.seconds(8, 1)) == pytest.approx(8.0)
    with pytest.raises(ValueError, match="busy is a share"):
        Sample("s", 1, 1, 1.0, busy=0.0)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("hop", [0.0, HOP])
def test_the_simulation_agrees(groups: int, hop: float) -> None:
    plan = make_plan(flow((groups,)), profile(policy_busy=0.5, hop=hop), 2, 8)
    assert simulate(plan).makespan == pytest.approx(plan.predicted_s, rel=0.03)


def test_a_plan_survives_yaml_and_another_number_of_groups() -> None:
    known = profile(policy_busy=0.5, hop=HOP)
    known.overhead_s = 0.25
    plan = make_plan(flow(), known, 2, 8)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.predicted_s == plan.root.seconds + 0.25
    fewer = plan.with_groups("env.step <> policy.act", 1).repriced(known)
    assert fewer.predicted_s == pytest.approx(make_plan(flow((1,)), known, 2, 8).predicted_s)
