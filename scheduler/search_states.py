"""What the search of `placement_search.py` has to solve: sub-graphs of a flow, each with what is in memory around it.

A `State` is a set of stages, the worker groups that stay on its devices meanwhile (`pinned`), and whether its own
groups have to be brought in and moved out (`cycled`). Its cuts lead to smaller states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.cuts import Graph, members
from scheduler.device_space import Alternatives, Ints, Space, Style
from scheduler.flow import Node
from scheduler.profile import Floats, Switch

CUT_LIMIT = 800  # cuts of all sub-graphs together up to which every down-set is tried; any 6 stages have fewer
STATE_LIMIT = 3000  # beyond this, memory is planned with "everything stays" or "everything swaps" below each node


class TooManyStates(Exception):
    """The sub-graphs with their memory states exceed the limit."""


@dataclass
class Cuts:
    """Cuts of one state into two: indices of the states of both sides [c], and what the kind of cut needs."""

    first: Ints
    second: Ints
    flag: np.ndarray  # in turn: whether it swaps; side by side: whether the sides are independent
    extra: Floats  # in turn: seconds on top

    @classmethod
    def of(cls, rows: list[tuple[int, int, bool, float]]) -> Cuts:
        columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
        first, second, flag, extra = columns
        return cls(np.array(first, int), np.array(second, int), np.array(flag, bool), np.array(extra, float))


@dataclass
class State:
    """A sub-graph with the groups that others pinned to its devices, and whether it has to be swapped in and out."""

    nodes: int
    pinned: int
    cycled: bool
    exact: bool  # a group of it is placed by a cut above: it uses all the devices it is given
    resident: int = -1  # of a cycled state: the state without the swap
    switched: int = 0  # ... and the groups to swap
    turns: Cuts = field(default_factory=lambda: Cuts.of([]))
    beside: Cuts = field(default_factory=lambda: Cuts.of([]))


class States:
    """All states that a search reaches, every one after those that it leads to.

    Args:
        nodes, graph: stages and loops in topological order, and their edges.
        options: the alternatives of each node on the devices of `space`.
        switches: by group; a group that holds memory and has no switch cannot be offloaded.

    Attributes:
        list: the states; `State` and `Cuts` refer to them by index.
        roots: the whole flow, with different groups that never move.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        graph: Graph,
        space: Space,
        options: Sequence[Alternatives],
        switches: Mapping[str, Switch],
        style: Style,
    ) -> None:
        self.graph, self.space, self.switches, self.style = graph, space, switches, style
        self.groups = sorted({group for node in nodes for group in node.groups})
        self.groups_of_node = [sum(1 << self.groups.index(g) for g in node.groups) for node in nodes]
        self.cuts: dict[int, list[int]] = {}
        self._enumerate_cuts()
        self._capacity = min(float(option.capacity.min()) for option in options)
        idle = [self._resident(groups) for groups in self.groups_of_node]
        self._most_extra = [max(0.0, float(o.need.max()) - own) for o, own in zip(options, idle, strict=True)]
        for self.simple_memory in (False, True):
            self.list: list[State] = []
            self._ids: dict[tuple[int, int, bool], int] = {}
            try:
                self.roots = sorted({self._state(graph.all, stay, False) for stay in self._staying()})
                break
            except TooManyStates:
                continue

    def _enumerate_cuts(self) -> None:
        """Fill `cuts`: all down-sets, or, if they are too many, those of the series-parallel decomposition."""
        for every in (True, False):
            self.cuts, left, total = {}, [self.graph.all], 0
            while left and (not every or total <= CUT_LIMIT):
                nodes = left.pop()
                if nodes in self.cuts:
                    continue
                found: list[int] = []
                for cut in self.graph.all_cuts(nodes) if every else self.graph.main_cuts(nodes):
                    found.append(cut)
                    if every and total + len(found) > CUT_LIMIT:
                        break
                total += len(found)
                self.cuts[nodes] = found
                left += [part for cut in found for part in (cut, nodes & ~cut)]
            if total <= CUT_LIMIT:
                return

    def groups_of(self, nodes: int) -> int:
        mask = 0
        for v in members(nodes):
            mask |= self.groups_of_node[v]
        return mask

    def names(self, groups: int) -> frozenset[str]:
        return frozenset(self.groups[g] for g in members(groups))

    def _resident(self, groups: int) -> int:
        return sum(self.space.costs.resident(name) for name in self.names(groups))

    def _fits(self, nodes: int, groups: int) -> bool:
        """Whether all groups can stay in memory whatever the stages of `nodes` do."""
        return self._resident(groups) + max(self._most_extra[v] for v in members(nodes)) <= self._capacity

    def _state(self, nodes: int, pinned: int, cycled: bool) -> int:
        own = self.groups_of(nodes)
        everything_fits = self._fits(nodes, own | pinned)
        if everything_fits:
            pinned = pinned & own if cycled else 0
        key = (nodes, pinned, cycled)
        if key in self._ids:
            return self._ids[key]
        if len(self._ids) > STATE_LIMIT and not self.simple_memory:
            raise TooManyStates
        outside = self.groups_of(self.graph.all & ~nodes)
        exact = bool(own & outside) and self.space.size > 1
        state = State(nodes, pinned, cycled, exact)
        turns: list[tuple[int, int, bool, float]] = []
        beside: list[tuple[int, int, bool, float]] = []
        if cycled:
            state.resident, state.switched = self._state(nodes, pinned, False), own & ~pinned
        for cut in self.cuts[nodes]:
            rest = nodes & ~cut
            before, after = self.groups_of(cut), self.groups_of(rest)
            shared = before & after
            if self.style != "disaggregated" or shared:
                if not cycled:
                    stays = (pinned | after, pinned | before)
                    if self.simple_memory and not everything_fits:
                        stays = (self.groups_of(self.graph.all),) * 2
                    turns.append((self._state(cut, stays[0], False), self._state(rest, stays[1], False), False, 0.0))
                if not everything_fits:
                    sides = [self._state(side, pinned | shared, True) for side in (cut, rest)]
                    extra = sum(self.switch_s(shared & ~pinned)) if cycled else 0.0
                    turns.append((sides[0], sides[1], True, extra))
            if not cycled and not exact and self.style != "collocated":
                if not self.space.may_split(self.names(before), self.names(after)):
                    continue
                sides = [self._state(side, pinned, False) for side in (cut, rest)]
                beside.append((sides[0], sides[1], not self.graph.feeds(cut, rest), 0.0))
        state.turns, state.beside = Cuts.of(turns), Cuts.of(beside)
        self.list.append(state)
        self._ids[key] = len(self.list) - 1
        return self._ids[key]

    def _staying(self) -> list[int]:
        """Sets of groups that may stay in memory all the time, wherever they are: those whose switch costs most for
        each byte come first."""
        cost = {g: sum(self.switch_s(1 << g)) / max(1, self._resident(1 << g)) for g in range(len(self.groups))}
        order = sorted(cost, key=lambda g: -cost[g])
        return [sum(1 << g for g in order[:k]) for k in range(len(order))]

    def switch_s(self, groups: int) -> tuple[float, float]:
        """Seconds to bring groups in and to move them out."""
        onload = offload = 0.0
        for name in self.holders(groups):
            if name not in self.switches:
                return float("inf"), float("inf")
            onload += self.switches[name].onload_s
            offload += self.switches[name].offload_s
        return onload, offload

    def holders(self, groups: int) -> tuple[str, ...]:
        """Those of the groups that hold memory while they are idle."""
        return tuple(name for name in sorted(self.names(groups)) if self.space.costs.resident(name))
