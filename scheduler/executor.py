"""Runs iterations of a flow as a plan says: calls the stages, moves the items between them, and moves the workers.

    executor = Executor(flow, items=512, plan=plan)
    iteration = executor.iterate({"prompts": prompts})

All stages of an iteration are called at once; data decides who works when. A stage that has devices to itself starts
with the first items that it gets (elastic pipelining). One that shares devices with others takes a lease on them for
every call, so that stages in turn really take turns. The stages of a loop share cores more finely than that: the
system divides them, and the planner reckons with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.channel import ChannelClosed
from scheduler.cluster import Cluster
from scheduler.flow import Call, Flow, FlowError, Node
from scheduler.placement import GroupPlacement, parse_placement
from scheduler.plan import Plan
from scheduler.plan_tree import moved_groups
from scheduler.profile import Sample
from scheduler.stage import Edge, LoopCall, Message, StageCall, StageReport
from scheduler.worker import Handle, WorkerFailed, WorkerGroup, wait_all


@dataclass
class Iteration:
    """What one iteration gave.

    Attributes:
        outputs: by stage that nobody consumes: its items in their order.
        reports: by worker method ("group.method"): what each rank told the driver.
        start, end: `time.monotonic` seconds.
        samples, hops: measurements, to be added to a profile.
        overhead_s: seconds before the first worker began and after the last had finished, and on a CPU what this
            process takes from the cores meanwhile (in a flow with a loop that is part of the loop's costs).
    """

    number: int
    start: float
    end: float = 0.0
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    reports: dict[str, list[Any]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    hops: dict[str, float] = field(default_factory=dict)
    overhead_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Executor:
    """Runs iterations of a flow on started worker groups.

    Args:
        flow: its stages are methods of started groups.
        items: of one iteration.
        plan: None: groups stay where they are, stages take single items (or all if they gather), and each loop is cut
            into the first of its allowed numbers of groups; see `cut`.
        timeout_s: longest wait for a worker in one iteration; None: the cluster's.
        number: of the next iteration.

    Raises FlowError for a stage without a worker.
    """

    def __init__(
        self,
        flow: Flow,
        items: int,
        plan: Plan | None = None,
        timeout_s: float | None = None,
        number: int = 0,
    ) -> None:
        self.flow, self.items, self.number = flow.validate(), items, number
        self.groups: dict[str, WorkerGroup] = {}
        for call in flow.calls().values():
            if call.handle is None:
                raise FlowError(f"'{call.name}' has no worker; declare the stage as a method of a started group")
            self.groups[call.group] = call.handle.group
        self.cluster: Cluster = next(iter(self.groups.values())).cluster
        self.timeout_s = self.cluster.timeout_s if timeout_s is None else timeout_s
        self.plan: Plan | None = None
        self.loop_groups = {node.name: (node.pipeline or (1,))[0] for node in flow.stages() if node.kind == "loop"}
        self.granularity = {node.name: node.granularity for node in flow.stages()}
        self._edges: dict[tuple[str, str], Edge] = {}
        self._calls: dict[str, StageCall] = {}
        if plan is not None:
            self.apply(plan)
        else:
            self._connect()

    # ------------------------------------------------------------------------------------------ the plan

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        """The devices of each group."""
        return {name: group.placement.devices for name, group in self.groups.items()}

    def moves(self, plan: Plan) -> dict[str, GroupPlacement]:
        """The groups that a plan would move, and where to. Who has the devices already keeps the ranks that it has."""
        wanted = parse_placement(
            plan.placement_text, len(self.cluster.devices), list(plan.placement), self.cluster.kind
        )
        return {name: place for name, place in wanted.items() if place.devices != self.placement[name]}

    def apply(self, plan: Plan) -> float:
        """Move groups to where the plan has them, and run under it from the next iteration on.

        Workers that move start anew where they are wanted and take their predecessors' state. Returns the seconds.
        """
        start = time.monotonic()
        for name, placement in self.moves(plan).items():
            self.cluster.relocate(self.groups[name], placement)
        self.plan = plan
        self.loop_groups |= plan.loop_groups
        self.granularity |= plan.granularity
        self._connect()
        return time.monotonic() - start

    def cut(self, loop_groups: Mapping[str, int], granularity: Mapping[str, int]) -> None:
        """Without a plan: set the pipeline groups S of loops and the items in each call of stages, to measure them."""
        self.plan = None
        self.loop_groups |= loop_groups
        self.granularity |= granularity
        self._connect()

    def _connect(self) -> None:
        """Make the channels and the calls of every iteration under the present plan and placement."""
        nodes = self.flow.nodes
        self._locations = {name: group.locations for name, group in self.groups.items()}
        self._edges = {(a.name, b.name): self._edge(a, b) for b in nodes for a in b.inputs}
        self._calls = {}
        swapped = moved_groups(self.plan.root) if self.plan else set()
        for node in nodes:
            loop = self._loop(node) if node.kind == "loop" else None
            for name, call in self._named(node):
                self._calls[name] = StageCall(
                    name=name,
                    method=call.method,
                    inputs=tuple(self._edges[producer.name, node.name] for producer in node.inputs),
                    outputs=tuple(edge for (producer, _), edge in self._edges.items() if producer == node.name),
                    granularity=self.granularity.get(name, 1),
                    gather=node.gather,
                    loop=loop,
                    shares=self._shares(node),
                    keeps=call.group not in swapped,
                )

    def _edge(self, producer: Node, consumer: Node) -> Edge:
        """Holds all items of an iteration, as a gathering stage must: a full edge could stop whoever has the lease."""
        consumers = self._group(consumer.calls[0])
        makers = self._group(producer.calls[-1]) if producer.calls else None
        name = f"{self.flow.name}: {producer.name} -> {consumer.name}"
        channel = self.cluster.channel(name, self.items + len(consumers), makers, consumers)
        by_index = consumer.gather or len(consumer.inputs) > 1
        most = -(-self.granularity.get(consumer.name, 1) // len(consumers))
        return Edge(channel, len(consumers), by_index, most, consumer.broadcast)

    def _loop(self, node: Node) -> LoopCall:
        first, second = (self._group(call) for call in node.calls)
        groups = self.loop_groups[node.name]
        capacity = max(4, 2 * groups * len(first))
        there = self.cluster.channel(f"{self.flow.name}: {node.name}", capacity, first, second)
        back = self.cluster.channel(f"{self.flow.name}: {node.name}, answers", capacity, second, first)
        return LoopCall(there, back, node.steps, groups, (len(first), len(second)), self.items)

    def _shares(self, node: Node) -> bool:
        """Whether others use a node's devices as well; the stages of a loop share cores without taking turns."""
        own = {device for call in node.calls for device in self.placement[call.group]}
        others = [name for name in self.groups if name not in node.groups]
        if node.kind == "loop":
            if self.cluster.kind == "cpu":
                return False
            others = list(self.groups) if len(node.groups) > 1 else others
        return any(own & set(self.placement[name]) for name in others)

    def _group(self, call: Call) -> WorkerGroup:
        return self.groups[call.group]

    @staticmethod
    def _named(node: Node) -> list[tuple[str, Call]]:
        return [(node.name if node.kind == "stage" else call.name, call) for call in node.calls]

    # ------------------------------------------------------------------------------------------ an iteration

    def iterate(
        self,
        sources: Mapping[str, Sequence[Any]] | None = None,
        arguments: Mapping[str, tuple[Any, ...]] | None = None,
    ) -> Iteration:
        """Run one iteration.

        Args:
            sources: the items of each source.
            arguments: by worker method: what it is called with after its items (or its link).

        Raises the first cause of a failure (WorkerFailed, WorkerDied), TimeoutError, or FlowError for sources that are
        not those of the flow.
        """
        if self._locations != {name: group.locations for name, group in self.groups.items()}:
            self._connect()  # another flow has moved a group
        sources = dict(sources or {})
        named = [node.name for node in self.flow.nodes if node.kind == "source"]
        if set(sources) != set(named):
            raise FlowError(f"flow '{self.flow.name}' has the sources {named}, and items came for {sorted(sources)}")
        done, own_cpu_s = Iteration(self.number, time.monotonic()), time.process_time()
        handles: dict[str, Handle] = {}
        for name, call in self._calls.items():
            group = self.groups[self.flow.calls()[name].group]
            handles[name] = group.run_stage(call, self.number, (arguments or {}).get(name, ()))
        refused = self._feed(sources)
        producers = {name: node for node in self.flow.stages() for name, _ in self._named(node)[-1:]}
        ends = {handles[name]: self._edges_from(node.name) for name, node in producers.items()}

        def end_edges(handle: Handle) -> None:
            for edge in ends.get(handle, ()):
                edge.end()

        wait_all(list(handles.values()), self.timeout_s, end_edges)
        if refused is not None:
            raise refused
        ranks = {name: handle.result() for name, handle in handles.items()}
        own_cpu_s = time.process_time() - own_cpu_s
        for node in self.flow.stages():
            for name, _ in self._named(node):
                self._collect(done, node, name, ranks[name])
                if node.kind == "loop" and name == node.calls[1].name and self.cluster.kind == "cpu":
                    self._charge(done, node, name, own_cpu_s)
        done.end = time.monotonic()
        reports = [report for group in ranks.values() for report in group]
        working = max(report.end for report in reports) - min(report.start for report in reports)
        done.overhead_s = max(0.0, done.seconds - working)
        if self.cluster.kind == "cpu" and not self.loop_groups:  # it works on the same cores, for every message
            done.overhead_s += own_cpu_s / len(self.cluster.devices)
        self.number += 1
        return done

    def _feed(self, sources: Mapping[str, Sequence[Any]]) -> Exception | None:
        """Send the items of the sources; why they were not taken, if so: whoever was to take them knows the cause."""
        try:
            for name, items in sources.items():
                for edge in self._edges_from(name):
                    edge.put([Message(number, 1, item) for number, item in enumerate(items)])
                    edge.end()
        except (ChannelClosed, WorkerFailed) as error:
            return error
        return None

    def _charge(self, done: Iteration, node: Node, name: str, cpu_s: float) -> None:
        """What this process does for a loop's messages keeps cores busy too; it is put down to the second stage."""
        each = cpu_s / (node.steps * self.loop_groups[node.name] * len(self._group(node.calls[0])))
        done.samples = [
            replace(sample, busy=min(1.0, sample.busy + each / (sample.seconds * sample.devices)))
            if sample.stage == name
            else sample
            for sample in done.samples
        ]

    def _edges_from(self, producer: str) -> list[Edge]:
        return [edge for (name, _), edge in self._edges.items() if name == producer]

    @staticmethod
    def _collect(done: Iteration, node: Node, name: str, ranks: list[StageReport]) -> None:
        done.reports[name] = [rank.report for rank in ranks]
        done.samples += [sample for rank in ranks for sample in rank.samples]
        results = sorted((result for rank in ranks for result in rank.results), key=lambda result: result[0])
        if results:
            done.outputs[node.name] = [item for _, item in results]
        hops = [rank.hop_s for rank in ranks if rank.hop_s is not None]
        if hops:  # of one side; both together are the way there and back
            done.hops[node.name] = done.hops.get(node.name, 0.0) + sum(hops) / len(hops)
