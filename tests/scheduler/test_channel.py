"""Channels: order, bounds, closing, errors, and that each item is delivered once whatever ends in between.

The hub is real; consumers and producers are threads of this process or processes of their own. No Ray.
"""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ends import Background, await_farewell, connections, make, wait_until, waiters
from probes import LARGE, consume, produce, wait_for_items

from scheduler import channel as channels
from scheduler import connection
from scheduler.channel import Channel, ChannelBroken, ChannelClosed, ChannelTimeout, fail_all
from scheduler.connection import Endpoint, HubLost
from scheduler.hub import Hub
from scheduler.shared_memory import Arena
from scheduler.trace import Trace
from scheduler.transport import Location

SPAWN = multiprocessing.get_context("spawn")


# ---------------------------------------------------------------------------------------------- order and bounds


def test_items_come_out_in_the_order_they_went_in(hub: Hub) -> None:
    channel = make(hub)
    for i in range(5):
        channel.put({"i": i})
    assert [channel.get()["i"] for _ in range(5)] == list(range(5))


@pytest.mark.parametrize("key", [0, "env[0]", (0, "left"), b"\0", None, True])
def test_each_key_has_a_queue_of_its_own(hub: Hub, key: Any) -> None:
    channel = make(hub)
    channel.put("other", key="other")
    channel.put("mine", key=key)
    assert channel.size(key) == 1
    assert channel.get(key=key) == "mine"
    assert channel.size(key) == 0 and channel.size("other") == 1


def test_a_key_that_cannot_be_one_is_refused_and_the_hub_goes_on(hub: Hub) -> None:
    channel = make(hub)
    with pytest.raises(TypeError):
        channel.put(1, key={"env": 0})
    with pytest.raises(TypeError):
        channel.get(key=np.int64(1))
    channel.put(1)
    assert channel.get() == 1


def test_several_items_are_taken_at_once(hub: Hub) -> None:
    channel = make(hub)
    for i in range(3):
        channel.put(i)
    assert channel.get(n=2) == [0, 1]
    assert channel.get() == 2


def test_taking_no_items_is_refused(hub: Hub) -> None:
    with pytest.raises(ValueError, match="cannot take 0 items from channel 'c'"):
        make(hub).get(n=0)


def test_more_items_than_the_capacity_can_be_taken_at_once(hub: Hub) -> None:
    channel = make(hub, capacity=2)
    consumer = Background(lambda: channel.get(n=5))
    for i in range(5):
        channel.put(i, timeout=10)
    assert consumer.result() == [0, 1, 2, 3, 4]


def test_a_producer_waits_while_the_queue_is_full(hub: Hub) -> None:
    channel = make(hub, capacity=2)
    channel.put(0)
    channel.put(1)
    producer = Background(lambda: channel.put(2))
    assert producer.waits
    assert channel.size() == 2
    assert channel.get() == 0
    assert producer.result() is None
    assert channel.get(n=2) == [1, 2]


def test_a_full_queue_of_one_key_does_not_hold_up_another(hub: Hub) -> None:
    channel = make(hub, capacity=1)
    channel.put(0, key="full")
    channel.put(1, key="free", timeout=10)
    assert channel.get(key="free") == 1


def test_waiting_costs_no_processor_time(hub: Hub) -> None:
    channel = make(hub, capacity=1)
    channel.put(0)
    waiting = [Background(lambda: channel.put(1)), Background(lambda: channel.get(key="empty"))]
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.5
    channel.close()
    assert all(isinstance(one.result(), ChannelClosed) for one in waiting)


# ---------------------------------------------------------------------------------------------- time limits


def test_a_get_that_takes_too_long_names_the_channel_and_its_producers(hub: Hub) -> None:
    with pytest.raises(
        ChannelTimeout, match=r"'c' \(key 3\) has been empty; it is filled by env \(seen so far: nobody\): waited 0.1 s"
    ):
        make(hub).get(key=3, timeout=0.1)


def test_a_put_that_takes_too_long_names_the_channel_and_its_consumers(hub: Hub) -> None:
    channel = make(hub, capacity=1)
    channel.put(0)
    with pytest.raises(
        ChannelTimeout, match=r"channel 'c' has been full; it is read by actor \(seen so far: nobody\): waited 0.1 s"
    ):
        channel.put(1, timeout=0.1)


