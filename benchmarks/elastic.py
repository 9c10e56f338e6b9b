"""What elastic pipelining is worth where durations differ: generation with log-normal durations feeds training.

    python benchmarks/elastic.py

One worker generates 64 items, each with its own duration; another trains on them, on a core of its own. With a barrier
training begins when the last item is there, elastically as soon as the first is. The same plan is simulated from the
measured costs and the measured distribution. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import numpy as np

from scheduler.cluster import Cluster
from scheduler.executor import Executor
from scheduler.flow import Flow
from scheduler.placement import parse_placement
from scheduler.plan import Plan
from scheduler.profile import Profile
from scheduler.simulate import simulate
from scheduler.stage import Output
from scheduler.worker import Worker


class Model(Worker):
    """Works on a core: `turns` matrix products for each item."""

    def __init__(self, size: int = 160) -> None:
        self.matrix = np.linalg.qr(np.random.default_rng(0).standard_normal((size, size)))[0]  # products stay finite

    def _work(self, turns: int) -> None:
        product = self.matrix
        for _ in range(turns):
            product = product @ self.matrix

    def generate(self, turns: list[int]) -> Iterator[tuple[int, int]]:
        for position, count in enumerate(turns):
            self._work(count)
            yield position, count

    def accumulate(self, samples: list[int], turns: int) -> list[int]:
        """Gradients of some samples."""
        self._work(turns * len(samples))
        return samples

    def train(self, samples: list[int], turns: int) -> Output:
        """Gradients of all samples."""
        self._work(turns * len(samples))
        return Output()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the durations")
    parser.add_argument("--iterations", type=int, default=7)
    options = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(0.0, options.sigma, options.items)
    turns = np.maximum(1, 150 * drawn / drawn.mean()).astype(int).tolist()
    with Cluster(cpu_slots=2) as cluster:
        places = parse_placement("generator: 0; trainer: 1", 2, ["generator", "trainer"])
        generator, trainer = (cluster.start(name, Model, places[name]) for name in ("generator", "trainer"))
        barrier, elastic = Flow("barrier"), Flow("elastic")
        barrier.stage(trainer.train, barrier.stage(generator.generate, barrier.source("prompts")), gather=True)
        elastic.stage(trainer.accumulate, elastic.stage(generator.generate, elastic.source("prompts")))
        arguments = {"trainer.train": (150,), "trainer.accumulate": (150,)}
        seconds: dict[str, list[float]] = {}
        profile = Profile()
        for flow in (barrier, elastic):
            executor = Executor(flow, options.items)
            for number in range(options.iterations):
                done = executor.iterate({"prompts": turns}, arguments)
                if number:
                    seconds.setdefault(flow.name, []).append(done.seconds)
                    profile.add(*done.samples)
        placement = {"generator": [0], "trainer": [1]}
        plan = Plan.from_placement(elastic, placement, profile, options.items, 2)
        simulated = statistics.fmean(simulate(plan, profile, seed).makespan for seed in range(300))
    with_barrier, without = (statistics.median(seconds[name]) for name in ("barrier", "elastic"))
    print(f"{options.items} items, sigma {options.sigma:g}, the longest {max(turns) / np.mean(turns):.1f} x the mean")
    print(plan)
    print(f"with a barrier   {with_barrier:.3f} s")
    print(f"elastic          {without:.3f} s   {with_barrier / without:.2f} x faster")
    print(f"simulated        {simulated:.3f} s   {without / simulated - 1:+.1%} measured over simulated")


if __name__ == "__main__":
    main()
