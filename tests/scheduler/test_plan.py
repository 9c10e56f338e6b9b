"""The planner against brute force and cases worked out by hand; memory; plans as text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.flow import Flow
from scheduler.placement import parse_placement
from scheduler.plan import DeviceSet, Plan, PlanError, compare, device_sets, granularities, make_plan
from scheduler.plan_tree import Leaf, PlanNode, Spatial, Temporal, leaves, peak_memory
from scheduler.profile import Profile, ProfileError, Sample
from scheduler.simulate import simulate

GIB = 2**30


def chain(*names: str, gather: tuple[str, ...] = ()) -> Flow:
    flow = Flow("chain")
    node = flow.source("items")
    for name in names:
        node = flow.stage(name, node, gather=name in gather)
    return flow


def profile_of(**seconds_per_item: float) -> Profile:
    """Stages "x.run" that take so long for each item, on one device."""
    profile = Profile()
    for name, each in seconds_per_item.items():
        profile.add(Sample(f"{name}.run", 1, 1, each), Sample(f"{name}.run", 64, 1, 64 * each))
    return profile


# --- brute force ------------------------------------------------------------------------------------------------------

Cost = Callable[[int, int, int], float]  # stage, items, devices


def brute_force(
    count: int, edges: set[tuple[int, int]], gather: set[int], cost: Cost, devices: int, items: int
) -> float:
    """The best of all trees: every cut, device split and granularity, with all (latency, period) pairs that matter."""

    def cuts(nodes: frozenset[int]) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        for size in range(1, len(nodes)):
            for chosen in itertools.combinations(sorted(nodes), size):
                first = frozenset(chosen)
                if not any(v in first and u in nodes - first for u, v in edges):
                    yield first, nodes - first

    def feeds(first: frozenset[int], second: frozenset[int]) -> bool:
        return any(u in first and v in second for u, v in edges)

    @lru_cache(None)
    def best(nodes: frozenset[int], n: int, batch: int) -> float:
        found = [best(nodes, n - 1, batch)] if n > 1 else []
        if len(nodes) == 1:
            (stage,) = nodes
            found.append(float("inf") if stage in gather and batch < items else cost(stage, batch, n))
        for first, second in cuts(nodes):
            found.append(best(first, n, batch) + best(second, n, batch))
            for i in range(1, n):
                halves = best(first, i, batch), best(second, n - i, batch)
                found.append(sum(halves) if feeds(first, second) else max(halves))
        for m in range(1, batch):
            if batch % m == 0:
                found += [latency + (batch // m - 1) * period for latency, period in pipelines(nodes, n, m)]
        return min(found)

    @lru_cache(None)
    def pipelines(nodes: frozenset[int], n: int, m: int) -> list[tuple[float, float]]:
        found = {(best(nodes, n, m),) * 2}
        for first, second in cuts(nodes):
            for i in range(1, n):
                for (l1, p1), (l2, p2) in itertools.product(pipelines(first, i, m), pipelines(second, n - i, m)):
                    found.add((l1 + l2 if feeds(first, second) else max(l1, l2), max(p1, p2)))
        kept: list[tuple[float, float]] = []
        for latency, period in sorted(found):
            if not kept or period < kept[-1][1]:
                kept.append((latency, period))
        return kept

    return best(frozenset(range(count)), devices, items)


SIZES = [(2, 8, 12), (3, 8, 8), (4, 8, 6), (4, 6, 8), (5, 6, 4), (5, 4, 6), (6, 8, 2), (6, 4, 4)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Flow, Profile, set[tuple[int, int]], set[int], int, int]:
    count, devices, items = draw(st.sampled_from(SIZES))
    edges = {pair for pair in itertools.combinations(range(count), 2) if draw(st.integers(0, 9)) < 4}
    gather = {stage for stage in range(count) if draw(st.integers(0, 9)) == 0}
    flow, profile = Flow("random"), Profile()
    source = flow.source("items")
    nodes = []
    for v in range(count):
        inputs = [nodes[u] for u, w in sorted(edges) if w == v] or [source]
        nodes.append(flow.stage(f"g{v}.run", *inputs, gather=v in gather))
        fixed, each = draw(st.integers(0, 8)), draw(st.integers(1, 8))
        serial = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
        for n in {1, 2, devices}:
            for batch in {n, items * n}:
                load = each * batch * (serial + (1 - serial) / n)
                profile.add(Sample(f"g{v}.run", batch, n, fixed + load))
    return flow, profile, edges, gather, devices, items


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_planner_is_never_worse_than_brute_force(
    problem: tuple[Flow, Profile, set[tuple[int, int]], set[int], int, int],
) -> None:
    flow, profile, edges, gather, devices, items = problem
    count = len(flow.stages())

    def cost(stage: int, batch: int, n: int) -> float:
        return float(profile.model(f"g{stage}.run").seconds(batch, n))

    plan = make_plan(flow, profile, devices, items)
    best = brute_force(count, edges, gather, cost, devices, items)
    assert plan.predicted_s <= best * (1 + 1e-9)
    branching = any(sum(u == v for _, u in edges) + sum(u == v for u, _ in edges) > 1 for v in range(count))
    if not branching:  # then the critical path of a tree is the sum of its cuts, and nothing can be better
        assert plan.predicted_s == pytest.approx(best, rel=1e-9)
    check_structure(plan, flow, edges)
    assert simulate(plan).makespan <= plan.predicted_s * (1 + 1e-9)


def check_structure(plan: Plan, flow: Flow, edges: set[tuple[int, int]]) -> None:
    """Every stage runs once, after what it needs; parts of a pipeline are disjoint; gathering stages get everything."""
    order = [leaf.stage for leaf in leaves(plan.root)]
    assert sorted(order) == sorted(node.name for node in flow.stages())
    assert all(order.index(f"g{u}.run") < order.index(f"g{v}.run") for u, v in edges)
    gathering = {node.name for node in flow.stages() if node.gather}
    assert all(leaf.items == plan.items for leaf in leaves(plan.root) if leaf.stage in gathering)

    def walk(node: PlanNode) -> None:
        assert set(node.devices) <= set(range(plan.num_devices))
        if isinstance(node, Leaf):
            return
        if isinstance(node, Spatial):
            used = [device for part in node.parts for device in part.devices]
            assert len(used) == len(set(used))
        for part in node.parts:
            walk(part)

    walk(plan.root)


def all_chain_trees(
    stages: list[str], devices: tuple[int, ...], batch: int, cost: Cost, root: int
) -> Iterator[PlanNode]:
    """Every plan of a chain on exactly these devices or the first of them, written as a tree."""
    if len(stages) == 1:
        for n in range(1, len(devices) + 1):
            seconds = cost(int(stages[0][1]), batch, n)
            yield Leaf(stages[0], batch, devices[:n], seconds, (stages[0],), (stages[0].split(".")[0],), (0,))
    for k in range(1, len(stages)):
        for first in all_chain_trees(stages[:k], devices, batch, cost, root):
            for second in all_chain_trees(stages[k:], devices, batch, cost, root):
                yield Temporal((first, second))
    for parts in range(1, len(stages) + 1):
        for ends in itertools.combinations(range(1, len(stages)), parts - 1):
            pieces = [stages[a:b] for a, b in itertools.pairwise((0, *ends, len(stages)))]
            for cuts in itertools.combinations(range(1, len(devices)), parts - 1):
                sets = [devices[a:b] for a, b in itertools.pairwise((0, *cuts, len(devices)))]
                for m in range(1, batch + (parts > 1)):
                    if batch % m == 0:
                        choices = [
                            list(all_chain_trees(piece, own, m, cost, root))
                            for piece, own in zip(pieces, sets, strict=True)
                        ]
                        depends = tuple((i - 1,) if i else () for i in range(parts))
                        for chosen in itertools.product(*choices):
                            yield Spatial(tuple(chosen), depends, batch, m)


@pytest.mark.parametrize("seed", range(3))
def test_no_simulated_plan_of_a_chain_beats_the_planner(seed: int) -> None:
    each = [(1.0, 2.5, 0.7), (0.4, 3.0, 3.1), (2.0, 2.0, 2.0)][seed]
    fixed = [(2.0, 0.0, 1.0), (0.5, 0.5, 0.1), (0.0, 0.0, 0.0)][seed]
    flow, profile = chain("g0.run", "g1.run", "g2.run"), Profile()
    for v in range(3):
        for batch in (1, 4):
            profile.add(Sample(f"g{v}.run", batch, 1, fixed[v] + each[v] * batch))
        profile.add(Sample(f"g{v}.run", 4, 3, fixed[v] + 3 * each[v]))  # scales badly: pipelines pay

    def cost(stage: int, batch: int, n: int) -> float:
        return float(profile.model(f"g{stage}.run").seconds(batch, n))

    plan = make_plan(flow, profile, 3, 4)
    simulated = min(
        simulate(Plan("chain", 4, device_sets(3), tree)).makespan
        for tree in all_chain_trees(["g0.run", "g1.run", "g2.run"], (0, 1, 2), 4, cost, 4)
    )
    assert plan.predicted_s == pytest.approx(simulated, rel=1e-9)
    assert simulate(plan).makespan == pytest.approx(plan.predicted_s, rel=1e-9)


# --- cases worked out by hand -----------------------------------------------------------------------------------------


def test_two_stages_on_two_devices_become_a_pipeline_when_they_do_not_scale() -> None:
    profile = Profile()
    for n in (1, 2):
        profile.add(*(Sample(name, items, n, float(items)) for name in ("a.run", "b.run") for items in (n, 8)))
    plan = make_plan(chain("a.run", "b.run"), profile, 2, 8)
    assert isinstance(plan.root, Spatial)
    assert plan.stage_devices == {"a.run": (0,), "b.run": (1,)}
    assert plan.granularity == {"a.run": 1, "b.run": 1}
    assert plan.predicted_s == pytest.approx(9.0)  # 8 chunks of 1 s and the last one's second stage
    assert plan.idle_share == pytest.approx(1 - 16 / 18)


def test_stages_that_scale_take_turns() -> None:
    plan = make_plan(chain("a.run", "b.run"), profile_of(a=1.0, b=1.0), 2, 8)
    assert isinstance(plan.root, Temporal)
    assert plan.predicted_s == pytest.approx(8.0)
    assert plan.idle_share == pytest.approx(0.0)


def test_a_gathering_stage_waits_for_everything() -> None:
    flow = chain("a.run", "b.run", "c.run", gather=("c.run",))
    plan = make_plan(flow, profile_of(a=1.0, b=1.0, c=1.0), 3, 6, style="disaggregated")
    assert plan.granularity["c.run"] == 6
    assert plan.predicted_s == pytest.approx(7.0 + 6.0)  # a and b as a pipeline of single items, then c


def test_granularity_is_a_multiple_of_what_the_stage_demands() -> None:
    flow = Flow("multiple")
    flow.stage("b.run", flow.stage("a.run", flow.source("items")), granularity=4)
    plan = make_plan(flow, profile_of(a=1.0, b=1.0), 2, 24, style="disaggregated")
    assert plan.granularity["b.run"] == 4
    assert plan.predicted_s == pytest.approx(4 * 2 + 5 * 4)


def test_independent_branches_run_side_by_side() -> None:
    flow, profile = Flow("branches"), Profile()
    source = flow.source("items")
    flow.stage("a.run", source)
    flow.stage("b.run", source)
    profile.add(*(Sample(f"{name}.run", 4, n, 5.0) for name in "ab" for n in (1, 2)))
    assert make_plan(flow, profile, 2, 4).predicted_s == pytest.approx(5.0)
    assert make_plan(flow, profile, 1, 4).predicted_s == pytest.approx(10.0)


def test_stages_of_one_group_are_on_the_same_devices() -> None:
    flow = Flow("grpo")
    samples = flow.stage("rollout.generate", flow.source("prompts"))
    logprobs = flow.stage("actor.logprob", samples)
    flow.stage("actor.update", logprobs, flow.stage("reward.score", samples), gather=True)
    profile = Profile()
    for name, each in {"rollout.generate": 4.0, "actor.logprob": 1.0, "actor.update": 3.0, "reward.score": 2.0}.items():
        for n, serial in ((1, 1.0), (8, 4.0)):
            profile.add(Sample(name, n, n, each), Sample(name, 16, n, each * 16 / n * serial))
    for devices in (1, 2, 5, 8):
        plan = make_plan(flow, profile, devices, 16)
        assert plan.stage_devices["actor.logprob"] == plan.stage_devices["actor.update"] == plan.placement["actor"]


MANISKILL = {10: (0.8, 0.4), 20: (0.8, 0.6), 30: (0.85, 0.85), 40: (0.85, 1.15)}


def maniskill(steps: int = 80) -> tuple[Flow, Profile]:
    flow = Flow("maniskill")
    flow.loop("env.chunk_step", "rollout.act", steps=steps, items=40)
    profile = Profile()
    for items, (env, policy) in MANISKILL.items():
        profile.add(Sample("env.chunk_step", items, 1, env), Sample("rollout.act", items, 1, policy))
    return flow, profile


def test_the_maniskill_loop_on_four_devices_takes_turns_as_exhaustive_simulation_says() -> None:
    flow, profile = maniskill()

    def simulated(env: range, policy: range, items: int) -> float:
        plan = Plan.from_placement(flow, {"env": env, "rollout": policy}, profile, items)
        return simulate(plan).makespan

    options = {"shared": simulated(range(4), range(4), 40)}
    options |= {f"{n} + {4 - n}": simulated(range(n), range(n, 4), 40) for n in (1, 2, 3)}
    plan = make_plan(flow, profile, 4, 40)
    assert min(options, key=lambda name: options[name]) == "shared"
    assert plan.predicted_s == pytest.approx(min(options.values())) == pytest.approx(80 * (0.8 + 0.4))
    # 2 + 2: S = 1 takes 0.8 + 0.6 a round; S = 2 takes 2 * 0.8, as half the envs are no faster
    assert options["2 + 2"] == pytest.approx(80 * 1.4)


@pytest.mark.parametrize("seconds", [(lambda n: 0.02 * n, lambda n: 0.05 + 0.02 * n), (lambda n: 0.1, lambda n: 0.1)])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_the_groups_of_a_loop_are_searched(seconds: tuple[Callable[[int], float], ...], devices: int) -> None:
    env, policy = seconds
    flow, profile = Flow("loop"), Profile()
    flow.loop("env.step", "policy.act", steps=7)
    for n in (1, 4):
        profile.add(Sample("env.step", 8 * n, n, env(8)), Sample("env.step", n, n, env(1)))
        profile.add(Sample("policy.act", 8 * n, n, policy(8 * n)), Sample("policy.act", n, n, policy(n)))
    e, p = profile.model("env.step").seconds, profile.model("policy.act").seconds
    rounds = [float(e(24, n) + p(24, n)) * 7 for n in range(1, devices + 1)]
    for n, k in itertools.product(range(1, devices), repeat=2):
        if n + k > devices:
            continue
        for s in (1, 2, 3, 4, 6, 8):
            et, pt = float(e(24 / s, n)), float(p(24 / s, k))
            rounds.append(6 * max(s * et, s * pt, et + pt) + max(s * et + pt, et + s * pt))
    plan = make_plan(flow, profile, devices, 24)
    assert plan.predicted_s == pytest.approx(min(rounds))
    assert simulate(plan).makespan == pytest.approx(plan.predicted_s, rel=1e-9)


def test_more_items_than_a_loop_holds_run_in_waves() -> None:
    flow, profile = maniskill(steps=10)
    one, three = make_plan(flow, profile, 4, 40), make_plan(flow, profile, 4, 120)
    assert three.predicted_s == pytest.approx(3 * one.predicted_s)


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_case(**gib: float) -> tuple[Flow, Profile]:
    """A chain of stages that take 8 s each on any devices, hold this much while idle and 1 GiB more while they run."""
    flow, profile = chain(*(f"{name}.run" for name in gib)), Profile()
    for name, held in gib.items():
        profile.add(*(Sample(f"{name}.run", 8, n, 8.0, int((held + 1) * GIB)) for n in (1, 2)))
        profile.add_group(name, int(held * GIB), offload_s=1.0, onload_s=2.0)
    return flow, profile


def test_what_fits_together_stays() -> None:
    flow, profile = memory_case(a=30, b=40)
    plan = make_plan(flow, profile, 1, 8, memory_per_device=71 * GIB)
    assert plan.predicted_s == pytest.approx(16.0)
    assert plan.memory_bytes == {0: 71 * GIB}


def test_what_does_not_fit_together_pays_for_a_switch() -> None:
    flow, profile = memory_case(a=30, b=40)
    plan = make_plan(flow, profile, 1, 8, memory_per_device=70 * GIB)
    assert plan.predicted_s == pytest.approx(16.0 + 2 * 3.0)  # both in and out once an iteration
    assert plan.memory_bytes == {0: 41 * GIB}
    assert simulate(plan).makespan == pytest.approx(plan.predicted_s)


def test_devices_of_their_own_avoid_the_switch() -> None:
    flow, profile = memory_case(a=30, b=40)
    plan = make_plan(flow, profile, 2, 8, memory_per_device=70 * GIB)
    assert plan.placement == {"a": (0,), "b": (1,)}
    assert plan.predicted_s == pytest.approx(16.0)


def test_a_group_that_works_before_and_after_another_may_have_devices_of_its_own() -> None:
    flow, profile = chain("a.make", "b.learn", "a.load"), Profile()
    for stage, each in {"a.make": 3.0, "b.learn": 1.0, "a.load": 0.0}.items():
        for n in (1, 4):
            profile.add(Sample(stage, 8, n, 8 * each / n))
    profile.resident_bytes.update(a=60 * GIB, b=60 * GIB)
    plan = make_plan(flow, profile, 4, 8, memory_per_device=80 * GIB)
    placements = [{"a": range(n), "b": range(n, 4)} for n in (1, 2, 3)]
    by_hand = [Plan.from_placement(flow, placed, profile, 8, 4, 80 * GIB).predicted_s for placed in placements]
    assert plan.placement == {"a": (0, 1), "b": (2, 3)} or plan.placement == {"a": (0, 1, 2), "b": (3,)}
    assert plan.predicted_s == pytest.approx(min(by_hand)) and min(by_hand) < max(by_hand)
    with pytest.raises(PlanError, match="not together"):
        make_plan(flow, profile, 4, 8, memory_per_device=80 * GIB, style="collocated")


def test_only_what_has_to_go_is_swapped() -> None:
    flow, profile = memory_case(a=40, small=1, b=40)
    plan = make_plan(flow, profile, 1, 8, memory_per_device=45 * GIB)
    assert plan.predicted_s == pytest.approx(24.0 + 2 * 3.0)  # a and b; small stays
    assert max(plan.memory_bytes.values()) <= 45 * GIB


def test_a_group_that_cannot_be_offloaded_is_named() -> None:
    flow, profile = memory_case(a=30, b=40)
    del profile.switches["b"]
    with pytest.raises(PlanError, match="idle groups hold a 30.00 GiB, b 40.00 GiB") as error:
        make_plan(flow, profile, 1, 8, memory_per_device=70 * GIB)
    assert "no offload and onload was measured for b" in str(error.value)


def test_a_stage_that_fits_nowhere_is_reported_with_the_numbers() -> None:
    flow, profile = memory_case(a=30, b=90)
    with pytest.raises(PlanError, match=r"b.run needs 91.00 GiB on each of 1 devices for 1 items.*has 80.00 GiB"):
        make_plan(flow, profile, 2, 8, memory_per_device=80 * GIB)


def test_smaller_calls_are_used_when_a_whole_batch_does_not_fit() -> None:
    profile = Profile().add(Sample("a.run", 1, 1, 2.0, 1 * GIB), Sample("a.run", 8, 1, 9.0, 8 * GIB))
    plan = make_plan(chain("a.run"), profile, 1, 8, memory_per_device=4 * GIB)
    assert plan.granularity == {"a.run": 4}
    assert plan.predicted_s == pytest.approx(2 * 5.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 5)), min_size=2, max_size=4), st.data())
def test_swaps_are_never_worse_than_brute_force(stages: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """On one device: every binary tree, each inner node either keeping or swapping its two sides."""
    flow, profile = chain(*(f"g{v}.run" for v in range(len(stages)))), Profile()
    resident = {f"g{v}": held for v, (held, _, _) in enumerate(stages)}
    for v, (held, more, switch) in enumerate(stages):
        profile.add(Sample(f"g{v}.run", 1, 1, 1.0, held + more)).add_group(f"g{v}", held, switch, switch)
    limit = data.draw(st.integers(max(h + m for h, m, _ in stages), sum(h + m for h, m, _ in stages) + 1))

    def trees(first: int, last: int, cycled: bool) -> Iterator[PlanNode]:
        if cycled:
            moved = sum(stages[v][2] for v in range(first, last))
            for node in trees(first, last, False):
                out = tuple(f"g{v}" for v in range(first, last))
                yield replace(node, onload_s=float(moved), offload_s=float(moved), moved=out)
        if last - first == 1:
            if not cycled:
                name, (held, more, _) = f"g{first}", stages[first]
                yield Leaf(f"{name}.run", 1, (0,), 1.0, (f"{name}.run",), (name,), (held + more,))
            return
        for cut in range(first + 1, last):
            for swap in (True,) if cycled else (True, False):
                for pair in itertools.product(trees(first, cut, swap), trees(cut, last, swap)):
                    yield Temporal(pair, swap)

    fitting = [tree for tree in trees(0, len(stages), False) if max(peak_memory(tree, resident).values()) <= limit]
    plan = make_plan(flow, profile, 1, 1, memory_per_device=limit)
    assert plan.predicted_s <= min(tree.seconds for tree in fitting) * (1 + 1e-9)
    assert max(plan.memory_bytes.values()) <= limit


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_plan_respects_memory_and_groups_and_is_a_bound_on_its_simulation(data: st.DataObject) -> None:
    draw = data.draw
    flow, profile = Flow("random"), Profile()
    source, nodes = flow.source("items"), []
    names = st.sampled_from(["g0", "g1", "g2"])
    for v in range(draw(st.integers(1, 4))):
        inputs = [node for node in nodes if draw(st.booleans())] or [source]
        first, second = draw(names), draw(names)
        if draw(st.integers(0, 4)) == 0:
            nodes.append(flow.loop(f"{first}.e{v}", f"{second}.p{v}", *inputs, steps=3, items=4))
        else:
            nodes.append(flow.stage(f"{first}.m{v}", *inputs, granularity=draw(st.sampled_from([1, 2]))))
    held = {group: draw(st.integers(0, 8)) for group in flow.groups()}
    for name, call in flow.calls().items():
        serial, more = draw(st.sampled_from([0.0, 0.3, 1.0])), draw(st.integers(0, 2))
        for n, items in ((1, 1), (1, 8), (4, 4), (4, 32)):
            seconds = 1 + items * (serial + (1 - serial) / n)
            profile.add(Sample(name, items, n, seconds, held[call.group] + more + items // n // 3))
    for group, size in held.items():
        profile.add_group(group, size, draw(st.integers(0, 3)), draw(st.integers(0, 3)))
    limit, devices = draw(st.integers(8, 24)), draw(st.integers(1, 4))
    try:
        plan = make_plan(flow, profile, devices, 8, memory_per_device=limit)
    except PlanError:
        return
    assert max(plan.memory_bytes.values()) <= limit
    for name, call in flow.calls().items():
        assert plan.stage_devices[name] == plan.placement[call.group]
    assert simulate(plan).makespan <= plan.predicted_s * (1 + 1e-9)
    by_hand = Plan.from_placement(flow, plan.placement, profile, 8, devices, limit)
    assert by_hand.predicted_s == pytest.approx(plan.predicted_s)


# --- several kinds of devices -----------------------------------------------------------------------------------------


def test_each_stage_gets_the_kind_it_is_fast_on() -> None:
    flow, profile = Flow("kinds"), Profile()
    flow.loop("env.step", "policy.act", steps=10)
    profile.add(Sample("env.step", 8, 1, 1.0), Sample("policy.act", 8, 1, 1.0))
    sets = [DeviceSet("cpu", 1, speed={"policy.act": 0}), DeviceSet("gpu", 1, speed={"env.step": 0.1})]
    plan = make_plan(flow, profile, sets, 8)
    assert plan.stage_devices == {"env.step": (0,), "policy.act": (1,)}
    assert plan.predicted_s == pytest.approx(10 * 2.0)


def test_memory_differs_by_kind() -> None:
    flow, profile = memory_case(a=30, b=60)
    plan = make_plan(flow, profile, [DeviceSet("small", 1, 40 * GIB), DeviceSet("large", 1, 80 * GIB)], 8)
    assert plan.placement == {"a": (0,), "b": (1,)}


# --- placements by hand, comparison, text -----------------------------------------------------------------------------


def test_a_placement_string_is_predicted() -> None:
    flow, profile = chain("env.run", "rollout.run", "actor.run"), profile_of(env=1.0, rollout=2.0, actor=1.0)
    placement = parse_placement("env: 0; rollout: 1-2; actor: all", 4, ["env", "rollout", "actor"], "gpu")
    plan = Plan.from_placement(flow, placement, profile, items=8, devices=4)
    assert plan.placement == {"env": (0,), "rollout": (1, 2), "actor": (0, 1, 2, 3)}
    # chunks of 2 items: env 2 s, rollout 1 item for each device 2 s: (2 + 2) + 3 * 2; then actor 2 items each
    assert plan.predicted_s == pytest.approx(10.0 + 2.0)
    assert simulate(plan).makespan == pytest.approx(plan.predicted_s)


def test_the_planner_is_as_good_as_any_placement() -> None:
    flow, profile = chain("a.run", "b.run"), Profile()
    for name, each in (("a.run", 1.0), ("b.run", 2.0)):
        profile.add(Sample(name, 1, 1, each), Sample(name, 8, 1, 8 * each), Sample(name, 8, 3, 5 * each))
    subsets = [s for n in (1, 2, 3) for s in itertools.combinations(range(3), n)]
    placed = [Plan.from_placement(flow, {"a": a, "b": b}, profile, 8, devices=3) for a in subsets for b in subsets]
    assert make_plan(flow, profile, 3, 8).predicted_s == pytest.approx(min(plan.predicted_s for plan in placed))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"a": [0]}, "missing worker group 'b'; the groups are a, b"),
        ({"a": [0], "b": [0], "c": [0]}, "unknown worker group 'c'"),
        ({"a": [0], "b": [4]}, "device 4 does not exist; there are 2"),
        ({"a": [0], "b": []}, "worker group 'b' has no devices"),
    ],
)
def test_a_wrong_placement_is_explained(placement: dict[str, list[int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_placement(chain("a.run", "b.run"), placement, profile_of(a=1.0, b=1.0), 4, devices=2)


def test_an_unmeasured_stage_is_named() -> None:
    with pytest.raises(ProfileError, match="no measurement of 'b.run'"):
        make_plan(chain("a.run", "b.run"), profile_of(a=1.0), 1, 1)


def test_compare_shows_the_styles_side_by_side() -> None:
    flow, profile = maniskill()
    table = compare(flow, profile, 4, 40)
    seconds = {style: plan.predicted_s for style, plan in table.plans.items() if isinstance(plan, Plan)}
    assert seconds["best"] <= min(seconds["collocated"], seconds["disaggregated"])
    assert "env, rollout: 0-3" in str(table)
    alone = compare(flow, profile, 1, 40)
    assert isinstance(alone.plans["disaggregated"], PlanError)
    assert "2 groups cannot each have devices of their own" in str(alone)


def ppo() -> tuple[Flow, Profile]:
    flow, profile = maniskill(steps=20)
    flow.stage("actor.update", flow.nodes[0], gather=True)
    profile.add(Sample("actor.update", 40, 1, 30.0, 50 * GIB))
    profile.add_group("actor", 45 * GIB, 1.0, 2.0).add_group("rollout", 40 * GIB, 0.5, 0.5)
    return flow, profile


def test_a_plan_survives_yaml() -> None:
    flow, profile = ppo()
    for plan in (
        make_plan(flow, profile, 4, 40, memory_per_device=80 * GIB),
        make_plan(flow, profile, 4, 40, style="disaggregated"),
        make_plan(flow, profile, [DeviceSet("cpu", 2, speed={"actor.update": 0.5}), ("gpu", 2)], 40),
    ):
        again = Plan.from_yaml(plan.to_yaml())
        assert again == plan
        assert again.predicted_s == plan.predicted_s
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_yaml("a: 1")


def test_a_plan_prints_its_tree_and_its_timeline() -> None:
    flow, profile = ppo()
    plan = make_plan(flow, profile, 4, 40, memory_per_device=80 * GIB, style="collocated")
    lines = str(plan).splitlines()
    assert lines[0].startswith("plan of maniskill: 40 items on 4 device: ")
    assert lines[1].startswith("  in turn, swapping on 0-3: ")
    assert "env.chunk_step <> rollout.act on 0-3 by turns, 20 steps" in lines[2]
    assert lines[3].startswith("    actor.update on 0, 40 items a call: 33 s, of it 3 s to bring in and move out actor")
    picture = plan.gantt(40).splitlines()
    assert picture[0].lstrip().startswith("0 |") and "~" in picture[0] and picture[0].count("C") > 10
    svg = plan.gantt_svg()
    assert svg.startswith("<svg") and "actor.update: " in svg and svg.endswith("</svg>")
    assert plan.__rich__().children


def test_newer_measurements_reprice_the_same_plan() -> None:
    flow, profile = ppo()
    plan = make_plan(flow, profile, 4, 40)
    assert plan.repriced(profile) == plan
    slower = Profile()
    for samples in profile.samples.values():
        slower.add(*(Sample(s.stage, s.items, s.devices, 2 * s.seconds) for s in samples))
    assert plan.repriced(slower).predicted_s == pytest.approx(2 * plan.predicted_s)


def test_granularities_divide_the_items() -> None:
    assert granularities(12) == [1, 2, 3, 4, 6, 12]
    many = granularities(5040)
    assert len(many) <= 12 and many[0] == 1 and many[-1] == 5040 and all(5040 % m == 0 for m in many)
    assert granularities(509) == [1, 509]


def test_a_hundred_devices_and_ten_stages_use_all_devices_well() -> None:
    """Perfectly parallel stages: nothing beats all devices in turn, whatever counts the search samples."""
    names = [f"g{v}.run" for v in range(10)]
    profile = Profile().add(*(Sample(name, n, 1, 0.01 * n) for name in names for n in (1, 4096)))
    assert make_plan(chain(*names), profile, 128, 4096).predicted_s == pytest.approx(10 * 0.32)
