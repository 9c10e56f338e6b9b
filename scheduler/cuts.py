"""s-t cuts of a directed acyclic graph, as bit masks: bit v of a mask says that node v belongs to the set.

Nodes are numbered in topological order. A cut of a node set is a down-set of it: a part that holds, with each node,
all its predecessors in the set; the rest runs after it or beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def members(mask: int) -> list[int]:
    """The nodes of a set, in topological order."""
    return [node for node in range(mask.bit_length()) if mask >> node & 1]


class Graph:
    """`predecessors[v]` is the set of direct predecessors of node v; all are smaller than v."""

    def __init__(self, predecessors: Sequence[int]) -> None:
        self.predecessors = list(predecessors)
        self.size = len(predecessors)
        self.all = (1 << self.size) - 1
        self.successors = [sum(1 << v for v in range(self.size) if predecessors[v] >> u & 1) for u in range(self.size)]
        self.descendants = [0] * self.size
        for u in reversed(range(self.size)):
            for v in members(self.successors[u]):
                self.descendants[u] |= 1 << v | self.descendants[v]

    def feeds(self, first: int, second: int) -> bool:
        """Whether an edge leads from the first set into the second."""
        return any(self.predecessors[v] & first for v in members(second))

    def all_cuts(self, nodes: int) -> Iterator[int]:
        """Every down-set of `nodes` but the empty and the full one. There may be 2^n of them."""
        order = members(nodes)

        def extend(position: int, chosen: int) -> Iterator[int]:
            if position == len(order):
                if chosen not in (0, nodes):
                    yield chosen
                return
            node = order[position]
            if not self.predecessors[node] & nodes & ~chosen:
                yield from extend(position + 1, chosen | 1 << node)
            yield from extend(position + 1, chosen)

        return extend(0, 0)

    def main_cuts(self, nodes: int) -> Iterator[int]:
        """Few cuts, for large graphs: those of the series-parallel decomposition.

        A set that falls apart is cut between its components; else where everything after the cut depends on everything
        before it; else, if there is no such place, at every prefix of the topological order.
        """
        parts = self.components(nodes)
        if len(parts) > 1:
            yield from (sum(parts[:k]) for k in range(1, len(parts)))
            return
        order = members(nodes)
        prefixes = [sum(1 << v for v in order[:k]) for k in range(1, len(order))]
        series, common = [], self.all
        for prefix, last in zip(prefixes, order[:-1], strict=True):
            common &= self.descendants[last]
            if not nodes & ~prefix & ~common:
                series.append(prefix)
        yield from series or prefixes

    def components(self, nodes: int) -> list[int]:
        """The connected parts of a set, by their first node."""
        parts: list[int] = []
        left = nodes
        while left:
            part = frontier = left & -left
            while frontier:
                reached = 0
                for v in members(frontier):
                    reached |= (self.predecessors[v] | self.successors[v]) & nodes
                frontier = reached & ~part
                part |= frontier
            parts.append(part)
            left &= ~part
        return parts
