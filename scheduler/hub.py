"""The hub of a run, a thread of the driver: keeps the queues of the channels and the leases of the devices.

It answers the requests of `Channel` and `DeviceLock` and never waits for anything but the next one. Only descriptors
pass through it where the ends of a channel share a host: arrays lie in shared memory (see `transport`).
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import zmq

from scheduler import transport
from scheduler.connection import GREETING, SILENCE_S, Endpoint, Frames, connect, dump_error, receive
from scheduler.device_lock import Holder, LeaseTable, Request

Ticket = tuple[bytes, bytes]  # the client that asks, and the number of its request


class _Item(NamedTuple):
    weight: float
    frames: Frames


class _Putter(NamedTuple):
    ticket: Ticket
    item: _Item


class _Getter(NamedTuple):
    ticket: Ticket
    n: int
    max_weight: float | None


@dataclass
class _Queue:
    items: deque[_Item] = field(default_factory=deque)
    putters: deque[_Putter] = field(default_factory=deque)
    getters: deque[_Getter] = field(default_factory=deque)


@dataclass
class _State:
    capacity: int
    queues: dict[Any, _Queue] = field(default_factory=dict)
    taken: dict[bytes, float] = field(default_factory=dict)  # weight, by client, of those that balance it
    producers: set[str] = field(default_factory=set)  # who has put, by name
    consumers: set[str] = field(default_factory=set)  # who has asked for items
    closed: bool = False
    error: bytes = b""

    def next_getter(self, queue: _Queue) -> _Getter | None:
        """Who is served next: the longest waiting, but among those that balance weight who has taken the least."""
        return min(queue.getters, key=lambda getter: self.taken.get(getter.ticket[0], 0.0), default=None)


def batch_size(weights: Iterable[float], n: int, max_weight: float | None) -> tuple[int, bool]:
    """How many of the queued items make one batch, and whether it is full: no later item could join it.

    Args:
        weights: of the queued items, first come first.
        n: items a batch may have.
        max_weight: their summed weight may not be more, but for a single item; None: no bound.
    """
    count, total, bound = 0, 0.0, float("inf") if max_weight is None else max_weight
    for weight in itertools.islice(weights, n):
        if count and total + weight > bound:
            return count, True
        count, total = count + 1, total + weight
    return count, count == n or total >= bound


class Hub:
    """Serves the channels and device locks of a run; one thread, started on creation.

    Args:
        host: the name of this host.
        tcp_host: address other hosts can reach; None serves this host alone.
    """

    def __init__(self, host: str, tcp_host: str | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="embodied-rl-hub-")
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.RCVHWM, 0)
        local, remote = f"ipc://{self._directory.name}/hub", None
        self._router.bind(local)
        if tcp_host:
            remote = f"tcp://{tcp_host}:{self._router.bind_to_random_port(f'tcp://{tcp_host}')}"
        self.endpoint = Endpoint(local, remote, host)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._channels: dict[str, _State] = {}
        self._leases = LeaseTable()
        self._processes: dict[int, int] = {}  # of this host's holders: file descriptor -> process id
        self._failure = b""  # set once the run cannot go on: channels are then born closed
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the hub and release whoever waits. Channels and locks must not be used afterwards."""
        if self._thread.is_alive():
            connect(self.endpoint.local).request([b"stop"])
            connect(self.endpoint.local).close()
            self._thread.join(SILENCE_S)
            for descriptor in self._processes:
                os.close(descriptor)
            self._router.close()
            self._context.term()
            self._directory.cleanup()

    # ------------------------------------------------------------------------------------------ hub thread

    def _serve(self) -> None:
        verb = b""
        while verb != b"stop":
            for source, _ in self._poller.poll():
                if source is not self._router:
                    self._bury(source)
                    continue
                client, request, verb, *frames = receive(self._router)
                ticket = (client, request)
                try:
                    self._handle(ticket, verb, frames)
                except Exception as error:  # the fault of one request, raised where it came from; the others go on
                    self._reply(ticket, [b"failed", dump_error(error)])

    def _handle(self, ticket: Ticket, verb: bytes, frames: Frames) -> None:
        if verb == GREETING:
            self._reply(ticket, [ticket[0]])
        elif verb in (b"put", b"get", b"size", b"cancel", b"close"):
            self._handle_channel(ticket, verb, frames)
        elif verb in (b"lease", b"release", b"wanted"):
            self._handle_lease(ticket, verb, frames[0])
        elif verb == b"unlease":
            withdrawn = (ticket[0], frames[0])
            self._reply(ticket, [b"withdrawn", self._leases.obstacles(withdrawn).encode()])
            self._grant(self._leases.cancel(withdrawn))
        elif verb == b"dead":
            name = bytes(frames[0]).decode()
            self._reply(ticket, [b"ok"])
            self._grant(self._leases.bury(lambda holder: holder.name == name))
        else:  # stop, fail_all
            error = frames[0] if frames else b""
            for state in self._channels.values():
                self._close(state, error, drop=bool(error) or verb == b"stop")
            for waiting in self._leases.cancel_all():
                self._reply(waiting.ticket, [b"failed", error])
            if verb == b"fail_all" and frames[1]:
                self._failure = error
            self._reply(ticket, [b"ok"])

    def _reply(self, ticket: Ticket, frames: Frames) -> bool:
        """Answer a request; False if its client is gone."""
        try:
            self._router.send_multipart([*ticket, *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    # ------------------------------------------------------------------------------------------ device leases

    def _handle_lease(self, ticket: Ticket, verb: bytes, head: bytes) -> None:
        name, host, pid, numbers = msgpack.unpackb(head)
        holder, devices = Holder(name, host, pid), frozenset[int](numbers)
        if verb == b"wanted":
            self._reply(ticket, [b"ok", b"1" if self._leases.is_wanted(holder, devices) else b""])
        elif verb == b"release":
            granted = self._leases.release(holder, devices)
            self._reply(ticket, [b"ok"])
            self._grant(granted)
        elif self._failure:
            self._reply(ticket, [b"failed", self._failure])
        elif self._observe(holder):
            self._grant(self._leases.acquire(Request(ticket, holder, devices)))

    def _grant(self, requests: Iterable[Request]) -> None:
        """Tell who has got a lease; one whose client is gone ends at once, which may let others in."""
        granted = deque(requests)
        while granted:
            request = granted.popleft()
            if not self._reply(request.ticket, [b"ok"]):
                granted += self._leases.release(request.holder, request.devices)

    def _observe(self, holder: Holder) -> bool:
        """Have the system tell when a process of this host ends (of others the `Watch` does); False if it has."""
        if holder.host == self.endpoint.host and holder.pid not in self._processes.values():
            try:
                descriptor = os.pidfd_open(holder.pid)
            except ProcessLookupError:
                return False
            self._processes[descriptor] = holder.pid
            self._poller.register(descriptor, zmq.POLLIN)
        return True

    def _bury(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)
        os.close(descriptor)
        pid, host = self._processes.pop(descriptor), self.endpoint.host
        self._grant(self._leases.bury(lambda holder: (holder.pid, holder.host) == (pid, host)))

    # ------------------------------------------------------------------------------------------ channels

    def _handle_channel(self, ticket: Ticket, verb: bytes, frames: Frames) -> None:
        name, capacity, peer, key, n, weight = msgpack.unpackb(frames[0], use_list=False)
        if name not in self._channels:
            self._channels[name] = _State(capacity, closed=bool(self._failure), error=self._failure)
        state = self._channels[name]
        queue = state.queues.setdefault(key, _Queue())
        if verb == b"put":
            state.producers.add(peer)
            if state.closed:
                self._reply(ticket, [b"failed", state.error])
            else:
                queue.putters.append(_Putter(ticket, _Item(weight, frames[1:])))
                self._advance(state, queue)
        elif verb == b"get":
            state.consumers.add(peer)
            if weight is not None:  # a newcomer need not catch up with what the others took before
                state.taken.setdefault(ticket[0], min(state.taken.values(), default=0.0))
            queue.getters.append(_Getter(ticket, n, weight))
            self._advance(state, queue)
        elif verb == b"cancel":
            withdrawn = (ticket[0], frames[1])
            others = state.producers if any(getter.ticket == withdrawn for getter in queue.getters) else state.consumers
            queue.getters = deque(getter for getter in queue.getters if getter.ticket != withdrawn)
            queue.putters = deque(putter for putter in queue.putters if putter.ticket != withdrawn)
            self._advance(state, queue)
            self._reply(ticket, [b"withdrawn", msgpack.packb(sorted(others))])
        elif verb == b"size":
            self._reply(ticket, [b"ok", msgpack.packb(len(queue.items))])
        else:  # close
            self._close(state, frames[1], drop=bool(frames[1]))
            self._reply(ticket, [b"ok"])
        if not (queue.items or queue.putters or queue.getters):
            state.queues.pop(key, None)

    def _advance(self, state: _State, queue: _Queue) -> None:
        """Take in what there is room for and deliver what is complete, until neither is left."""
        moved = True
        while moved:
            getter = state.next_getter(queue)
            moved = self._take_in(queue, max(state.capacity, getter.n if getter else 0))  # else it would never fill up
            if getter:
                moved = self._deliver(state, queue, getter) or moved

    def _take_in(self, queue: _Queue, room: int) -> bool:
        moved = False
        while queue.putters and len(queue.items) < room:
            ticket, item = queue.putters.popleft()
            queue.items.append(item)
            self._reply(ticket, [b"ok"])
            moved = True
        return moved

    def _deliver(self, state: _State, queue: _Queue, getter: _Getter) -> bool:
        """Answer a consumer if its batch is full or no more will come; whether it was answered."""
        count, full = batch_size((item.weight for item in queue.items), getter.n, getter.max_weight)
        if not full and not state.closed:
            return False
        queue.getters.remove(getter)
        taken = [queue.items.popleft() for _ in range(count)]
        found = [b"ok", *itertools.chain.from_iterable((msgpack.packb(len(f)), *f) for _, f in taken)]
        if not self._reply(getter.ticket, found if taken else [b"failed", state.error]):
            queue.items.extendleft(reversed(taken))  # it was killed while it waited: the items stay for the next
        elif getter.max_weight is not None:
            state.taken[getter.ticket[0]] += sum(item.weight for item in taken)
        return True

    def _close(self, state: _State, error: bytes, drop: bool) -> None:
        """Take no more items; `drop` those that are queued: an error overtakes them, its readers must not wait."""
        state.closed, state.error = True, state.error or error
        for queue in state.queues.values():
            if drop:
                while queue.items:
                    transport.discard(queue.items.popleft().frames)
            while queue.putters:
                ticket, _ = queue.putters.popleft()
                self._reply(ticket, [b"failed", state.error])
            self._advance(state, queue)
