"""Bounded keyed queues between worker groups: many producers, many consumers, each item delivered once.

`Channel` is the handle that workers use; the queues lie in the hub. A producer waits for room and a consumer for an
item without spinning, and neither waits for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack

from scheduler import transport
from scheduler.connection import Endpoint, Frames, connect, dump_error, load_error, this_process
from scheduler.transport import Location

RECORDED_S = 0.001  # waits from this length on are in the trace, seconds

_thread = threading.local()


class ChannelClosed(Exception):
    """The channel was closed and holds no more items."""


class ChannelTimeout(TimeoutError):
    """Nothing happened within the time limit; the message names the channel and whom it waited for."""


class ChannelBroken(ConnectionError):
    """A message was lost on its way, for example because its sender's memory is gone."""


class Channel:
    """Handle of one channel; picklable, usable from any process and thread of the run.

    A worker's trace shows each wait of more than 1 ms with the transport and the bytes of the message, and the first
    message of each transport.

    Args:
        capacity: items the queue of one key holds before `put` waits.
        producers, consumers: names of the ends, for messages.
        receivers: where the consumers live, which decides how bytes move.
        timeout_s: default bound of every wait.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        capacity: int = 16,
        producers: str = "",
        consumers: str = "",
        receivers: tuple[Location, ...] = (),
        timeout_s: float = 600.0,
    ) -> None:
        self.name, self.capacity, self.timeout_s = name, capacity, timeout_s
        self.producers, self.consumers, self.receivers = producers, consumers, receivers
        self._endpoint = endpoint

    def put(self, item: Any, key: Any = None, timeout: float | None = None, weight: float = 1.0) -> None:
        """Queue an item; waits while the queue is full.

        Args:
            weight: what the item counts against the `max_weight` of a `get`, its tokens for example.

        Raises ChannelClosed (or the error the channel was closed with), ChannelTimeout.
        """
        if not 0 <= weight < float("inf"):
            raise ValueError(f"an item for channel '{self.name}' weighs {weight}; expected a finite number from 0 on")
        start = time.monotonic()
        frames = transport.pack(item, transport.choose(Location.here(self._endpoint.here), self.receivers))
        _thread.__dict__.setdefault("produced", {})[self.name] = self
        self._wait(b"put", key, 1, weight, frames, timeout, f"has been full; it is read by {self.consumers}")
        self._record("put into", start, [frames])

    def get(self, n: int = 1, key: Any = None, timeout: float | None = None, max_weight: float | None = None) -> Any:
        """Take one item, or, for n > 1, a list of n (fewer when the channel closes before).

        Args:
            max_weight: take fewer than n if the next item would make them heavier than this together; an item that
                is heavier alone comes alone. Of several consumers that wait, the one that has taken the least weight
                is served first.

        Raises ChannelClosed (or the error the channel was closed with) once it is closed and empty, ChannelTimeout,
        ChannelBroken (on both sides) if a message cannot be read.
        """
        if n < 1 or (max_weight is not None and not max_weight > 0):
            weight = "" if max_weight is None else f" of weight {max_weight}"
            raise ValueError(f"cannot take {n} items{weight} from channel '{self.name}'")
        start = time.monotonic()
        waiting = f"has been empty; it is filled by {self.producers}"
        reply = self._wait(b"get", key, n, max_weight, [], timeout, waiting)
        messages = []
        while reply:
            count = msgpack.unpackb(reply[0])
            messages.append(reply[1 : 1 + count])
            reply = reply[1 + count :]
        self._record("wait for", start, messages)
        items: list[Any] = []
        try:
            for frames in messages:
                items.append(transport.unpack(frames))
        except Exception as error:
            for frames in messages[len(items) + 1 :]:
                transport.discard(frames)
            lost = f"{this_process.name} could not read a message of channel '{self.name}': {error}"
            self.close(ChannelBroken(lost))
            raise ChannelBroken(lost) from error
        return items if n > 1 else items[0]

    def size(self, key: Any = None) -> int:
        """Items queued under the key now."""
        return int(msgpack.unpackb(self._request(b"size", self._head(key))[1]))

    def close(self, error: BaseException | None = None) -> None:
        """No more items will come. With an error, consumers and producers raise it, queued items are dropped."""
        self._request(b"close", self._head(None), dump_error(error))

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield self.get()
            except ChannelClosed:
                return

    def _head(self, key: Any, n: int = 1, weight: float | None = None) -> bytes:
        return msgpack.packb((self.name, self.capacity, this_process.name, key, n, weight))

    def _request(self, *frames: bytes) -> Frames:
        return self._endpoint.connect().request(list(frames))

    def _wait(
        self, verb: bytes, key: Any, n: int, weight: float | None, frames: list, timeout: float | None, waiting: str
    ) -> Frames:
        head = self._head(key, n, weight)
        limit = self.timeout_s if timeout is None else timeout
        status, *reply = self._endpoint.connect().request([verb, head, *frames], limit, cancel=[b"cancel", head])
        if status != b"ok" and verb == b"put":
            transport.discard(frames)
        if status == b"withdrawn":
            named = f"channel '{self.name}'" + ("" if key is None else f" (key {key!r})")
            seen = ", ".join(msgpack.unpackb(reply[0])) or "nobody"
            raise ChannelTimeout(f"{named} {waiting} (seen so far: {seen}): waited {limit:g} s")
        if status == b"failed":
            raise load_error(reply[0]) if reply[0] else ChannelClosed(f"channel '{self.name}' is closed")
        return reply

    def _record(self, what: str, start: float, messages: list[Frames]) -> None:
        trace, end = this_process.trace, time.monotonic()
        if trace is not None:
            name, (way, _) = f"{what} {self.name}", transport.describe(messages[0])
            if trace.is_first((name, way)) or end - start > RECORDED_S:
                nbytes = sum(transport.describe(frames)[1] for frames in messages)
                trace.add(name, start, end, "wait", transport=way, bytes=nbytes)


def fail_all(address: str, error: BaseException, for_good: bool = False) -> None:
    """Close every channel of a hub and refuse who waits for devices, so that nobody waits for one that has failed.

    Args:
        for_good: channels and locks used from now on fail as well, because the run cannot go on.
    """
    connect(address).request([b"fail_all", dump_error(error), b"1" if for_good else b""])


def take_produced() -> list[Channel]:
    """The channels this thread has put items into since the last call."""
    return list(_thread.__dict__.pop("produced", {}).values())
