from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.episode_queue import ATTEMPTS, EpisodeQueue, Key

TASKS = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)


@given(TASKS, st.integers(1, 7), st.integers(1, 9), st.data())
def test_every_task_and_trial_is_finished_once_whatever_crashes_and_however_often_it_is_interrupted(
    tasks: list[int], trials: int, envs: int, data: st.DataObject
) -> None:
    everything = {(task, trial) for task in tasks for trial in range(trials)}
    finished: list[Key] = []
    errors: list[Key] = []
    for _ in range(data.draw(st.integers(1, 3), "sessions")):
        queue = EpisodeQueue(tasks, trials, {*finished, *errors})
        running: list[Key | None] = [queue.next() for _ in range(envs)]
        while any(running):
            row = data.draw(st.sampled_from([row for row, key in enumerate(running) if key]), "who is done")
            key = running[row]
            assert key is not None
            what = data.draw(st.sampled_from(["finished", "finished", "crashed", "killed"]), "how")
            if what == "killed":
                break
            if what == "finished":
                finished.append(key)
            elif not queue.retry(key):
                assert queue.attempts(key) == ATTEMPTS
                errors.append(key)
            running[row] = queue.next(key[0])
    queue = EpisodeQueue(tasks, trials, {*finished, *errors})
    last: Key | None = None
    while last := queue.next(last[0] if last else None):
        finished.append(last)
    assert Counter(finished + errors) == Counter(everything)


@given(TASKS, st.integers(1, 7))
def test_an_env_stays_with_its_task_as_long_as_there_is_one_to_run(tasks: list[int], trials: int) -> None:
    queue = EpisodeQueue(tasks, trials)
    order: list[int] = []
    key = queue.next()
    while key:
        order.append(key[0])
        key = queue.next(key[0])
    changes = sum(before != after for before, after in zip(order, order[1:], strict=False))
    assert len(order) == len(tasks) * trials and changes == len(tasks) - 1


def test_envs_spread_over_the_tasks() -> None:
    queue = EpisodeQueue([0, 1, 2], 5)
    assert [key[0] for key in (queue.next(), queue.next(), queue.next()) if key] == [0, 1, 2]


def test_an_episode_that_crashes_again_and_again_is_an_error_and_the_others_go_on() -> None:
    queue = EpisodeQueue([4], 2)
    assert queue.next() == (4, 0)
    assert queue.retry((4, 0)) and queue.next(4) == (4, 1)
    assert queue.next(4) == (4, 0) and queue.retry((4, 0)) and queue.next(4) == (4, 0)
    assert not queue.retry((4, 0)) and queue.next(4) is None
