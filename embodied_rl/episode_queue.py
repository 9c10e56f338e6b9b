"""Which episode of an evaluation runs next: every (task, trial) exactly once, whatever happens to the env processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

Key = tuple[int, int]  # task, trial
ATTEMPTS = 3


class EpisodeQueue:
    """Hands out episodes, those of one task together, since changing a simulator's task takes seconds.

    Args:
        tasks, trials: the episodes are all pairs of a task and a trial from 0 to trials - 1.
        done: those that an earlier session finished.
    """

    def __init__(self, tasks: Iterable[int], trials: int, done: Collection[Key] = ()) -> None:
        keys = [(task, trial) for task in dict.fromkeys(tasks) for trial in range(trials)]
        self._waiting: dict[int, deque[Key]] = {}
        for key in keys:
            if key not in done:
                self._waiting.setdefault(key[0], deque()).append(key)
        self._tried: dict[Key, int] = {}
        self._running: dict[int, int] = {}  # envs at work on each task

    def next(self, last_task: int | None = None) -> Key | None:
        """The next episode for an env that last ran `last_task`; None: there is none left to begin.

        Its own task if that has any left, else the task with the most waiting for each env at work on it.
        """
        if last_task is not None and self._running.get(last_task):
            self._running[last_task] -= 1
        if not self._waiting:
            return None
        task = last_task if last_task in self._waiting else self._neediest()
        assert task is not None
        key = self._waiting[task].popleft()
        if not self._waiting[task]:
            del self._waiting[task]
        self._running[task] = self._running.get(task, 0) + 1
        self._tried[key] = self._tried.get(key, 0) + 1
        return key

    def retry(self, key: Key) -> bool:
        """Put a crashed episode back; False: it was tried often enough and is an error."""
        if self._tried[key] >= ATTEMPTS:
            return False
        self._waiting.setdefault(key[0], deque()).append(key)
        return True

    def attempts(self, key: Key) -> int:
        """How often an episode was begun."""
        return self._tried[key]

    def _neediest(self) -> int:
        return max(self._waiting, key=lambda task: (len(self._waiting[task]) / (1 + self._running.get(task, 0)), -task))
