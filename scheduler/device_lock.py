"""Leases on sets of devices, for workers that share them: who may use which devices now.

The `LeaseTable` decides; the hub keeps the one of a run. `DeviceLock` is the handle that workers use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgpack

from scheduler.connection import Endpoint, HubLost, connect, load_error, this_process


class DeviceTimeout(TimeoutError):
    """Devices were not free within the time limit; the message names who held them."""


class Holder(NamedTuple):
    """A process that leases devices; one that is started anew under the same name is another holder."""

    name: str
    host: str
    pid: int


class Request(NamedTuple):
    """What a holder asks for; the ticket is the caller's name for it."""

    ticket: Any
    holder: Holder
    devices: frozenset[int]


class LeaseTable:
    """Who holds which devices, and who waits for them.

    A request is granted whole or not at all, in the order of arrival: it waits while another holds a device of its
    set, or an earlier request waits for one, so a large set is not starved by small ones. A holder may lease again
    what it holds, but nothing else meanwhile: nobody who waits is waited for, so there is no deadlock.

    Methods that change the table return the requests granted by the change.
    """

    def __init__(self) -> None:
        self._held: dict[Holder, list[frozenset[int]]] = {}
        self._waiting: list[Request] = []

    def acquire(self, request: Request) -> list[Request]:
        """Ask for a lease. Raises ValueError for no devices, or for others than the holder already holds."""
        holder, devices = request.holder, request.devices
        held = self.devices(holder)
        if not devices:
            raise ValueError(f"{holder.name} asks for a lease of no devices")
        if held and not devices <= held:
            raise ValueError(
                f"{holder.name} holds devices {_text(held)} and asks for {_text(devices)}, which could deadlock: "
                "lease all of them at once"
            )
        self._waiting.append(request)
        return self._grant()

    def release(self, holder: Holder, devices: frozenset[int]) -> list[Request]:
        """End one lease. Raises ValueError if there is no such lease."""
        if devices not in self._held.get(holder, []):
            raise ValueError(f"{holder.name} holds no lease of devices {_text(devices)}")
        self._held[holder].remove(devices)
        if not self._held[holder]:
            del self._held[holder]
        return self._grant()

    def bury(self, is_dead: Callable[[Holder], bool]) -> list[Request]:
        """End every lease and request of the holders that have died."""
        self._held = {holder: leases for holder, leases in self._held.items() if not is_dead(holder)}
        self._waiting = [request for request in self._waiting if not is_dead(request.holder)]
        return self._grant()

    def cancel(self, ticket: Any) -> list[Request]:
        """Withdraw a request that waits."""
        self._waiting = [request for request in self._waiting if request.ticket != ticket]
        return self._grant()

    def cancel_all(self) -> list[Request]:
        """Withdraw every request that waits; returns them."""
        withdrawn, self._waiting = self._waiting, []
        return withdrawn

    def devices(self, holder: Holder) -> frozenset[int]:
        """What a holder holds."""
        return frozenset[int]().union(*self._held.get(holder, []))

    def is_wanted(self, holder: Holder, devices: frozenset[int]) -> bool:
        """Whether another holder waits for devices that the end of this lease would free."""
        others = self._held[holder].copy()
        others.remove(devices)
        freed = devices.difference(*others)
        return any(freed & request.devices for request in self._waiting if request.holder != holder)

    def obstacles(self, ticket: Any) -> str:
        """Whom a request that waits waits for, in words."""
        place = next((i for i, request in enumerate(self._waiting) if request.ticket == ticket), None)
        if place is None:
            return ""
        wanted = self._waiting[place].devices
        held = [(holder.name, "holds", self.devices(holder)) for holder in self._held]
        asked = [(request.holder.name, "asked before for", request.devices) for request in self._waiting[:place]]
        return ", ".join(
            f"{name} {does} {_text(devices & wanted)}" for name, does, devices in held + asked if devices & wanted
        )

    def _grant(self) -> list[Request]:
        granted, waiting = list[Request](), list[Request]()
        taken = frozenset[int]().union(*(self.devices(holder) for holder in self._held))
        for request in self._waiting:
            if request.devices.isdisjoint(taken) or request.devices <= self.devices(request.holder):
                self._held.setdefault(request.holder, []).append(request.devices)
                granted.append(request)
            else:
                waiting.append(request)
            taken |= request.devices
        self._waiting = waiting
        return granted


class DeviceLock:
    """Leases devices for this process; picklable, usable from any process and thread of the run.

    Args:
        timeout_s: default bound of every wait.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float = 600.0) -> None:
        self._endpoint, self.timeout_s = endpoint, timeout_s

    @contextmanager
    def lease(self, devices: Iterable[int], timeout: float | None = None) -> Iterator[None]:
        """Hold a set of devices; waits, in a fair order, until all of them are free.

        A worker's wait is recorded in its trace. The lease ends with the block, or with the process.
        Raises DeviceTimeout naming who holds them, ValueError if this process already holds other devices, and the
        error that ended the run.
        """
        limit = self.timeout_s if timeout is None else timeout
        wanted = sorted(set(devices))
        start = time.monotonic()
        reply = self._request(b"lease", wanted, limit)
        if this_process.trace:
            this_process.trace.add("wait for devices", start, time.monotonic(), "wait", devices=wanted)
        if reply[0] == b"withdrawn":
            raise DeviceTimeout(
                f"{this_process.name} waited {limit:g} s for devices {_text(wanted)}: {bytes(reply[1]).decode()}"
            )
        try:
            yield
        finally:
            self._request(b"release", wanted)

    def is_wanted(self, devices: Iterable[int]) -> bool:
        """Whether another holder waits for devices that the end of this process's lease would free."""
        return self._request(b"wanted", sorted(set(devices)))[1] == b"1"

    def _request(self, verb: bytes, devices: list[int], timeout: float | None = None) -> list:
        holder = Holder(this_process.name, self._endpoint.here, os.getpid())
        head = msgpack.packb((*holder, devices))
        client = self._endpoint.connect()
        reply = client.request([verb, head]) if timeout is None else client.request([verb, head], timeout, [b"unlease"])
        if reply[0] == b"failed":
            raise load_error(reply[1]) if reply[1] else HubLost("the hub has been closed")
        return reply


def release_dead(address: str, name: str) -> None:
    """End the leases and requests of a worker that has died, for workers on other hosts than the hub's."""
    connect(address).request([b"dead", name.encode()])


def _text(devices: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(devices)))
