"""The planner's dynamic programme: the best tree of a flow over all s-t cuts, device splits and granularities.

Let F(G, n, b) be the least seconds for a set of stages G on a device set n with b items:

    F = min( one stage:           its cost model
             in turn, cut S | T:  F(S, n, b) + F(T, n, b)                 both stay in memory, or pay to swap
             side by side:        F(S, i, b) + F(T, j, b), i + j <= n     max instead of + if no edge joins S and T
             pipeline, m | b:     L + (b/m - 1) P )                       of a single part: one chunk after another

A pipeline of chunks of m is itself cut again and again, S | T, until its parts are elements F(X, i, m); the latency of
a chunk adds up (or is the maximum of branches that do not depend on each other), L = L_S + L_T, and the period is that
of the slowest part, P = max(P_S, P_T). As L and P trade off, D(G, n, m, t) is the least latency with a period of at
most t, for every value t that an element's time takes: exact on small problems. If there are too many values they are
thinned out, and placed anew around the periods of the best tree. (RLinf, arXiv 2509.15965, searches prefix cuts.)
Large graphs fall back to the cuts of `Graph.main_cuts`, large device counts to those of `useful_counts`.

Memory: stages in turn on the same devices keep their parameters there (`pinned` groups count for each other) or swap:
then each part is brought in before it works and moved out after, once for all the items that enter it (`cycled`).
So F has two more arguments, both of which vanish where everything fits.

A worker group is on one device set: two of its stages are never on different sides of a side-by-side cut, and what
lies below an in-turn cut between them uses all of the devices there.

Array axes: states, B batch sizes, t thresholds, G device sets (+ 1 for "none", always inf), W ways to split, c cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from scheduler.cuts import Graph, members
from scheduler.device_space import Ints, Space, Style, make_leaf
from scheduler.flow import Node
from scheduler.plan_tree import Devices, Leaf, PlanNode, Spatial, Temporal, leaves
from scheduler.profile import Floats, Switch
from scheduler.search_states import Cuts, State, States

WORK_LIMIT = 2_000_000  # sums of latencies for one granularity, above which thresholds are thinned out
FEWEST_THRESHOLDS = 16
REFINEMENTS = 2  # times that thresholds are placed anew around the periods of the best tree, ...
SIMPLEST = ("leaf", "turns", "beside", "pipeline", "cycled")  # the order of preference among equals
NEAR = 7  # ... as many around each
EXACT_NODES, EXACT_SETS = 6, 9  # up to these sizes thresholds are never thinned out: 6 stages on 8 devices


class Search:
    """One search; `solve` finds the best tree.

    Args:
        nodes, graph: stages and loops in topological order, and their edges.
        batches: ascending divisors of the last one, the items of an iteration: the granularities to try.
        switches: by group; a group that holds memory and has no switch cannot be offloaded.
        style: "collocated" takes turns only, "disaggregated" never if it can be avoided.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        graph: Graph,
        space: Space,
        batches: Sequence[int],
        switches: Mapping[str, Switch],
        style: Style = "best",
    ) -> None:
        self.nodes, self.graph, self.space, self.batches = list(nodes), graph, space, list(batches)
        self.options = [space.alternatives(node) for node in nodes]
        self.index = {node.name: v for v, node in enumerate(nodes)}
        self.all = States(nodes, graph, space, self.options, switches, style)
        self.states, self.roots = self.all.list, self.all.roots
        self._leaf_tables: dict[tuple[int, int, bool], tuple[Floats, Floats]] = {}

    def solve(self) -> PlanNode | None:
        """The best tree, on devices 0, 1, ...; None if there is none. Thinned thresholds are refined around it."""
        self.focus: dict[int, list[float]] = {}
        self._fill()
        if not np.isfinite(self.seconds):
            return None
        tree = self._tree()
        for _ in range(REFINEMENTS if self.thinned else 0):
            self.focus = {m: periods_of(tree, batch) for m, batch in enumerate(self.batches)}
            self._fill()
            refined = self._tree()
            if refined.seconds >= tree.seconds * (1 - 1e-6):
                break
            tree = refined
        return tree

    @property
    def seconds(self) -> float:
        """The optimum that the tables hold."""
        return float(self.table[self.roots, -1, self.space.size - 1].min())

    def _fill(self) -> None:
        """Fill the tables, from the smallest batch and the smallest sub-graph up."""
        size, self.thinned = self.space.size, False
        self.table = np.full((len(self.states), len(self.batches), size + 1), np.inf)
        self.chunked: list[tuple[Floats, Floats, Floats]] = []  # by granularity: thresholds, latencies, periods
        self.piped = np.full_like(self.table, np.inf)
        for b, batch in enumerate(self.batches):
            for m in self._granularities(b):
                _, latency, period = self.chunked[m]
                chunks = batch // self.batches[m]
                best = (latency + (chunks - 1) * period).min(axis=1)
                self.piped[:, b] = np.minimum(self.piped[:, b], best)
            for s, state in enumerate(self.states):
                seconds = np.full(size, np.inf)
                for _, values in self._choices(s, b):
                    if len(values):
                        seconds = np.minimum(seconds, values.min(axis=0))
                self.table[s, b, :size] = seconds if state.exact else self.space.spread(seconds)
            if b + 1 < len(self.batches):
                self.chunked.append(self._chunked(b))

    def _granularities(self, b: int) -> list[int]:
        return [m for m in range(b) if self.batches[b] % self.batches[m] == 0]

    def _choices(self, s: int, b: int) -> list[tuple[str, Floats]]:
        """The ways to run a state on exactly each set, by kind: [choices, G] seconds."""
        state, size = self.states[s], self.space.size
        if state.cycled:
            extra = sum(self.all.switch_s(state.switched))
            own = [("cycled", self.table[state.resident, b, None, :size] + extra)]
        else:
            own = [("pipeline", self.piped[s, b, None, :size])]
            if state.nodes.bit_count() == 1:
                own.append(("leaf", self._leaf(state)[0][b, None]))
        turns, beside = state.turns, state.beside
        if len(turns.first):
            total = self.table[turns.first, b, :size] + self.table[turns.second, b, :size] + turns.extra[:, None]
            own.append(("turns", total))
        if len(beside.first):
            first = self.table[beside.first, b][:, self.space.first]  # [c, G, W]
            second = self.table[beside.second, b][:, self.space.second]
            both = np.where(beside.flag[:, None, None], np.maximum(first, second), first + second)
            own.append(("beside", both.min(axis=2)))
        return own

    def _leaf(self, state: State) -> tuple[Floats, Floats]:
        """([B, G] seconds on exactly each set, [B, A] seconds of each alternative) of a single node."""
        v = members(state.nodes)[0]
        key = (v, state.pinned, state.exact)
        if key not in self._leaf_tables:
            options = self.options[v]
            seconds = options.feasible_seconds(self.space.pinned_bytes(self.nodes[v], self.all.names(state.pinned)))
            if state.exact:
                seconds = np.where(options.count[1] == 0, seconds, np.inf)
            table = np.full((len(self.batches), self.space.size), np.inf)
            for place in np.unique(options.footprint):
                table[:, place] = seconds[:, options.footprint == place].min(axis=1)
            self._leaf_tables[key] = table, seconds
        return self._leaf_tables[key]

    def _thresholds(self, b: int) -> Floats:
        """Periods to try for chunks of batch b: all that an element takes, or some of them, evenly spread."""
        kept = [s for s, state in enumerate(self.states) if not state.cycled]
        values = self.table[kept, b]
        values = np.unique(values[np.isfinite(values)])
        if not len(values):  # no stage takes so few items
            return np.zeros(1)
        cuts = sum(len(state.beside.first) for state in self.states)
        limit = max(FEWEST_THRESHOLDS, WORK_LIMIT // max(1, cuts * self.space.first.size))
        if len(values) <= limit or (len(self.nodes) <= EXACT_NODES and self.space.size <= EXACT_SETS):
            return values
        self.thinned = True
        wanted = [np.geomspace(max(values[0], values[-1] * 1e-4), values[-1], limit)]
        wanted += [period * np.linspace(0.8, 1.1, NEAR) for period in self.focus.get(b, [])]
        at = np.searchsorted(values, np.concatenate(wanted) * (1 - 1e-12))
        return np.unique(values[np.minimum(at, len(values) - 1)])

    def _chunked(self, b: int) -> tuple[Floats, Floats, Floats]:
        """(thresholds [t], least latency of a chunk [states, t, G + 1], its period, same shape) of pipelines."""
        thresholds = self._thresholds(b)
        latency = np.full((len(self.states), len(thresholds), self.space.size + 1), np.inf)
        period = np.full_like(latency, np.inf)
        block = max(1, 1_000_000 // max(1, len(thresholds) * self.space.first.size))
        for s, state in enumerate(self.states):
            if state.cycled:
                continue
            whole = np.where(self.table[s, b] <= thresholds[:, None], self.table[s, b], np.inf)
            latency[s] = period[s] = whole
            for start in range(0, len(state.beside.first), block):
                cuts = slice(start, start + block)
                split, split_period, _ = self._split(state.beside, cuts, latency, period)
                better = split < latency[s, :, :-1]
                latency[s, :, :-1] = np.where(better, split, latency[s, :, :-1])
                period[s, :, :-1] = np.where(better, split_period, period[s, :, :-1])
        return thresholds, latency, period

    def _split(self, beside: Cuts, cuts: slice, latency: Floats, period: Floats) -> tuple[Floats, Floats, Ints]:
        """Best of some cuts: (latency [t, G], period [t, G], which [t, G] as an index into (c, W))."""
        first, second = beside.first[cuts], beside.second[cuts]
        a = latency[first][:, :, self.space.first]  # [c, t, G, W]
        z = latency[second][:, :, self.space.second]
        both = a + z
        for c in np.flatnonzero(beside.flag[cuts]):
            np.maximum(a[c], z[c], out=both[c])
        flat = np.moveaxis(both, 0, 2).reshape(*both.shape[1:3], -1)  # [t, G, c * W]
        best = flat.argmin(axis=2)
        c, w = np.divmod(best, both.shape[3])
        t, g = np.indices(best.shape)
        slower = np.maximum(period[first[c], t, self.space.first[g, w]], period[second[c], t, self.space.second[g, w]])
        return flat[t, g, best], slower, best

    # --- the plan ---------------------------------------------------------------------------------------------------

    def _tree(self) -> PlanNode:
        every = tuple(range(sum(s.count for s in self.space.costs.sets)))
        root = self.roots[int(self.table[self.roots, -1, self.space.size - 1].argmin())]
        return self._build(root, len(self.batches) - 1, self.space.size - 1, every)

    def _build(self, s: int, b: int, g: int, devices: Devices) -> PlanNode:
        state = self.states[s]
        choices = sorted(self._choices(s, b), key=lambda choice: SIMPLEST.index(choice[0]))
        least = np.array([values.min(axis=0) for _, values in choices])
        if not state.exact:
            g = _first_least(np.where(self.space.within(g), least.min(axis=0), np.inf))
            devices, _ = self.space.divide(devices, g, 0)
        kind, values = choices[_first_least(least[:, g])]
        chosen = _first_least(values[:, g])
        if kind == "leaf":
            return self._build_leaf(state, b, g, devices)
        if kind == "cycled":
            node = self._build(state.resident, b, g, devices)
            onload, offload = self.all.switch_s(state.switched)
            names = tuple(sorted({*node.moved, *self.all.holders(state.switched)}))
            return replace(node, onload_s=node.onload_s + onload, offload_s=node.offload_s + offload, moved=names)
        if kind == "turns":
            cut = state.turns
            parts = [self._build(int(side[chosen]), b, g, devices) for side in (cut.first, cut.second)]
            before, after = (self.all.groups_of(self.states[side[chosen]].nodes) for side in (cut.first, cut.second))
            swap, shared = bool(cut.flag[chosen]), before & after & ~state.pinned
            flat = tuple(parts) if swap and shared else _flat_turns(parts, swap)
            moved = shared if swap and state.cycled else 0
            return Temporal(flat, swap, *self.all.switch_s(moved), moved=self.all.holders(moved))
        items = self.batches[b]
        if kind == "beside":
            cut = state.beside
            first = self.table[cut.first[chosen], b][self.space.first[g]]
            second = self.table[cut.second[chosen], b][self.space.second[g]]
            way = int((np.maximum(first, second) if cut.flag[chosen] else first + second).argmin())
            sets = int(self.space.first[g, way]), int(self.space.second[g, way])
            halves = self.space.divide(devices, *sets)
            parts = []
            for side, place, own in zip((cut.first, cut.second), sets, halves, strict=True):
                part = self._build(int(side[chosen]), b, place, own)
                parts += part.parts if isinstance(part, Spatial) and part.chunks == 1 and _free(part) else [part]
            return self._spatial(parts, items, items)
        coarse_first = self._granularities(b)[::-1]
        m = coarse_first[_first_least(np.array([self._pipeline_s(s, b, m)[:, g].min() for m in coarse_first]))]
        threshold = int(self._pipeline_s(s, b, m)[:, g].argmin())
        return self._spatial(self._build_chunked(s, m, threshold, g, devices), items, self.batches[m])

    def _pipeline_s(self, s: int, b: int, m: int) -> Floats:
        _, latency, period = self.chunked[m]
        return latency[s] + (self.batches[b] // self.batches[m] - 1) * period[s]

    def _build_chunked(self, s: int, m: int, t: int, g: int, devices: Devices) -> list[PlanNode]:
        """The elements of a pipeline, in topological order."""
        thresholds, latency, period = self.chunked[m]
        beside = self.states[s].beside
        if self.table[s, m, g] <= min(thresholds[t], latency[s, t, g]) or not len(beside.first):
            return [self._build(s, m, g, devices)]
        _, _, best = self._split(beside, slice(None), latency[:, t : t + 1], period[:, t : t + 1])
        c, w = divmod(int(best[0, g]), self.space.first.shape[1])
        sets = int(self.space.first[g, w]), int(self.space.second[g, w])
        halves = self.space.divide(devices, *sets)
        sides = (int(beside.first[c]), int(beside.second[c]))
        return [
            element
            for side, place, own in zip(sides, sets, halves, strict=True)
            for element in self._build_chunked(side, m, t, place, own)
        ]

    def _build_leaf(self, state: State, b: int, g: int, devices: Devices) -> PlanNode:
        v = members(state.nodes)[0]
        options = self.options[v]
        seconds = np.where(options.footprint == g, self._leaf(state)[1][b], np.inf)
        return make_leaf(self.space, self.nodes[v], options, b, int(seconds.argmin()), self.batches[b], devices)

    def _spatial(self, parts: list[PlanNode], items: int, granularity: int) -> Spatial:
        only = parts[0]
        if len(parts) == 1 and isinstance(only, Spatial) and len(only.parts) == 1 and _free(only):
            return replace(only, items=items)
        masks = [sum(1 << self.index[leaf.stage] for leaf in leaves(part)) for part in parts]
        depends = tuple(tuple(i for i in range(k) if self.graph.feeds(masks[i], masks[k])) for k in range(len(parts)))
        return Spatial(tuple(parts), depends, items, granularity)


def periods_of(tree: PlanNode, granularity: int) -> list[float]:
    """The periods of the pipelines in a tree that have chunks of this size."""
    if isinstance(tree, Leaf):
        return []
    found = [period for part in tree.parts for period in periods_of(part, granularity)]
    if isinstance(tree, Spatial) and tree.chunks > 1 and tree.granularity == granularity:
        found.append(tree.bottleneck_s)
    return sorted(set(found))


def _first_least(values: Floats) -> int:
    """Index of the first of the least values, [n]; differences by rounding do not count."""
    return int((values <= values.min() * (1 + 1e-9)).argmax())


def _free(node: PlanNode) -> bool:
    return not node.moved


def _flat_turns(parts: list[PlanNode], swap: bool) -> tuple[PlanNode, ...]:
    """Parts of nested in-turn nodes of the same kind, in one list."""
    flat: list[PlanNode] = []
    for part in parts:
        flat += part.parts if isinstance(part, Temporal) and part.swap == swap and _free(part) else [part]
    return tuple(flat)