def test_a_time_out_names_the_peers_that_have_been_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = make(hub, capacity=1)
    for name in ("env[2]", "env[0]"):
        monkeypatch.setattr(connection.this_process, "name", name)
        channel.put(name)
        channel.get()
    with pytest.raises(ChannelTimeout, match=r"it is filled by env \(seen so far: env\[0\], env\[2\]\): waited"):
        channel.get(timeout=0.1)
    channel.put(0)
    with pytest.raises(ChannelTimeout, match=r"it is read by actor \(seen so far: env\[0\], env\[2\]\): waited"):
        channel.put(1, timeout=0.1)


def test_the_default_time_limit_is_the_channels(hub: Hub) -> None:
    channel = make(hub)
    channel.timeout_s = 0.1
    with pytest.raises(ChannelTimeout, match="waited 0.1 s"):
        channel.get()


def test_a_get_that_timed_out_takes_nothing_later(hub: Hub) -> None:
    channel = make(hub)
    for timeout in (0.1, 0.0):
        with pytest.raises(ChannelTimeout):
            channel.get(timeout=timeout)
    channel.put("kept")
    assert channel.get() == "kept"


def test_a_put_that_timed_out_delivers_nothing_later(hub: Hub) -> None:
    channel = make(hub, capacity=1)
    channel.put("first")
    with pytest.raises(ChannelTimeout):
        channel.put("late", timeout=0.1)
    assert channel.get() == "first"
    with pytest.raises(ChannelTimeout):
        channel.get(timeout=0.2)


def test_a_put_that_timed_out_frees_its_shared_memory(hub: Hub, arena: Arena) -> None:
    channel = make(hub, capacity=1, receivers=(Location("here", -1),))
    channel.put(0)
    with pytest.raises(ChannelTimeout):
        channel.put(np.zeros(LARGE), timeout=0.1)
    assert [block.is_free() for block in arena.blocks] == [True]


def test_no_item_is_lost_or_doubled_when_gets_time_out_all_the_time(hub: Hub) -> None:
    channel = make(hub)

    def impatient() -> list[int]:
        got: list[int] = []
        while True:
            try:
                got.append(channel.get(timeout=0.001))
            except ChannelTimeout:
                continue
            except ChannelClosed:
                return got

    consumers = [Background(impatient) for _ in range(3)]
    for i in range(200):
        channel.put(i)
        time.sleep(0.001)
    channel.close()
    assert sorted(i for consumer in consumers for i in consumer.result()) == list(range(200))


