"""Channels whose items have a weight: bounds of a batch, and who gets how much."""

import pytest
from ends import Background, make, wait_until, waiters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.channel import ChannelClosed
from scheduler.hub import Hub, batch_size


def test_a_batch_stays_within_its_weight(hub: Hub) -> None:
    channel = make(hub)
    for weight in (3, 4, 5, 1):
        channel.put(weight, weight=weight)
    assert channel.get(n=3, max_weight=8) == [3, 4]
    channel.close()
    assert channel.get(n=3, max_weight=8) == [5, 1]


def test_an_item_heavier_than_the_weight_comes_alone(hub: Hub) -> None:
    channel = make(hub)
    channel.put("heavy", weight=100)
    assert channel.get(n=4, max_weight=8) == ["heavy"]
    channel.put("heavy", weight=100)
    assert channel.get(max_weight=8) == "heavy"


def test_a_batch_waits_until_it_is_full(hub: Hub) -> None:
    channel = make(hub, capacity=1)
    consumer = Background(lambda: channel.get(n=3, max_weight=8))
    channel.put("a", weight=3)
    assert consumer.waits
    channel.put("b", weight=5)
    assert consumer.result() == ["a", "b"]
    consumer = Background(lambda: channel.get(n=2, max_weight=8))
    for item in "cd":
        channel.put(item)
    assert consumer.result() == ["c", "d"]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(hub: Hub, weight: float) -> None:
    with pytest.raises(ValueError, match="an item for channel 'c' weighs"):
        make(hub).put(1, weight=weight)
    if weight <= 0 or weight != weight:
        with pytest.raises(ValueError, match="of weight"):
            make(hub).get(max_weight=weight)


def test_consumers_that_wait_are_balanced_by_weight(hub: Hub) -> None:
    channel = make(hub, capacity=1)
    weights = [7, 1, 1, 9, 2, 4, 4, 8, 1, 3]
    turns: list[tuple[str, int]] = []

    def take(name: str) -> None:
        while True:
            try:
                turns.append((name, channel.get(max_weight=1)))
            except ChannelClosed:
                return

    consumers = {name: Background(lambda name=name: take(name)) for name in ("x", "y")}  # type: ignore[misc]
    for taken, weight in enumerate(weights):
        assert wait_until(lambda taken=taken: len(turns) == taken and waiters(hub) == 2)  # type: ignore[misc]
        channel.put(weight, weight=weight)
    channel.close()
    assert all(consumer.result() is None for consumer in consumers.values())
    assert sorted(weight for _, weight in turns) == sorted(weights)
    totals = [sum(weight for name, weight in turns if name == one) for one in consumers]
    assert abs(totals[0] - totals[1]) <= max(weights)


def test_a_consumer_that_comes_late_does_not_take_everything(hub: Hub) -> None:
    channel = make(hub)
    channel.put(0, weight=1000)
    channel.get(max_weight=1)
    late = Background(lambda: channel.get(max_weight=1))
    assert wait_until(lambda: waiters(hub) == 1)
    assert list(hub._channels["c"].taken.values()) == [1000, 1000]
    channel.close()
    late.result()


@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 12)),
)
def test_batches_keep_the_order_and_the_bounds(weights: list[int], n: int, max_weight: int | None) -> None:
    left, batches = list(weights), []
    while left:
        count, full = batch_size(left, n, max_weight)
        assert count >= 1, "nothing can stall"
        batch, left = left[:count], left[count:]
        assert count <= n and (max_weight is None or count == 1 or sum(batch) <= max_weight)
        if not left and not full:  # one more weightless item would have fitted
            assert count < n and (max_weight is None or sum(batch) < max_weight)
        elif left:
            assert full
            joined = sum(batch) + left[0]
            assert count == n or (max_weight is not None and (joined > max_weight or sum(batch) >= max_weight))
        batches.append(batch)
    assert [weight for batch in batches for weight in batch] == weights


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), max_size=20), st.integers(1, 4), st.integers(1, 12))
def test_each_weighted_item_is_delivered_once_and_in_order(
    hub: Hub, items: list[tuple[int, int]], n: int, max_weight: int
) -> None:
    channel = make(hub, f"c{len(hub._channels)}", capacity=3)

    def consume(key: int) -> list[int]:
        got: list[int] = []
        while True:
            try:
                batch = channel.get(n, key, max_weight=max_weight)
            except ChannelClosed:
                return got
            got += batch if n > 1 else [batch]

    consumers = [Background(lambda key=key: consume(key)) for key in (0, 1)]  # type: ignore[misc]
    for place, (weight, key) in enumerate(items):
        channel.put(place, key, weight=weight)
    channel.close()
    for key, consumer in enumerate(consumers):
        assert consumer.result() == [place for place, (_, of) in enumerate(items) if of == key]
