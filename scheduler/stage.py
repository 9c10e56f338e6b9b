"""What a worker does for one iteration of a flow: take items from channels, call its method, pass the results on.

A stage method takes a list of items (one list for each input, equally long) and returns

    a list          one result for each item; None: the item goes no further
    a generator     of (position, result), as each is finished: consumers need not wait for the slowest
    an `Output`     results that do not belong to single items, and a report for the driver

The methods of a loop take a `Link` instead and return a report. Every call is measured; see `Meter`.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from scheduler.channel import Channel
from scheduler.profile import Sample

if TYPE_CHECKING:
    from scheduler.worker import Worker


class Message(NamedTuple):
    """One object on an edge. `number` orders an iteration's objects; `size` is the number of items it stands for."""

    number: int
    size: int
    item: Any


LONG_TAIL = 0.1  # standard deviation over mean from which single durations are kept


@dataclass
class Output:
    """Results of a call that do not belong to single items (the new weights), and what the driver is told."""

    items: list[Any] = field(default_factory=list)
    report: Any = None


@dataclass(frozen=True)
class Edge:
    """The way from one node to another; messages travel in packets, lists of them.

    Attributes:
        consumers: ranks that take from it.
        by_index: message i is for rank i % consumers; else for whichever rank is free, at most `most` in a packet.
        broadcast: every rank gets every message.
    """

    channel: Channel
    consumers: int
    by_index: bool
    most: int = 1
    broadcast: bool = False

    def put(self, packet: Sequence[Message]) -> None:
        if not packet:  # it would tell consumers that no more will come
            return
        if self.broadcast:
            for rank in range(self.consumers):
                self.channel.put(packet, key=rank)
        elif self.by_index:
            for rank in range(self.consumers):
                if share := [message for message in packet if message.number % self.consumers == rank]:
                    self.channel.put(share, key=rank)
        else:
            size = len(packet) if self.consumers == 1 else self.most
            for first in range(0, len(packet), max(1, size)):
                self.channel.put(packet[first : first + size])

    def end(self) -> None:
        """Tell every consumer by an empty packet that no more will come."""
        for rank in range(self.consumers):
            self.channel.put([], key=rank if self.by_index or self.broadcast else None)

    def get(self, rank: int) -> list[Message]:
        return self.channel.get(key=rank if self.by_index or self.broadcast else None)


@dataclass(frozen=True)
class LoopCall:
    """The loop that a call is one side of.

    Attributes:
        there, back: messages from the first stage to the second, and the answers.
        groups: pipeline groups S of each rank of the first stage.
        ranks: of the first and of the second stage.
        items: of the whole loop.
    """

    there: Channel
    back: Channel
    steps: int
    groups: int
    ranks: tuple[int, int]
    items: int


@dataclass(frozen=True)
class StageCall:
    """What a rank is asked to do in every iteration.

    Attributes:
        name: of the worker method in profiles.
        granularity: items of one call, over all ranks.
        shares: other groups use the devices too, so every call takes a lease on them.
        keeps: what it holds on the devices stays there between calls; else it makes room for the others.
    """

    name: str
    method: str
    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]
    granularity: int = 1
    gather: bool = False
    loop: LoopCall | None = None
    shares: bool = False
    keeps: bool = True


@dataclass
class StageReport:
    """What a rank did from `start` to `end` (`time.monotonic`): results that nobody consumes, the method's report, and
    measurements."""

    results: list[tuple[int, Any]] = field(default_factory=list)
    report: Any = None
    samples: list[Sample] = field(default_factory=list)
    hop_s: float | None = None
    start: float = 0.0
    end: float = 0.0


def run_stage(worker: Worker, call: StageCall, arguments: tuple[Any, ...]) -> StageReport:
    """Run one iteration of a stage on this rank; `arguments` follow the items (or the link) in its method's call."""
    meter = Meter(worker, call.name)

    def method(*inputs: Any) -> Any:
        return getattr(worker, call.method)(*inputs, *arguments)

    if call.loop is not None:
        link = Link(worker, call, meter)
        report = method(link)
        if not call.keeps:
            with worker.lease(keep=False):
                pass  # makes room for whoever is next
        return StageReport(report=report, samples=meter.samples(), hop_s=link.hop_s)
    found = StageReport()
    finish = _gathered if call.gather else _streamed
    for packet in finish(worker, call, method, meter, found):
        start = time.monotonic()
        for edge in call.outputs:
            edge.put(packet)
        meter.sends.append(time.monotonic() - start)
        if not call.outputs:
            found.results += [(message.number, message.item) for message in packet]
    found.samples = meter.samples()
    return found


Packets = Iterator[list[Message]]


