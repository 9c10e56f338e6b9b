"""Placement strings and what they mean on GPUs and on a CPU."""

import os

import pytest

from scheduler.placement import PlacementError, local_device_count, parse_placement

GROUPS = ("actor", "rollout", "env")


def ranks(text: str, devices: int, kind: str = "gpu", group: str = "actor") -> tuple:
    return parse_placement(text, devices, [group], kind)[group].ranks


def test_on_gpus_a_group_has_one_rank_for_each_device() -> None:
    assert ranks("actor: 1-3", 4) == ((1,), (2,), (3,))


def test_on_a_cpu_a_group_is_one_process_on_all_its_slots() -> None:
    assert ranks("actor: 1-3", 4, "cpu") == ((1, 2, 3),)


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_a_slash_gives_the_devices_of_one_rank(kind: str) -> None:
    assert ranks("actor: 0-3 / 2", 4, kind) == ((0, 1), (2, 3))


def test_all_is_every_device() -> None:
    assert ranks("actor: all", 3) == ((0,), (1,), (2,))


def test_devices_may_be_listed_in_any_order() -> None:
    assert ranks("actor: 3, 0-1", 4) == ((3,), (0,), (1,))


def test_groups_that_share_an_entry_share_its_devices() -> None:
    placed = parse_placement("env: 0; rollout, actor: 1", 2, GROUPS, "gpu")
    assert placed["rollout"].devices == placed["actor"].devices == (1,)
    assert placed["env"].devices == (0,)


def test_groups_come_back_in_the_order_they_were_asked_for() -> None:
    assert list(parse_placement("env: 0; rollout: 1; actor: 0", 2, GROUPS)) == list(GROUPS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor, rollout: all", "no devices given for env"),
        ("", "no devices given for actor, rollout, env"),
        ("actor, rollout, env, critic: all", "unknown worker group 'critic'; the groups are actor, rollout, env"),
        ("actor, rollout, env: all; env: 0", "worker group 'env' is placed twice"),
        ("actor, rollout, env", "has no ':'"),
        ("actor, rollout, env: 0-4", "device 4 does not exist; there are 4, numbered from 0"),
        ("actor, rollout, env: 2-1", "'2-1' runs backwards"),
        ("actor, rollout, env: 0, 0-1", "names a device twice"),
        ("actor, rollout, env: gpu0", "'gpu0' is not a device"),
        ("actor, rollout, env:", "'' is not a device"),
        ("actor, rollout, env: -1", "'-1' is not a device"),
        ("actor, rollout, env: 0-2/2", "3 devices do not divide into ranks of 2"),
        ("actor, rollout, env: all/0", "do not divide into ranks of 0"),
    ],
)
def test_a_fault_is_named(text: str, message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        parse_placement(text, 4, GROUPS)
    assert message in str(caught.value)


@pytest.mark.parametrize(("visible", "count"), [("0,2", 2), ("GPU-1f2e", 1)])
def test_visible_gpus_are_the_devices(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_device_count() == (count, "gpu")


@pytest.mark.parametrize("visible", ["", "-1"])
def test_without_visible_gpus_the_usable_cores_are_the_devices(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_device_count() == (len(os.sched_getaffinity(0)), "cpu")


def test_cpu_slots_win_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert local_device_count(cpu_slots=3) == (3, "cpu")
