"""What must hold while processes are killed and transports break at any moment."""

import mmap
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import psutil
import pytest
from probes import LARGE

from scheduler import connection
from scheduler.channel import Channel, ChannelBroken, take_produced
from scheduler.connection import Endpoint, HubLost
from scheduler.device_lock import DeviceLock
from scheduler.hub import Hub
from scheduler.shared_memory import Arena
from scheduler.transport import Location

SOON = 60.0  # a bound for "does not hang" on a busy machine
DEVICES, WORKERS, ROUNDS, KILLS = 6, 6, 1000, 150


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub("here", "127.0.0.1")
    yield hub
    hub.close()


# ---------------------------------------------------------------------------------------------- device locks


class Board:
    """Shared memory on which the processes below note who uses each device, and how many rounds each has done."""

    def __init__(self) -> None:
        self.numbers = np.frombuffer(mmap.mmap(-1, 8 * (DEVICES + WORKERS + 1)), np.int64)
        self.users, self.rounds = self.numbers[:DEVICES], self.numbers[DEVICES:-1]

    def stop(self) -> None:
        self.numbers[-1] = 1

    @property
    def stopped(self) -> bool:
        return bool(self.numbers[-1])


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def use_devices(lock: DeviceLock, board: Board, slot: int, seed: int) -> None:
    """Lease random sets, some twice, and check that no living process uses a device of them."""
    rng = random.Random(seed)
    connection.this_process.name = f"env[{slot}]"
    while not board.stopped:
        devices = rng.sample(range(DEVICES), rng.choice([1, 1, 2, 3, DEVICES]))
        with lock.lease(devices, timeout=SOON):
            for device in devices:
                user = int(board.users[device])
                assert user == 0 or not is_running(user), f"process {user} uses device {device}"
                board.users[device] = os.getpid()
            if rng.random() < 0.2:
                with lock.lease(devices[:1], timeout=SOON):
                    pass
            time.sleep(0.002 * rng.random())
            board.users[devices] = 0
        board.rounds[slot] += 1


def spawn(lock: DeviceLock, board: Board, slot: int, seed: int) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            use_devices(lock, board, slot, seed)
            status = 0
        finally:
            os._exit(status)
    return pid


def test_leases_survive_kills_without_deadlock_or_leak(hub: Hub) -> None:
    lock, board, rng = DeviceLock(hub.endpoint), Board(), random.Random(0)
    pids = [spawn(lock, board, slot, slot) for slot in range(WORKERS)]
    for kill in range(KILLS):
        time.sleep(0.02 * rng.random())
        slot = rng.randrange(WORKERS)
        os.kill(pids[slot], signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pids[slot], 0)[1]) == -signal.SIGKILL, "it had failed before"
        pids[slot] = spawn(lock, board, slot, WORKERS + kill)
    deadline = time.monotonic() + SOON
    while board.rounds.sum() < ROUNDS and time.monotonic() < deadline:
        time.sleep(0.01)
    board.stop()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * WORKERS
    assert board.rounds.sum() >= ROUNDS
    with lock.lease(range(DEVICES), timeout=SOON):
        assert hub._leases._waiting == []
    assert hub._leases._held == {}
    while set(hub._processes.values()) - {os.getpid()} and time.monotonic() < deadline + SOON:
        time.sleep(0.01)
    assert set(hub._processes.values()) == {os.getpid()}


# ---------------------------------------------------------------------------------------------- transports


@pytest.mark.parametrize("damage", ["cut", "removed", "cut after an earlier message"])
def test_a_block_that_is_damaged_under_way_breaks_the_channel_for_both(hub: Hub, damage: str, arena: Arena) -> None:
    channel = Channel("images", hub.endpoint, receivers=(Location("here", -1),), timeout_s=SOON)
    if "after" in damage:
        channel.put(np.zeros(LARGE))
        assert not channel.get().any()
    channel.put(np.zeros(LARGE))
    (block,) = arena.blocks
    block.path.unlink() if damage == "removed" else os.truncate(block.path, 4096)
    with pytest.raises(ChannelBroken, match="the driver could not read a message of channel 'images'"):
        channel.get()
    with pytest.raises(ChannelBroken, match="the driver could not read a message of channel 'images'"):
        channel.put(np.zeros(3))


class Cable:
    """TCP connections to the hub, of which the first breaks after so many bytes have gone to it."""

    def __init__(self, address: str, nbytes: int) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self.hub = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, args=(nbytes,), daemon=True).start()

    def _serve(self, nbytes: float) -> None:
        with self.listener, suppress(OSError):
            while True:
                near, far = self.listener.accept()[0], socket.create_connection(self.hub)
                threading.Thread(target=self._pass_on, args=(far, near, float("inf")), daemon=True).start()
                self._pass_on(near, far, nbytes)
                nbytes = float("inf")

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, left: float) -> None:
        with suppress(OSError):
            while left > 0 and (data := source.recv(int(min(65536, left)))):
                target.sendall(data)
                left -= len(data)
            for end in (source, target):
                end.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_breaks_within_a_message_raises_and_delivers_nothing(hub: Hub) -> None:
    assert hub.endpoint.remote
    cable = Cable(hub.endpoint.remote, nbytes=1_000_000)
    cut = Channel("images", Endpoint(cable.address, None, "here"), timeout_s=SOON)
    whole = Channel("images", hub.endpoint, timeout_s=SOON)
    cut.put("arrives")
    take_produced()
    with pytest.raises(HubLost, match="the connection to the hub broke"):
        cut.put(np.zeros(1_000_000))
    assert [channel.name for channel in take_produced()] == ["images"], "a worker closes it with its failure"
    assert whole.size() == 1
    cut.put("goes on")
    assert whole.get(n=2) == ["arrives", "goes on"]


def test_who_waits_learns_that_the_driver_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    driver = os.fork()
    if driver == 0:
        os.write(write, Hub("here").endpoint.local.encode())
        signal.pause()
    killing = threading.Timer(0.2, os.kill, (driver, signal.SIGKILL))
    try:
        channel = Channel("images", Endpoint(os.read(read, 1000).decode(), None, "here"), timeout_s=SOON)
        channel.put(1)
        assert channel.get() == 1
        monkeypatch.setattr(connection, "SILENCE_S", 1.0)
        monkeypatch.setattr(connection, "CHECK_S", 0.1)
    finally:
        killing.start()
    with pytest.raises(HubLost, match="has the driver ended"):
        channel.get()
    os.waitpid(driver, 0)
