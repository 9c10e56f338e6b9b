"""The macro flow: which worker methods run on whose output. Says nothing of devices, time or batch sizes.

    flow = Flow("grpo")
    prompts = flow.source("prompts")
    samples = flow.stage(rollout.generate, prompts)
    scored = flow.stage(reward.score, samples)
    flow.stage(actor.update, scored, gather=True)

A stage is a method of a worker group, or, for planning without workers, a name such as "reward.score". Items (prompts,
trajectories) pass along the edges. A `loop` is a pair of stages that call each other, env and policy; the planner sees
it as one node. How a flow is run is the business of `plan.py` and `execute.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class FlowError(ValueError):
    """A flow that cannot be run; the message names every stage at fault."""


class Named(Protocol):
    """A worker group, as far as a flow knows it."""

    @property
    def name(self) -> str: ...


class Method(Protocol):
    """A method of a worker group (`scheduler.worker.GroupMethod`), as far as a flow knows it."""

    @property
    def group(self) -> Any: ...

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class PlannedGroup:
    """Stands for a worker group that has not been started: flows can be declared with it and planned, but not run."""

    name: str

    def __getattr__(self, method: str) -> str:
        if method.startswith("_"):
            raise AttributeError(method)
        return f"{self.name}.{method}"


@dataclass(frozen=True)
class Call:
    """One worker method: the group that has it, its name, and the handle that calls it (None if planned by name)."""

    group: str
    method: str
    handle: Any = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        return f"{self.group}.{self.method}"

    @classmethod
    def of(cls, method: Method | str) -> Call:
        """Raises FlowError unless `method` is a method of a worker group or reads "group.method"."""
        if isinstance(method, str):
            if not re.fullmatch(r"\w[\w-]*\.\w+", method):
                raise FlowError(f"'{method}' is not a stage; expected a worker method or a name like 'reward.score'")
            return cls(*method.split("."))
        group, name = getattr(method, "group", None), getattr(method, "name", None)
        if not isinstance(name, str) or not isinstance(getattr(group, "name", None), str):
            raise FlowError(f"{method!r} is not a worker method; expected for example actor.update (without brackets)")
        assert group is not None
        worker = getattr(group, "_worker_class", None)
        if worker is not None and not callable(getattr(worker, name, None)):
            raise FlowError(f"unknown method '{name}': the workers of group '{group.name}' are {worker.__name__}")
        return cls(group.name, name, method)


@dataclass(eq=False)
class Node:
    """A source, a stage or a loop of one flow; what `Flow.stage` takes as input and returns.

    Attributes:
        calls: none for a source, one for a stage, (first, second) for a loop.
        gather: runs once in an iteration, on all its items.
        broadcast: every rank gets all items.
        granularity: the number of items of one call is a multiple of this.
        steps: rounds of a loop in which each item takes part.
        items: the most items (envs) that a loop holds at once; None: any number.
        pipeline: numbers of groups S that a loop may be cut into; empty: what is fastest.
    """

    flow: Flow = field(repr=False)
    name: str
    kind: Literal["source", "stage", "loop"]
    calls: tuple[Call, ...] = ()
    inputs: list[Node] = field(default_factory=list, repr=False)
    gather: bool = False
    granularity: int = 1
    steps: int = 1
    items: int | None = None
    pipeline: tuple[int, ...] = ()
    broadcast: bool = False

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(call.group for call in self.calls))

    def __str__(self) -> str:
        extras = [f"granularity {self.granularity}"] if self.granularity > 1 else []
        if self.kind == "loop":
            extras = [f"{self.steps} steps", *([f"{self.items} items"] if self.items else []), *extras]
        extras += ["gather"] if self.gather else []
        origin = f" <- {', '.join(node.name for node in self.inputs)}" if self.inputs else ""
        return f"{self.kind} {self.name}{origin}" + (f" ({', '.join(extras)})" if extras else "")


class Flow:
    """A directed graph of stages. Local faults raise where they are made; `validate` finds all of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._nodes: dict[str, Node] = {}

    def source(self, name: str) -> Node:
        """Items that are there when an iteration begins: prompts, init states."""
        return self._add(Node(self, name, "source"))

    def stage(
        self,
        method: Method | str,
        *inputs: Node,
        gather: bool = False,
        granularity: int | None = None,
        name: str | None = None,
        broadcast: bool = False,
    ) -> Node:
        """A worker method that takes the items of `inputs`.

        Args:
            method: `group.method` of a worker group, or its name.
            gather: the method needs the whole iteration's items in one call.
            granularity: items of a call must be a multiple of this.
            name: name of the stage in profile and plan; default "group.method".
            broadcast: every rank of the group gets all items (new weights), not a share.

        Raises FlowError for a method that does not exist, no input, an input of another flow, or a name used twice.
        """
        call = Call.of(method)
        multiple = _positive(granularity, call.name)
        node = Node(self, name or call.name, "stage", (call,), list(inputs), gather, multiple, broadcast=broadcast)
        return self._add(node)

    def loop(
        self,
        first: Method | str,
        second: Method | str,
        *inputs: Node,
        steps: int,
        items: int | None = None,
        gather: bool = False,
        granularity: int | None = None,
        pipeline: Sequence[int] = (),
    ) -> Node:
        """A pair of methods that call each other `steps` times for every item: an env steps, a policy acts.

        Args:
            items: the most items (envs) at once; more items of an iteration run in waves. None: all at once.
            pipeline: into how many groups S the items may be cut, so that one is with each stage; empty: planned.

        Raises FlowError like `stage`.
        """
        calls = (Call.of(first), Call.of(second))
        name = " <> ".join(call.name for call in calls)
        steps, multiple = _positive(steps, f"steps of {name}"), _positive(granularity, name)
        at_once = None if items is None else _positive(items, f"items of {name}")
        cuts = tuple(sorted(_positive(count, f"pipeline of {name}") for count in pipeline))
        return self._add(Node(self, name, "loop", calls, list(inputs), gather, multiple, steps, at_once, cuts))

    def connect(self, producer: Node, consumer: Node) -> None:
        """Add an edge between stages that exist. Raises FlowError if it closes a cycle."""
        consumer.inputs.append(producer)
        try:
            self.validate()
        except FlowError:
            consumer.inputs.pop()
            raise

    @property
    def nodes(self) -> list[Node]:
        """All nodes as declared, but every one after its inputs. Raises FlowError on a cycle."""
        order: list[Node] = []
        pending = list(self._nodes.values())
        while pending:
            ready = next((n for n in pending if not any(i in pending for i in n.inputs)), None)
            if ready is None:
                path = " -> ".join(node.name for node in _cycle(pending))
                raise FlowError(f"flow '{self.name}' has a cycle: {path}; only a loop may run in circles")
            pending.remove(ready)
            order.append(ready)
        return order

    def stages(self) -> list[Node]:
        """What the planner places: stages and loops in topological order, without sources."""
        return [node for node in self.nodes if node.kind != "source"]

    def groups(self) -> list[str]:
        """The worker groups, in the order in which they first work."""
        return list(dict.fromkeys(group for node in self.stages() for group in node.groups))

    def calls(self) -> dict[str, Call]:
        """Every worker method of the flow by the name that profiles know it by."""
        return dict(_profiled(self.stages()))

    def validate(self) -> Flow:
        """Check the whole flow. Returns it; raises FlowError with all faults, one a line."""
        faults: list[str] = []
        consumed = {producer.name for node in self._nodes.values() for producer in node.inputs}
        for node in self._nodes.values():
            faults += _input_faults(self, node)
            if node.kind == "source" and node.name not in consumed:
                faults.append(f"source '{node.name}' feeds no stage")
        if not any(node.kind != "source" for node in self._nodes.values()):
            faults.append("there is no stage")
        names = [name for name, _ in _profiled(self._nodes.values())]
        faults += [f"'{name}' is used by two stages" for name in dict.fromkeys(names) if names.count(name) > 1]
        try:
            _ = self.nodes
        except FlowError as error:
            faults.append(str(error))
        if faults:
            raise FlowError(f"flow '{self.name}' cannot run:\n" + "\n".join(f"  {fault}" for fault in faults))
        return self

    def __str__(self) -> str:
        return "\n".join([f"flow {self.name}", *(f"  {node}" for node in self.nodes)])

    def _add(self, node: Node) -> Node:
        taken = {node.name for node in self._nodes.values()} | {name for name, _ in _profiled(self._nodes.values())}
        for name in [node.name, *(name for name, _ in _profiled([node]))]:
            if name in taken:
                raise FlowError(f"'{name}' is in flow '{self.name}' already; give one of the two another name")
        if faults := _input_faults(self, node):
            raise FlowError("; ".join(faults))
        self._nodes[node.name] = node
        return node


def _cycle(nodes: list[Node]) -> list[Node]:
    """A cycle among nodes each of which has an input among them, from producer to consumer."""
    path = [nodes[0]]
    while (producer := next(i for i in path[-1].inputs if i in nodes)) not in path:
        path.append(producer)
    return [producer, *reversed(path[path.index(producer) :])]


def _profiled(nodes: Iterable[Node]) -> Iterator[tuple[str, Call]]:
    for node in nodes:
        for call in node.calls:
            yield (node.name if node.kind == "stage" else call.name), call


def _input_faults(flow: Flow, node: Node) -> list[str]:
    faults = []
    if node.kind == "stage" and not node.inputs:
        faults.append(f"stage '{node.name}' has no input; give it a source or another stage")
    for producer in node.inputs:
        if not isinstance(producer, Node):
            faults.append(f"an input of '{node.name}' is {producer!r}; expected a source, stage or loop of this flow")
        elif producer.flow is not flow:
            faults.append(f"'{producer.name}', an input of '{node.name}', belongs to flow '{producer.flow.name}'")
    return faults


def _positive(value: int | None, what: str) -> int:
    if value is not None and value < 1:
        raise FlowError(f"{what}: {value} is not a positive number")
    return value or 1