def _gathered(worker: Worker, call: StageCall, method: Any, meter: Meter, found: StageReport) -> Packets:
    messages = sorted(_matched(worker, call, meter), key=lambda columns: columns[0].number)
    size = sum(columns[0].size for columns in messages)
    if not messages:
        return
    with _turn(worker, call), meter.call(size):
        output = method(*([column.item for column in columns] for columns in zip(*messages, strict=True)))
    if not isinstance(output, Output):
        output = Output(list(output or ()))
    found.report = output.report
    each = max(1, size // max(1, len(output.items)))
    yield [Message(worker.rank + count * worker.world_size, each, item) for count, item in enumerate(output.items)]


def _streamed(worker: Worker, call: StageCall, method: Any, meter: Meter, found: StageReport) -> Packets:
    for chunk in _chunks(_matched(worker, call, meter), -(-call.granularity // worker.world_size)):
        messages = [columns[0] for columns in chunk]
        with _turn(worker, call), meter.call(sum(message.size for message in messages)) as clock:
            results = method(*([column.item for column in columns] for columns in zip(*chunk, strict=True)))
            if isinstance(results, GeneratorType):
                for position, result in results:
                    clock.stop(lap=True)
                    if result is not None:
                        yield [messages[position]._replace(item=result)]
                    clock.start()
                continue
        if len(results := list(results or ())) not in (0, len(messages)):
            problem = f"was given {len(messages)} items and returned {len(results)}; None drops one"
            raise ValueError(f"{call.name} {problem}")
        pairs = zip(messages, results, strict=False)
        yield [message._replace(item=result) for message, result in pairs if result is not None]


def _turn(worker: Worker, call: StageCall) -> AbstractContextManager[None]:
    return worker.lease(keep=call.keeps) if call.shares else nullcontext()


def _matched(worker: Worker, call: StageCall, meter: Meter) -> Iterator[tuple[Message, ...]]:
    """The messages of all inputs with the same index, as soon as the last of them is there."""
    waiting: dict[int, dict[int, Message]] = defaultdict(dict)
    open_inputs = dict(enumerate(call.inputs))
    while open_inputs:
        for place, edge in list(open_inputs.items()):
            start = time.monotonic()
            packet = edge.get(worker.rank)
            meter.receipts.append(time.monotonic() - start)
            if not packet:
                del open_inputs[place]
            for message in packet:
                waiting[message.number][place] = message
                if len(waiting[message.number]) == len(call.inputs):
                    columns = waiting.pop(message.number)
                    yield tuple(columns[i] for i in range(len(columns)))


def _chunks(messages: Iterator[tuple[Message, ...]], items: int) -> Iterator[list[tuple[Message, ...]]]:
    chunk: list[tuple[Message, ...]] = []
    for columns in messages:
        chunk.append(columns)
        if sum(message[0].size for message in chunk) >= items:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class Link:
    """One end of a loop. Stream number s is pipeline group s % S of rank s // S of the first stage.

    The first stage sends for each of its groups and takes the answers; the second takes what comes next and answers
    it. Which rank of the second stage serves a stream never changes in an iteration, so it may gather what it saw.
    """

    def __init__(self, worker: Worker, call: StageCall, meter: Meter) -> None:
        assert call.loop is not None
        self.rank, self.loop, self.steps, self.groups = worker.rank, call.loop, call.loop.steps, call.loop.groups
        self._worker, self._call, self._meter = worker, call, meter
        self._hops: list[float] = []

    # ---- first stage

    def send(self, group: int, message: Any) -> None:
        """Send a group's message to the second stage."""
        stream = self.rank * self.groups + group
        self.loop.there.put((stream, time.monotonic(), message), key=stream % self.loop.ranks[1])

    def answer(self, group: int) -> Any:
        """Wait for the answer to a group's last message."""
        return self._receive(self.loop.back, f"stream {self.rank * self.groups + group}")[1]

    def finish(self) -> None:
        """Tell the second stage that this rank sends nothing more, where it cannot count."""
        for rank in range(self.loop.ranks[1]):
            self.loop.there.put((-1, time.monotonic(), None), key=rank)

    # ---- second stage

    @property
    def streams(self) -> int:
        """Streams that this rank of the second stage serves."""
        return len(range(self.rank, self.loop.ranks[0] * self.groups, self.loop.ranks[1]))

    def next(self) -> tuple[int, Any]:
        """The next (stream, message); stream -1: a rank of the first stage has finished."""
        stream, message = self._receive(self.loop.there, self.rank)
        return stream, message

    def reply(self, stream: int, answer: Any) -> None:
        self.loop.back.put((stream, time.monotonic(), answer), key=f"stream {stream}")

    def emit(self, stream: int, item: Any) -> None:
        """Pass on what a stream's rounds have given."""
        size = self.loop.items // (self.loop.ranks[0] * self.groups)
        for edge in self._call.outputs:
            edge.put([Message(stream, size, item)])

    # ---- measuring

    @contextmanager
    def call(self, items: int) -> Iterator[None]:
        """Around one call of this end on `items` items, so that its cost is known."""
        with self.turn(), self._meter.call(items):
            yield

    def turn(self) -> AbstractContextManager[None]:
        """Around work on devices that the other stage uses as well, if they are such that only one can."""
        return _turn(self._worker, replace(self._call, keeps=True))

    def add_call(self, items: int, seconds: float, cpu_s: float) -> None:
        """Count a call that other processes made: how long it took, and the processor time of all of them."""
        self._meter.add(items, seconds, cpu_s)

    @property
    def hop_s(self) -> float | None:
        """Median seconds that a message is on its way to this end when it is awaited."""
        return statistics.median(self._hops) if self._hops else None

    def _receive(self, channel: Channel, key: Any) -> tuple[int, Any]:
        asked = time.monotonic()
        stream, sent, message = channel.get(key=key)
        if asked < sent <= (now := time.monotonic()):  # else it had been there before, or comes from another clock
            self._hops.append(now - sent)
        return stream, message


class Meter:
    """Measures the calls of one stage in one iteration: seconds, busy share, memory, by the number of items.

    A call's seconds are those that it would have taken alone: without the time in which its thread stood in line
    because other processes had the cores. On a CPU what the process does for its messages between two calls belongs to
    the second. To pass a result on costs the median of an iteration, to receive one the least, which waited for nobody.
    """

    def __init__(self, worker: Worker, name: str) -> None:
        self._worker, self._name = worker, name
        self._calls: dict[int, list[tuple[float, float, list[float]]]] = defaultdict(list)  # seconds, cpu, laps
        self._cpu_s = time.process_time()
        self.sends: list[float] = []  # seconds of each
        self.receipts: list[float] = []

    @contextmanager
    def call(self, items: int) -> Iterator[Clock]:
        """Around one call on `items` items of this rank; recorded as work in the timeline too."""
        clock = Clock()
        if self._worker.context.device_kind == "cpu":
            clock.seconds = clock.cpu_s = time.process_time() - self._cpu_s
        with self._worker.trace.span(self._name, items=items):
            clock.start()
            yield clock
            clock.stop()
        self._calls[items].append((clock.seconds, clock.cpu_s, clock.laps))
        self._cpu_s = time.process_time()

    def add(self, items: int, seconds: float, cpu_s: float) -> None:
        self._calls[items].append((seconds, cpu_s, []))

    def samples(self) -> list[Sample]:
        """One sample for each number of items, of the mean call."""
        worker, found = self._worker, []
        devices = len(worker.devices) * worker.world_size
        count = sum(map(len, self._calls.values()))
        passing = statistics.median(self.sends) * len(self.sends) if self.sends else 0.0
        passing += min(self.receipts) * len(self.receipts) if self.receipts else 0.0
        passing /= max(count, 1)
        for items, calls in self._calls.items():
            seconds = max(1e-9, statistics.fmean(call[0] for call in calls) + passing)
            cpu = statistics.fmean(call[1] for call in calls)
            laps = tuple(lap for call in calls for lap in call[2])
            if not laps and items == 1:
                laps = tuple(call[0] for call in calls)
            if len(laps) < 2 or statistics.stdev(laps) < LONG_TAIL * statistics.fmean(laps):
                laps = ()
            busy = 1.0 if worker.context.device_kind == "gpu" else cpu / (seconds * len(worker.devices))
            busy = min(1.0, max(busy, 1e-3))
            total = items * worker.world_size
            found.append(Sample(self._name, total, devices, seconds, memory_in_use(), laps, busy))
        return found


class Clock:
    """What passed between `start` and `stop`, summed: seconds, without those that this thread stood in line for a core;
    processor seconds of the whole process; and `laps`, the seconds one by one."""

    def __init__(self) -> None:
        self.seconds = self.cpu_s = 0.0
        self.laps: list[float] = []

    def start(self) -> None:
        self._from = time.monotonic() - queued_s(), time.process_time()

    def stop(self, lap: bool = False) -> None:
        seconds = max(0.0, time.monotonic() - queued_s() - self._from[0])
        self.seconds, self.cpu_s = self.seconds + seconds, self.cpu_s + time.process_time() - self._from[1]
        if lap:
            self.laps.append(seconds)


def queued_s() -> float:
    """Seconds that this thread has been ready to run but had no core; 0 where the system does not tell."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError):
        return 0.0


def memory_in_use() -> int:
    """Most bytes that this process has held: of the GPU if it uses one, else of main memory, with its children now."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + _children_memory(int(time.monotonic()) // 60)


def memory_held() -> int:
    """Bytes that this process holds now, as `memory_in_use` without the past."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


@lru_cache(maxsize=1)
def _children_memory(minute: int) -> int:
    """Bytes of main memory of this process's children; looked up once a minute, because that takes milliseconds."""
    used = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            used += child.memory_info().rss
    return used
