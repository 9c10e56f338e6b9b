"""Seconds to move one item between two workers of this host: our channel, a Ray actor call, Ray's queue; and a memcpy.

    python benchmarks/channel.py                   # NumPy arrays and torch tensors of 1 KB, 200 KB, 5 MB and 50 MB
    python benchmarks/channel.py --sizes 1000,50000000 --rounds 5

All are set up first, then measured in turn, round after round; printed are the medians of the rounds and the ratios to
the bars: a channel may take a quarter of the time of Ray's queue for 1 KB, and three times a memcpy for 50 MB.
The channel and the queue hold 4 items; an actor call ends before the next one begins.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scheduler.channel import Channel
from scheduler.cluster import Cluster
from scheduler.placement import GroupPlacement
from scheduler.worker import Worker

ROUND_S = 0.3  # how long a round of one contestant is to take


class Sender(Worker):
    """Makes an item and hands it over again and again; an item counts as moved when the receiver has asked for it."""

    def prepare(self, kind: str, nbytes: int) -> None:
        self.item: Any = np.ones(nbytes // 4, np.float32)
        if kind == "torch":
            import torch

            self.item = torch.from_numpy(self.item)

    def by_channel(self, channel: Channel, count: int) -> None:
        for _ in range(count):
            channel.put(self.item)

    def by_actor_call(self, receiver: Any, count: int) -> None:
        import ray

        for _ in range(count):
            ray.get(receiver.call.remote("take", (self.item,), {}))

    def by_ray_queue(self, queue: Any, count: int) -> None:
        for _ in range(count):
            queue.put(self.item)


class Receiver(Worker):
    """Takes items, and looks at one number of each."""

    def take(self, item: Any) -> None:
        float(item[-1])

    def from_channel(self, channel: Channel, count: int) -> None:
        for _ in range(count):
            self.take(channel.get())

    def from_ray_queue(self, queue: Any, count: int) -> None:
        for _ in range(count):
            self.take(queue.get())


class Contest:
    """The two workers and what lies between them."""

    def __init__(self, cluster: Cluster) -> None:
        from ray.util.queue import Queue

        slots = len(cluster.devices)
        self.sender = cluster.start("sender", Sender, GroupPlacement("sender", ((0,),)))
        self.receiver = cluster.start("receiver", Receiver, GroupPlacement("receiver", ((1 % slots,),)))
        self.channel = cluster.channel("items", 4, self.sender, self.receiver)
        self.queue = Queue(4, actor_options={"num_cpus": 0})
        self.ways: dict[str, Callable[[int], None]] = {
            "channel": self.by_channel,
            "actor call": self.by_actor_call,
            "ray queue": self.by_ray_queue,
        }

    def by_channel(self, count: int) -> None:
        taking = self.receiver.from_channel(self.channel, count)
        self.sender.by_channel(self.channel, count).wait()
        taking.wait()

    def by_actor_call(self, count: int) -> None:
        self.sender.by_actor_call(self.receiver.actors[0], count).wait()

    def by_ray_queue(self, count: int) -> None:
        taking = self.receiver.from_ray_queue(self.queue, count)
        self.sender.by_ray_queue(self.queue, count).wait()
        taking.wait()

    def measure(self, kind: str, nbytes: int, rounds: int) -> dict[str, float]:
        """Seconds for each item by each way, medians over the rounds."""
        self.sender.prepare(kind, nbytes).wait()
        counts = {}
        for way, run in self.ways.items():  # also warms up what is reused
            run(8)
            start = time.perf_counter()
            run(8)
            counts[way] = max(8, int(8 * ROUND_S / (time.perf_counter() - start)))
        found: dict[str, list[float]] = {way: [] for way in [*self.ways, "memcpy"]}
        for _ in range(rounds):
            for way, run in self.ways.items():
                start = time.perf_counter()
                run(counts[way])
                found[way].append((time.perf_counter() - start) / counts[way])
            found["memcpy"].append(memcpy_seconds(nbytes))
        return {way: statistics.median(seconds) for way, seconds in found.items()}


def memcpy_seconds(nbytes: int) -> float:
    """One copy into memory that has been written before."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    count = max(3, min(1000, 100_000_000 // nbytes))
    start = time.perf_counter()
    for _ in range(count):
        np.copyto(target, source)
    return (time.perf_counter() - start) / count


def size_text(nbytes: int) -> str:
    return f"{nbytes / 1e6:g} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:g} KB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,200000,5000000,50000000", help="bytes of an item, comma-separated")
    parser.add_argument("--kinds", default="numpy,torch", help="what an item is: numpy, torch")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    with Cluster(cpu_slots=2) as cluster:
        contest = Contest(cluster)
        names = [*contest.ways, "memcpy"]
        print(f"{'ms for each item':>18}" + "".join(f"{name:>12}" for name in names) + "   channel is")
        for kind in arguments.kinds.split(","):
            for nbytes in sizes:
                seconds = contest.measure(kind, nbytes, arguments.rounds)
                cells = "".join(f"{1000 * seconds[name]:12.3f}" for name in names)
                ratios = f"{seconds['channel'] / seconds['ray queue']:.2f} of the queue"
                if nbytes >= 1_000_000:
                    ratios += f", {seconds['channel'] / seconds['memcpy']:.1f} memcpys"
                print(f"{size_text(nbytes):>11} {kind:>6}{cells}   {ratios}", flush=True)


if __name__ == "__main__":
    main()