def test_an_interrupted_get_takes_nothing_later(hub: Hub) -> None:
    channel, here = make(hub), threading.get_ident()
    channel.size()
    connected = connections(hub)

    def interrupt() -> None:
        assert wait_until(lambda: waiters(hub) == 1)
        signal.pthread_kill(here, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupting = Background(interrupt)
            channel.get()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupting.result() is None
    await_farewell(hub, connected)
    channel.put("kept")
    assert channel.get(timeout=5) == "kept"


# ---------------------------------------------------------------------------------------------- many ends


def test_processes_and_threads_get_each_item_once(hub: Hub) -> None:
    channel = make(hub, "items", capacity=3, receivers=(Location("here", -1),))
    results = make(hub, "results")
    processes = [
        SPAWN.Process(target=produce, args=(channel, 0, 100)),
        SPAWN.Process(target=consume, args=(channel, results)),
    ]
    for process in processes:
        process.start()
    consumers = [Background(lambda: consume(channel, results)) for _ in range(2)]
    producers = [Background(lambda first=first: produce(channel, first, 100)) for first in (100, 200)]  # type: ignore[misc]
    assert [producer.result() for producer in producers] == [None, None]
    processes[0].join(60)
    channel.close()
    got = results.get(n=3)
    assert [consumer.result() for consumer in consumers] == [None, None]
    processes[1].join(60)
    assert sorted(i for part in got for i in part) == list(range(300))


def test_items_of_a_process_that_has_nothing_more_to_do_arrive(hub: Hub) -> None:
    channel = make(hub, receivers=(Location("here", -1),))
    process = SPAWN.Process(target=produce, args=(channel, 0, 3))
    process.start()
    assert wait_until(lambda: channel.size() == 3)
    time.sleep(1.0)  # in which it would end
    assert [(i, int(array.sum())) for i, array in channel.get(n=3)] == [(i, i * LARGE) for i in range(3)]
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_consumer_killed_while_it_waits_takes_nothing(hub: Hub, n: int) -> None:
    channel = make(hub)
    process = SPAWN.Process(target=wait_for_items, args=(channel, n))
    process.start()
    assert wait_until(lambda: waiters(hub) == 1)
    connected = connections(hub)
    process.kill()
    process.join()
    await_farewell(hub, connected)
    for i in range(3):
        channel.put(i)
    assert channel.get(n=3, timeout=10) == [0, 1, 2]


def test_a_forked_child_uses_channels_of_its_parent(hub: Hub) -> None:
    channel = make(hub)
    channel.put("before")
    child = os.fork()
    if child == 0:
        channel.put("from the child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert channel.get(n=2, timeout=10) == ["before", "from the child"]


# ---------------------------------------------------------------------------------------------- closing


def test_iteration_ends_when_the_channel_is_closed_and_empty(hub: Hub) -> None:
    channel = make(hub)
    for i in range(3):
        channel.put(i)
    channel.close()
    assert list(channel) == [0, 1, 2]


def test_a_closed_channel_takes_nothing(hub: Hub) -> None:
    channel = make(hub)
    channel.close()
    with pytest.raises(ChannelClosed, match="channel 'c' is closed"):
        channel.put(1)


def test_closing_releases_whoever_waits(hub: Hub) -> None:
    channel = make(hub, capacity=1)
    channel.put(0)
    waiting = [Background(lambda: channel.put(1)), Background(lambda: channel.get(key="empty"))]
    assert all(one.waits for one in waiting)
    channel.close()
    assert all(isinstance(one.result(), ChannelClosed) for one in waiting)


def test_closing_gives_a_consumer_of_several_what_there_is(hub: Hub) -> None:
    channel = make(hub)
    consumer = Background(lambda: channel.get(n=3))
    channel.put(0)
    assert consumer.waits
    channel.close()
    assert consumer.result() == [0]


def test_an_error_reaches_consumers_and_producers(hub: Hub) -> None:
    channel = make(hub, capacity=1)
    waiting = [Background(lambda: channel.get(key="a")), Background(lambda: list(channel))]
    assert all(one.waits for one in waiting)
    channel.close(ValueError("no such object"))
    for one in waiting:
        assert isinstance(one.result(), ValueError) and str(one.result()) == "no such object"
    with pytest.raises(ValueError, match="no such object"):
        channel.put(1)
    with pytest.raises(ValueError, match="no such object"):
        channel.get(key="new")


def test_an_error_overtakes_what_is_queued(hub: Hub, arena: Arena) -> None:
    channel = make(hub, receivers=(Location("here", -1),))
    channel.put(np.zeros(LARGE))
    channel.close(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        channel.get()
    assert arena.blocks[0].is_free()


def test_an_error_after_a_normal_close_is_raised_for_what_it_dropped(hub: Hub) -> None:
    channel = make(hub)
    channel.put(0)
    channel.close()
    channel.close(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        list(channel)


def test_the_first_error_stays(hub: Hub) -> None:
    channel = make(hub)
    channel.close(ValueError("first"))
    channel.close(KeyError("second"))
    with pytest.raises(ValueError, match="first"):
        channel.get()


def test_an_error_that_cannot_be_pickled_is_described(hub: Hub) -> None:
    error = ValueError("broken")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    channel = make(hub)
    channel.close(error)
    with pytest.raises(RuntimeError, match="ValueError: broken"):
        channel.get()


def test_the_memory_of_messages_after_one_that_cannot_be_read_is_free(hub: Hub, arena: Arena) -> None:
    channel = make(hub, receivers=(Location("here", -1),))
    for _ in range(3):
        channel.put(np.zeros(LARGE))
    arena.blocks[1].path.unlink()
    with pytest.raises(ChannelBroken, match="the driver could not read a message of channel 'c'"):
        channel.get(n=3)
    assert [block.is_free() for block in arena.blocks] == [True, False, True]


def test_an_error_drops_messages_whose_memory_has_gone(hub: Hub, arena: Arena) -> None:
    channel = make(hub, receivers=(Location("here", -1),))
    channel.put(np.zeros(LARGE))
    arena.close()
    channel.close(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        channel.get()


def test_failing_all_closes_every_channel_there_is(hub: Hub) -> None:
    waiting = [Background(lambda name=name: make(hub, name).get()) for name in ("a", "b")]  # type: ignore[misc]
    assert wait_until(lambda: waiters(hub, "a") == waiters(hub, "b") == 1)
    fail_all(hub.endpoint.local, ValueError("gone"))
    assert all(isinstance(one.result(), ValueError) for one in waiting)
    make(hub, "new").put(1)


def test_failing_all_for_good_closes_channels_not_used_before(hub: Hub) -> None:
    fail_all(hub.endpoint.local, ValueError("gone"), for_good=True)
    with pytest.raises(ValueError, match="gone"):
        make(hub, "new").get()


def test_closing_the_hub_releases_whoever_waits() -> None:
    hub = Hub("here")
    directory = Path(hub._directory.name)
    waiting = Background(lambda: make(hub).get())
    assert wait_until(lambda: waiters(hub) == 1)
    hub.close()
    hub.close()
    assert isinstance(waiting.result(), ChannelClosed)
    assert not directory.exists()


def test_closing_the_hub_frees_the_memory_of_what_nobody_took(arena: Arena) -> None:
    hub = Hub("here")
    make(hub, receivers=(Location("here", -1),)).put(np.zeros(LARGE))
    assert not arena.blocks[0].is_free()
    hub.close()
    assert arena.blocks[0].is_free()


def test_without_a_hub_a_wait_ends_and_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.2)
    channel = Channel("c", Endpoint(f"ipc://{hub._directory.name}/nobody", None, "here"), timeout_s=0.2)
    with pytest.raises(HubLost, match="the hub has not answered"):
        channel.get()


# ---------------------------------------------------------------------------------------------- ways


def test_an_item_for_this_process_is_passed_by_reference(hub: Hub) -> None:
    channel = make(hub, receivers=(Location.here("here"),))
    item = [object()]
    channel.put(item)
    assert channel.get() is item


def test_ends_on_different_hosts_meet_over_tcp(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.this_process, "host", "elsewhere")
    hub = Hub("here", "127.0.0.1")
    try:
        endpoint = Endpoint(f"ipc://{hub._directory.name}/nobody", hub.endpoint.remote, "here")
        channel = Channel("c", endpoint, receivers=(Location("here", -1),), timeout_s=30)
        sent = np.arange(LARGE * 50)
        channel.put({"array": sent})
        got = channel.get()["array"]
        np.testing.assert_array_equal(got, sent)
        assert got.flags.writeable
        assert not arena.blocks
    finally:
        monkeypatch.undo()
        hub.close()


def test_ends_on_a_host_of_their_own_share_its_memory(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.this_process, "host", "elsewhere")
    hub = Hub("here", "127.0.0.1")
    try:
        channel = Channel("c", Endpoint("ipc://", hub.endpoint.remote, "here"), receivers=(Location("elsewhere", -1),))
        channel.put(np.arange(LARGE))
        np.testing.assert_array_equal(channel.get(timeout=10), np.arange(LARGE))
        assert len(arena.blocks) == 1
    finally:
        monkeypatch.undo()
        hub.close()


# ---------------------------------------------------------------------------------------------- the trace


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.setattr(connection.this_process, "trace", trace := Trace("env[0]"))
    return trace


@pytest.mark.parametrize(
    ("receivers", "way"),
    [((), "inline"), ((Location("here", -1),), "shared_memory"), ((Location.here("here"),), "reference")],
)
def test_the_trace_shows_the_transport_and_the_bytes(
    hub: Hub, trace: Trace, arena: Arena, receivers: tuple[Location, ...], way: str
) -> None:
    channel = make(hub, receivers=receivers)
    channel.put(np.zeros(LARGE))
    channel.get()
    put, got = trace.drain()
    assert (put.track, put.name, put.category) == ("env[0]", "put into c", "wait")
    assert (got.track, got.name, got.category) == ("env[0]", "wait for c", "wait")
    assert put.args == got.args and put.args["transport"] == way
    payload = 0 if way == "reference" else 8 * LARGE
    assert payload <= put.args["bytes"] < payload + 1000


def test_every_long_wait_is_in_the_trace_and_of_the_short_ones_the_first(hub: Hub, trace: Trace) -> None:
    channel = make(hub)
    channel.put(0)
    trace.drain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "RECORDED_S", 30.0)
        for i in range(5):
            channel.put(i)
            channel.get()
    assert [event.name for event in trace.drain()] == ["put into c", "wait for c"]
    channel.get()

    def put_later() -> None:
        assert wait_until(lambda: waiters(hub) == 1)
        time.sleep(0.1)
        channel.put(1)

    for _ in range(2):
        later = Background(put_later)
        channel.get()
        assert later.result() is None
    waits = [event.end - event.start for event in trace.drain() if event.name == "wait for c"]
    assert len(waits) == 3 and min(waits[1:]) > 0.05
