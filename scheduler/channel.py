"""Bounded keyed queues between worker groups: many producers, many consumers, each item delivered once.

The `ChannelHub`, a thread of the driver, keeps the queues; `Channel` is the handle that workers use. Only
descriptors pass through the hub where the ends share a host: arrays lie in shared memory (see `transport`).
A producer waits for room and a consumer for an item without spinning, and neither waits for ever.
"""

from __future__ import annotations

import itertools
import pickle
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import msgpack
import zmq

from scheduler import transport
from scheduler.transport import Location

Frames = list[bytes]


class ChannelClosed(Exception):
    """The channel was closed and holds no more items."""


class ChannelTimeout(TimeoutError):
    """Nothing happened within the time limit; the message names the channel and whom it waited for."""


@dataclass
class _Queue:
    items: deque[Frames] = field(default_factory=deque)
    putters: deque[tuple[bytes, bytes, Frames]] = field(default_factory=deque)  # (client, request, frames)
    getters: deque[tuple[bytes, bytes, int]] = field(default_factory=deque)  # (client, request, n)


@dataclass
class _State:
    capacity: int
    queues: dict[Any, _Queue] = field(default_factory=dict)
    closed: bool = False
    error: bytes = b""


class ChannelHub:
    """Keeps the queues of every channel of a run; one thread, started on creation.

    Args:
        tcp_host: address other hosts can reach; None serves this host alone.
    """

    def __init__(self, tcp_host: str | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="embodied-rl-hub-")
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.RCVHWM, 0)
        self.local_address = f"ipc://{self._directory.name}/hub"
        self._router.bind(self.local_address)
        self.remote_address = None
        if tcp_host:
            port = self._router.bind_to_random_port(f"tcp://{tcp_host}")
            self.remote_address = f"tcp://{tcp_host}:{port}"
        self._channels: dict[str, _State] = {}
        self._thread = threading.Thread(target=self._serve, name="channel-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the hub. Channels must not be used afterwards."""
        with _client(self.local_address) as client:
            client.request([b"stop"], None)
        self._thread.join()
        self._router.close()
        self._context.term()
        self._directory.cleanup()

    # ------------------------------------------------------------------------------------------ hub thread

    def _serve(self) -> None:
        while True:
            client, request, verb, *frames = self._router.recv_multipart()
            if verb == b"stop":
                self._reply(client, request, [b"ok"])
                return
            if verb == b"fail_all":
                for state in self._channels.values():
                    self._close(state, frames[0])
                self._reply(client, request, [b"ok"])
                continue
            name, capacity, key, n = msgpack.unpackb(frames[0])
            state = self._channels.setdefault(name, _State(capacity))
            queue = state.queues.setdefault(key, _Queue())
            if verb == b"put":
                if state.closed:
                    self._reply(client, request, [b"closed", state.error])
                else:
                    queue.putters.append((client, request, frames[1:]))
                    self._advance(state, queue)
            elif verb == b"get":
                queue.getters.append((client, request, n))
                self._advance(state, queue)
            elif verb == b"cancel":
                self._cancel(queue, client, frames[1])
                self._reply(client, request, [b"ok"])
            elif verb == b"size":
                self._reply(client, request, [b"ok", msgpack.packb(len(queue.items))])
            elif verb == b"close":
                self._close(state, frames[1])
                self._reply(client, request, [b"ok"])

    def _advance(self, state: _State, queue: _Queue) -> None:
        moved = True
        while moved:
            moved = False
            while queue.putters and len(queue.items) < self._room(state, queue):
                client, request, frames = queue.putters.popleft()
                queue.items.append(frames)
                self._reply(client, request, [b"ok"])
                moved = True
            while queue.getters:
                client, request, n = queue.getters[0]
                if len(queue.items) < n and not state.closed:
                    break
                queue.getters.popleft()
                if not queue.items:
                    self._reply(client, request, [b"closed", state.error])
                    continue
                taken = [queue.items.popleft() for _ in range(min(n, len(queue.items)))]
                self._reply(client, request, [b"ok", *itertools.chain.from_iterable(_with_count(f) for f in taken)])
                moved = True

    @staticmethod
    def _room(state: _State, queue: _Queue) -> int:
        """Items the queue may hold; a consumer that asks for more than the capacity at once extends it."""
        return max(state.capacity, queue.getters[0][2] if queue.getters else 0)

    def _cancel(self, queue: _Queue, client: bytes, request: bytes) -> None:
        queue.getters = deque(g for g in queue.getters if g[:2] != (client, request))
        queue.putters = deque(p for p in queue.putters if p[:2] != (client, request))

    def _close(self, state: _State, error: bytes) -> None:
        if not state.closed:
            state.closed, state.error = True, error
        for queue in state.queues.values():
            if error:  # an error overtakes what was queued: its readers must not wait for the rest
                while queue.items:
                    transport.discard(queue.items.popleft())
            while queue.putters:
                client, request, _ = queue.putters.popleft()
                self._reply(client, request, [b"closed", state.error])
            self._advance(state, queue)

    def _reply(self, client: bytes, request: bytes, frames: Frames) -> None:
        self._router.send_multipart([client, request, *frames], copy=False)


def _with_count(frames: Frames) -> Frames:
    return [msgpack.packb(len(frames)), *frames]


class Channel:
    """Handle of one channel; picklable, usable from any process and thread of the run.

    Args:
        capacity: items the queue of one key holds before `put` waits.
        producers, consumers: names of the ends, for messages.
        receivers: where the consumers live, which decides how bytes move.
        timeout_s: default bound of every wait.
    """

    def __init__(
        self,
        name: str,
        address: str,
        remote_address: str | None,
        hub_host: str,
        capacity: int = 16,
        producers: str = "",
        consumers: str = "",
        receivers: tuple[Location, ...] = (),
        timeout_s: float = 600.0,
    ) -> None:
        self.name, self.capacity, self.timeout_s = name, capacity, timeout_s
        self.producers, self.consumers, self.receivers = producers, consumers, receivers
        self._address, self._remote_address, self._hub_host = address, remote_address, hub_host

    def put(self, item: Any, key: Any = None, timeout: float | None = None) -> None:
        """Queue an item; waits while the queue is full.

        Raises ChannelClosed (or the error the channel was closed with), ChannelTimeout.
        """
        way = transport.choose(Location.here(_host(self._hub_host)), self.receivers)
        frames = transport.pack(item, way)
        _thread.__dict__.setdefault("produced", {})[self.name] = self
        try:
            self._request(b"put", key, 1, frames, timeout, f"has been full; it is read by {self.consumers}")
        except BaseException:  # it was not delivered
            transport.discard(frames)
            raise

    def get(self, n: int = 1, key: Any = None, timeout: float | None = None) -> Any:
        """Take one item, or a list of n (fewer when the channel closes before).

        Raises ChannelClosed (or the error the channel was closed with) once it is closed and empty, ChannelTimeout.
        """
        reply = self._request(b"get", key, n, [], timeout, f"has been empty; it is filled by {self.producers}")
        items = []
        while reply:
            count = msgpack.unpackb(reply[0])
            items.append(transport.unpack(reply[1 : 1 + count]))
            reply = reply[1 + count :]
        return items if n > 1 else items[0]

    def size(self, key: Any = None) -> int:
        """Items queued under the key now."""
        return int(msgpack.unpackb(self._request(b"size", key, 1, [], None, "")[0]))

    def close(self, error: BaseException | None = None) -> None:
        """No more items will come. With an error, consumers and producers raise it, queued items are dropped."""
        self._request(b"close", None, 1, [dump_error(error)], None, "")

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield self.get()
            except ChannelClosed:
                return

    def _request(self, verb: bytes, key: Any, n: int, frames: list, timeout: float | None, waiting: str) -> Frames:
        here = _host(self._hub_host)
        address = self._address if here == self._hub_host or not self._remote_address else self._remote_address
        head = msgpack.packb((self.name, self.capacity, key, n))
        limit = self.timeout_s if timeout is None else timeout
        with _client(address) as client:
            reply = client.request([verb, head, *frames], limit, cancel=[b"cancel", head])
        if reply is None:
            named = f"channel '{self.name}'" + ("" if key is None else f" (key {key!r})")
            raise ChannelTimeout(f"{named} {waiting or 'did not answer'}: waited {limit:g} s")
        if reply[0] == b"closed":
            if reply[1]:
                raise load_error(reply[1])
            raise ChannelClosed(f"channel '{self.name}' is closed")
        return reply[1:]


def fail_all(address: str, error: BaseException) -> None:
    """Close every channel of a hub with an error, so that no worker waits for one that is gone."""
    with _client(address) as client:
        client.request([b"fail_all", dump_error(error)], 10.0)


def dump_error(error: BaseException | None) -> bytes:
    """An exception as bytes; one that cannot be pickled is replaced by its description."""
    if error is None:
        return b""
    try:
        data = cloudpickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def load_error(data: bytes) -> BaseException:
    return pickle.loads(data)


# ---------------------------------------------------------------------------------------------- client side

_this_host: str | None = None
_thread = threading.local()


def set_host(host: str) -> None:
    """Tell this process which host it is on (its Ray node); the driver's host otherwise."""
    global _this_host
    _this_host = host


def take_produced() -> list[Channel]:
    """The channels this thread has put items into since the last call."""
    return list(_thread.__dict__.pop("produced", {}).values())


def _host(default: str) -> str:
    return _this_host or default


class _Client:
    """One DEALER socket for a thread; requests are answered in any order and matched by number."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._numbers = itertools.count()

    def request(self, frames: list, timeout: float | None, cancel: list | None = None) -> Frames | None:
        """Send and wait for the answer; None after the time limit (the request is then withdrawn)."""
        number = str(next(self._numbers)).encode()
        self._socket.send_multipart([number, *frames], copy=False)
        reply = self._wait(number, timeout)
        if reply is None and cancel is not None:
            withdrawal = str(next(self._numbers)).encode()
            self._socket.send_multipart([withdrawal, *cancel, number])
            while True:  # the answer may have been on its way: then it counts
                got = self._receive(10.0)
                if got is None or got[0] == withdrawal:
                    break
                if got[0] == number:
                    reply = got[1:]
        return reply

    def _wait(self, number: bytes, timeout: float | None) -> Frames | None:
        while True:
            got = self._receive(timeout)
            if got is None or got[0] == number:
                return None if got is None else got[1:]

    def _receive(self, timeout: float | None) -> Frames | None:
        if timeout is not None and not self._socket.poll(int(timeout * 1000)):
            return None
        return self._socket.recv_multipart()

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def _client(address: str) -> _Client:
    clients = _thread.__dict__.setdefault("clients", {})
    if address not in clients:
        clients[address] = _Client(address)
    return clients[address]
