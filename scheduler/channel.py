"""Bounded keyed queues between worker groups: many producers, many consumers, each item delivered once.

The `ChannelHub`, a thread of the driver, keeps the queues; `Channel` is the handle that workers use. Only
descriptors pass through the hub where the ends share a host: arrays lie in shared memory (see `transport`).
A producer waits for room and a consumer for an item without spinning, and neither waits for ever.
"""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

from scheduler import transport
from scheduler.transport import Location

Frames = list[Any]  # bytes, or memoryviews of what is large
HUB_S = 10.0  # how long the hub may take to answer what it need not wait for


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
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.RCVHWM, 0)
        self.local_address = f"ipc://{self._directory.name}/hub"
        self._router.bind(self.local_address)
        self.remote_address = None
        if tcp_host:
            port = self._router.bind_to_random_port(f"tcp://{tcp_host}")
            self.remote_address = f"tcp://{tcp_host}:{port}"
        self._channels: dict[str, _State] = {}
        self._failure = b""  # set once the run cannot go on: channels are then born closed
        self._thread = threading.Thread(target=self._serve, name="channel-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the hub and release whoever waits. Channels must not be used afterwards."""
        if self._thread.is_alive():
            _client(self.local_address).request([b"stop"], HUB_S)
            _client(self.local_address).close()
            self._thread.join(HUB_S)
            self._router.close()
            self._context.term()
            self._directory.cleanup()

    # ------------------------------------------------------------------------------------------ hub thread

    def _serve(self) -> None:
        verb = b""
        while verb != b"stop":
            client, request, verb, *frames = _receive(self._router)
            try:
                self._handle(client, request, verb, frames)
            except Exception as error:  # the fault of one request, raised where it came from; the others go on
                self._reply(client, request, [b"closed", dump_error(error)])

    def _handle(self, client: bytes, request: bytes, verb: bytes, frames: Frames) -> None:
        if verb in (b"stop", b"fail_all"):
            for state in self._channels.values():
                self._close(state, frames[0] if frames else b"")
            if verb == b"fail_all" and frames[1]:
                self._failure = frames[0]
            self._reply(client, request, [b"ok"])
            return
        name, capacity, key, n = msgpack.unpackb(frames[0], use_list=False)
        if name not in self._channels:
            self._channels[name] = _State(capacity, closed=bool(self._failure), error=self._failure)
        state = self._channels[name]
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
            self._advance(state, queue)
            self._reply(client, request, [b"ok"])
        elif verb == b"size":
            self._reply(client, request, [b"ok", msgpack.packb(len(queue.items))])
        elif verb == b"close":
            self._close(state, frames[1])
            self._reply(client, request, [b"ok"])
        if not (queue.items or queue.putters or queue.getters):
            state.queues.pop(key, None)

    def _advance(self, state: _State, queue: _Queue) -> None:
        moved = True
        while moved:
            moved = False
            while queue.putters and len(queue.items) < self._room(state, queue):
                client, request, frames = queue.putters.popleft()
                queue.items.append(frames)
                self._reply(client, request, [b"ok"])
                moved = True
            while queue.getters and (state.closed or len(queue.items) >= queue.getters[0][2]):
                client, request, n = queue.getters.popleft()
                taken = [queue.items.popleft() for _ in range(min(n, len(queue.items)))]
                found = [b"ok", *itertools.chain.from_iterable(_with_count(frames) for frames in taken)]
                if self._reply(client, request, found if taken else [b"closed", state.error]):
                    moved = moved or bool(taken)
                else:  # it was killed while it waited: the items stay for the next
                    queue.items.extendleft(reversed(taken))

    @staticmethod
    def _room(state: _State, queue: _Queue) -> int:
        """Items the queue may hold; a consumer that asks for more than the capacity at once extends it."""
        return max(state.capacity, queue.getters[0][2] if queue.getters else 0)

    def _cancel(self, queue: _Queue, client: bytes, request: bytes) -> None:
        queue.getters = deque(g for g in queue.getters if g[:2] != (client, request))
        queue.putters = deque(p for p in queue.putters if p[:2] != (client, request))

    def _close(self, state: _State, error: bytes) -> None:
        state.closed, state.error = True, state.error or error
        for queue in state.queues.values():
            if error:  # an error overtakes what was queued: its readers must not wait for the rest
                while queue.items:
                    transport.discard(queue.items.popleft())
            while queue.putters:
                client, request, _ = queue.putters.popleft()
                self._reply(client, request, [b"closed", state.error])
            self._advance(state, queue)

    def _reply(self, client: bytes, request: bytes, frames: Frames) -> bool:
        """Answer a request; False if its client is gone."""
        try:
            self._router.send_multipart([client, request, *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


def _receive(socket: zmq.Socket) -> Frames:
    parts: Frames = [socket.recv()]
    while socket.getsockopt(zmq.RCVMORE):  # what comes first is small; a view costs more than the copy of that
        parts.append(socket.recv() if len(parts) < 5 else socket.recv(copy=False).buffer)
    return parts


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
        self._request(b"put", key, 1, frames, timeout, f"has been full; it is read by {self.consumers}")

    def get(self, n: int = 1, key: Any = None, timeout: float | None = None) -> Any:
        """Take one item, or, for n > 1, a list of n (fewer when the channel closes before).

        Raises ChannelClosed (or the error the channel was closed with) once it is closed and empty, ChannelTimeout.
        """
        if n < 1:
            raise ValueError(f"cannot take {n} items from channel '{self.name}'")
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
        reply = _client(address).request([verb, head, *frames], limit, cancel=[b"cancel", head])
        if reply is not None and reply[0] == b"ok":
            return reply[1:]
        if verb == b"put":
            transport.discard(frames)
        if reply is None:
            named = f"channel '{self.name}'" + ("" if key is None else f" (key {key!r})")
            raise ChannelTimeout(f"{named} {waiting or 'did not answer'}: waited {limit:g} s")
        if reply[1]:
            raise load_error(reply[1])
        raise ChannelClosed(f"channel '{self.name}' is closed")


def fail_all(address: str, error: BaseException, for_good: bool = False) -> None:
    """Close every channel of a hub with an error, so that no worker waits for one that has failed.

    Args:
        for_good: channels used from now on are closed as well, because the run cannot go on.
    """
    _client(address).request([b"fail_all", dump_error(error), b"1" if for_good else b""], HUB_S)


def dump_error(error: BaseException | None) -> bytes:
    """An exception as bytes; one that cannot be pickled is replaced by its description."""
    from ray import cloudpickle

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
        self._address = address
        self._numbers = itertools.count()

    def request(self, frames: list, timeout: float | None, cancel: list | None = None) -> Frames | None:
        """Send and wait for the answer; None after the time limit (the request is then withdrawn)."""
        try:
            number = self._send(frames)
            answer = self._receive([number], timeout)
            if answer is None and cancel is not None:
                withdrawal = self._send([*cancel, number])
                answer = self._receive([number, withdrawal], HUB_S)  # the answer may have been on its way
                if answer is None:
                    raise ChannelTimeout(f"the channel hub did not answer for {HUB_S:g} s; has the driver ended?")
                if answer[0] == withdrawal:
                    return None
            return None if answer is None else answer[1:]
        except BaseException:  # the hub must not deliver to a request that nobody waits for any more
            self.close()
            raise

    def close(self) -> None:
        """Disconnect; the thread's next request connects anew."""
        self._socket.close(linger=0)
        _thread.__dict__["clients"].pop((os.getpid(), self._address), None)

    def _send(self, frames: list) -> bytes:
        number = str(next(self._numbers)).encode()
        self._socket.send_multipart([number, *frames], copy=False)
        return number

    def _receive(self, wanted: Collection[bytes], timeout: float | None) -> Frames | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while deadline is None or self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            answer = _receive(self._socket)
            if answer[0] in wanted:
                return answer
        return None


def _client(address: str) -> _Client:
    """This thread's connection to a hub; a forked child makes its own."""
    clients = _thread.__dict__.setdefault("clients", {})
    return clients.get((os.getpid(), address)) or clients.setdefault((os.getpid(), address), _Client(address))
