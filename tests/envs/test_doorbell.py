"""Chunks that begin by doorbells do what the pool does, and what goes wrong the server finds out."""

import gc
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from served import TOY, Start, actions, assert_equal, connect, forget_session, wait_until

from envs import doorbell, remote, session
from envs.base import EnvSettings, episode_seed
from envs.client import RemotePool
from envs.doorbell import Doorbell, Doorbells
from envs.pool import MAX_REPLACEMENTS, EnvPool
from envs.remote import RemoteVectorEnv
from envs.server import EnvServer


@pytest.fixture
def served(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EnvServer, RemotePool]]:
    """A server whose envs do as files say, and a session of it."""
    monkeypatch.setitem(session.CLIENT_OPTIONS, "toy:Toy", ("faults",))
    server = start(step_timeout_s=100)
    pool = connect(server)
    yield server, pool
    pool.close()


def requests(pool: RemotePool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the pool asks the server for from now on; its signs of life are not in it."""
    send, sent = pool.send, list[str]()
    monkeypatch.setattr(pool, "send", lambda op, **fields: (sent.append(op), send(op, **fields))[1])
    return sent


def test_after_the_first_chunk_the_server_is_asked_only_where_an_episode_ended(
    served: tuple[EnvServer, RemotePool], shared_pool: EnvPool, faulty: EnvSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, pool = served
    monkeypatch.setattr(remote, "RUNG_S", 60.0)  # a chunk that takes long on a busy machine is asked about
    options = {"chunk": 2, "seed": 5, "record_actions": True}
    own, twin = (where.vector_env(faulty, range(4), **options) for where in (pool, shared_pool))
    for env in (own, twin):
        env.reset()
    sent, asked, ended = requests(pool, monkeypatch), [], []
    for t in range(25):
        result = own.chunk_step(actions(own, 2, t))
        asked.append(len(sent))
        sent.clear()
        ended.append(len(result.episodes) > 0)
        assert_equal(result, twin.chunk_step(actions(own, 2, t)))
        assert [number for number, *_ in result.spans] == [0, 1]
        assert all(start <= end and cpu >= 0 for _, start, end, cpu in result.spans)
    assert any(ended) and not all(ended[1:])
    assert asked == [1, *(int(one) for one in ended[1:])]
    twin.close()


def test_a_slow_chunk_is_run_once_and_its_outcome_had_from_the_server(
    served: tuple[EnvServer, RemotePool], shared_pool: EnvPool, faulty: EnvSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pool = served
    monkeypatch.setattr(remote, "RUNG_S", 0.0)
    sets = [where.vector_env(faulty, range(4), chunk=5, seed=2) for where in (pool, pool, shared_pool, shared_pool)]
    for env in sets:
        env.reset()
    for t in range(10):
        for env in sets:
            env.chunk_step_async(actions(env, 5, t))
        first, second, *right = [env.chunk_step_wait() for env in sets]
        assert_equal(first, right[0])
        assert_equal(second, right[1])
    for env in sets[2:]:
        env.close()


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_process_that_fails_in_a_chunk_is_replaced_and_rung_again(
    served: tuple[EnvServer, RemotePool],
    faulty: EnvSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    server, pool = served
    one, other = (pool.vector_env(faulty, range(2), seed=3) for _ in range(2))
    for env in (one, other):
        env.reset()
        env.chunk_step(actions(env, 1))
    (tmp_path / "step").write_text(f"once {how}")
    for env in (one, other):
        env.chunk_step_async(actions(env, 1))
    results = [env.chunk_step_wait() for env in (one, other)]
    lost = np.stack([result.lost for result in results])
    assert pool.replaced == 1 and pool.lost_episodes == 2
    assert lost.sum() == 2 and not np.stack([result.valid[:, 0] for result in results])[lost].any()
    failed = int(np.flatnonzero(lost.any(axis=0))[0])
    assert lost[:, failed].all()  # both sets had an episode in the process
    monkeypatch.setattr(remote, "RUNG_S", 60.0)
    for env in (one, other):
        assert env.chunk_step(actions(env, 1)).valid.all()
        sent = requests(pool, monkeypatch)
        assert not env.chunk_step(actions(env, 1)).lost.any()
        assert sent == []


def test_a_process_that_stops_is_replaced_when_its_time_is_over(
    served: tuple[EnvServer, RemotePool], faulty: EnvSettings, tmp_path: Path
) -> None:
    server, pool = served
    env = pool.vector_env(faulty, range(2), seed=3)
    env.reset()
    env.chunk_step(actions(env, 1))
    (session,) = server.sessions.values()
    assert session.pool is not None
    (tmp_path / "step").write_text(f"once stop {episode_seed(3, 0, 0)}")
    env.chunk_step_async(actions(env, 1))
    env._ask_for_chunk()  # as if it had been waited for
    wait_until(lambda: bool(session.pool.processes[1].peek(session.sets[env.key].key)))  # it may take its time
    usual, session.pool.timeout_s = session.pool.timeout_s, 1.5
    assert usual == 100
    began = time.monotonic()
    assert env.chunk_step_wait().lost.tolist() == [True, False] and pool.replaced == 1
    assert time.monotonic() - began < usual / 2
    session.pool.timeout_s = usual
    assert env.chunk_step(actions(env, 1)).valid.all()


def test_chunks_that_were_rung_for_count_as_finished_between_the_deaths_of_a_process(
    served: tuple[EnvServer, RemotePool], faulty: EnvSettings
) -> None:
    server, pool = served
    env = pool.vector_env(replace(faulty, ignore_terminations=True), range(2))
    env.reset()
    for death in range(2 * MAX_REPLACEMENTS):
        for _ in range(3):
            assert env.chunk_step(actions(env, 1)).valid.all()
        (owner,) = [one.pool for one in server.sessions.values() if one.pool]
        owner.processes[0].popen.kill()
        assert env.chunk_step(actions(env, 1)).lost.tolist() == [True, False]
        assert pool.replaced == death + 1


@pytest.mark.parametrize("auto_reset", [True, False])
def test_a_chunk_that_was_answered_stays_as_it_was_when_its_process_is_lost_to_another_set(
    served: tuple[EnvServer, RemotePool], shared_pool: EnvPool, faulty: EnvSettings, auto_reset: bool
) -> None:
    server, pool = served
    short = replace(faulty, horizon=2)
    one, other = (pool.vector_env(short, range(2), chunk=4, seed=3, auto_reset=auto_reset) for _ in range(2))
    twin = shared_pool.vector_env(short, range(2), chunk=4, seed=3, auto_reset=auto_reset)
    for env in (one, other, twin):
        env.reset()
    one.chunk_step_async(actions(one, 4))
    (session,) = [session for session in server.sessions.values() if one.key in session.sets]
    wait_until(lambda: one.key in session.stepping or len(session.replies) > 5)
    wait_until(lambda: one.key not in session.stepping)
    assert session.pool is not None
    session.pool.processes[0].popen.kill()
    assert other.chunk_step(actions(other, 4)).lost.tolist() == [True, False]
    result, right = one.chunk_step_wait(), twin.chunk_step(actions(one, 4))
    for name in ("reward", "truncated", "valid", "ended", "lost"):
        np.testing.assert_array_equal(getattr(result, name), getattr(right, name), err_msg=name)
    np.testing.assert_array_equal(result.final_observation["state"], right.final_observation["state"])
    assert len(result.episodes) == 2
    assert one.chunk_step(actions(one, 4)).lost.tolist() == [auto_reset, False]
    assert pool.lost_episodes == 1 + auto_reset
    twin.close()


def test_a_session_lost_between_chunks_of_two_sets_costs_each_its_running_episodes(
    served: tuple[EnvServer, RemotePool], faulty: EnvSettings
) -> None:
    server, pool = served
    one, other = (pool.vector_env(faulty, range(2), chunk=4, seed=3) for _ in range(2))
    for env in (one, other):
        env.reset()
        env.chunk_step(actions(env, 4))
        env.chunk_step_async(actions(env, 4))
    (key,) = server.sessions
    gone = forget_session(server)
    assert gone.pool is not None
    for process in gone.pool.processes:
        process.kill()
    results = [env.chunk_step_wait() for env in (one, other)]
    told = sum(int(result.lost.sum()) for result in results)
    if told < 4:  # a chunk was done before its process died: the next one tells
        told += sum(int(env.chunk_step(actions(env, 4)).lost.sum()) for env in (one, other))
    assert told == pool.lost_episodes == 4 and key not in server.sessions
    assert all(env.chunk_step(actions(env, 4)).valid[:, 0].all() for env in (one, other))


@pytest.mark.parametrize("rung", [True, False])
def test_an_episode_that_a_lost_session_had_lost_before_is_told(
    served: tuple[EnvServer, RemotePool], faulty: EnvSettings, rung: bool
) -> None:
    server, pool = served
    one, other = (pool.vector_env(faulty, range(2), chunk=1, seed=3, auto_reset=False) for _ in range(2))
    for env in (one, other):
        env.reset()
        env.chunk_step(actions(env, 1))
    (owner,) = [one.pool for one in server.sessions.values() if one.pool]
    if rung:
        one.chunk_step_async(actions(one, 1))
    owner.processes[0].popen.kill()
    assert other.chunk_step(actions(other, 1)).lost.tolist() == [True, False]
    forget_session(server)
    owner.close()
    if not rung:
        one.chunk_step_async(actions(one, 1))
    assert one.chunk_step_wait().lost.all()
    assert other.chunk_step(actions(other, 1)).lost.tolist() == [False, True]
    for env in (one, other):
        result = env.chunk_step(actions(env, 1))
        assert not result.lost.any() and not result.valid.any()
        env.reset()
        assert env.chunk_step(actions(env, 1)).valid.all()


@pytest.mark.parametrize("is_read", [True, False])
def test_an_episode_that_was_lost_after_a_chunk_was_answered_is_told_by_the_next(
    served: tuple[EnvServer, RemotePool], faulty: EnvSettings, is_read: bool
) -> None:
    server, pool = served
    one, other = (pool.vector_env(faulty, range(2), seed=3, auto_reset=False) for _ in range(2))
    for env in (one, other):
        env.reset()
    one.chunk_step_async(actions(one, 1))
    (session,) = server.sessions.values()
    wait_until(lambda: other.state() is not None and one._step.reply is not None)  # type: ignore[union-attr]
    assert session.pool is not None
    session.pool.processes[0].popen.kill()
    assert other.chunk_step(actions(other, 1)).lost.tolist() == [True, False]
    if is_read:
        assert one.chunk_step_wait().valid.all()
    forget_session(server)
    session.pool.close()
    assert other.chunk_step(actions(other, 1)).lost.tolist() == [False, True]
    if not is_read:
        assert one.chunk_step_wait().valid.all()
    assert one.chunk_step(actions(one, 1)).lost.all()
    assert not one.chunk_step(actions(one, 1)).lost.any()


@pytest.mark.parametrize("by", ["shared memory", "wire"])
@pytest.mark.parametrize("auto_reset", [True, False])
def test_a_chunk_that_was_answered_outlives_its_session(
    start: Start, shared_pool: EnvPool, monkeypatch: pytest.MonkeyPatch, by: str, auto_reset: bool
) -> None:
    if by == "wire":
        monkeypatch.setattr(remote, "map_shared", lambda *_: None)
    server = start()
    pool, short = connect(server), EnvSettings("toy:Toy", "Toy", horizon=6, ignore_terminations=True)
    options = {"chunk": 4, "seed": 3, "auto_reset": auto_reset}
    one, other = (pool.vector_env(short, range(2), **options) for _ in range(2))
    twin = shared_pool.vector_env(short, range(2), **options)
    for env in (one, other, twin):
        env.reset()
    twin.chunk_step(actions(one, 4))
    one.chunk_step(actions(one, 4))
    one.listen([])
    one.chunk_step_async(actions(one, 4))
    wait_until(lambda: other.state() is not None and one._step.reply is not None)  # type: ignore[union-attr]
    for _ in range(2):  # the session is lost, and lost again
        gone = forget_session(server)
        assert gone.pool is not None
        for process in gone.pool.processes:
            process.kill()
        other.chunk_step(actions(other, 4))
    assert_equal(one.chunk_step_wait(), twin.chunk_step(actions(one, 4)))
    after = one.chunk_step(actions(one, 4))
    assert after.lost.tolist() == [auto_reset] * 2 and not after.valid.any()
    assert one.chunk_step(actions(one, 4)).valid[:, 0].tolist() == [auto_reset] * 2
    assert [slot["number"] for slot in one.state()] == [4 if auto_reset else 1] * 2
    pool.close()
    twin.close()


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_set_can_be_dropped_where_its_session_is_lost(
    served: tuple[EnvServer, RemotePool], faulty: EnvSettings, in_flight: bool
) -> None:
    server, pool = served
    one, other = (pool.vector_env(faulty, range(2), seed=3) for _ in range(2))
    for env in (one, other):
        env.reset()
    gone = forget_session(server)
    assert gone.pool is not None
    gone.pool.close()
    if in_flight:
        one.chunk_step_async(actions(one, 1))
    one.close()
    assert other.chunk_step(actions(other, 1)).lost.all()
    assert other.chunk_step(actions(other, 1)).valid.all()


def test_a_place_that_is_no_pipe_is_not_opened(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    with victim.open() as file, pytest.raises(OSError, match="is not the pipe"):
        Doorbells([[0, os.getpid(), file.fileno(), str(victim), file.fileno(), str(victim)]])
    bell = Doorbell()
    pid, rung, name, answer, other = bell.place
    for place in (
        [pid, rung, other, answer, other],
        [pid, rung, name, answer, "pipe:[1]"],
        [2**22 + 1, *bell.place[1:]],
    ):
        with pytest.raises(OSError):
            Doorbells([[0, *place]])
    bell.close()
    assert victim.read_text() == "as it was"


def test_places_that_are_none_leave_the_server_to_be_asked(served: tuple[EnvServer, RemotePool]) -> None:
    _, pool = served
    env = pool.vector_env(TOY, range(2))
    env.reset()
    assert env.chunk_step(actions(env, 1)).valid.all()
    for places in ([[0]], [["a"] * 6], [[0, None, 3, "pipe:[1]", 4, "pipe:[1]"]], [[0, 1, 2, 3, 4, 5]], [7]):
        env.listen(places)
        assert env.chunk_step(actions(env, 1)).valid.all()
    env.close()


def test_answers_to_chunks_that_the_server_was_asked_for_are_passed_over() -> None:
    bell = Doorbell()
    bells = Doorbells([[3, *bell.place]])
    bells.ring(7)
    assert bells.wait(7, 0.0) is None and bell.number() == 7
    bell.answer(7, True, 1.0, 2.0, 0.5)  # too late
    bells.ring(8)
    bell.answer(8, True, 3.0, 4.0, 0.25)
    assert bells.wait(8, 5.0) == [(3, 3.0, 4.0, 0.25)]
    bell.answer(9, False, 0.0, 0.0, 0.0)
    assert bells.wait(9, 5.0) is None
    with pytest.raises(BlockingIOError):
        bell.number() and bell.number()
    bell.close()
    assert bells.wait(10, 5.0) is None
    with pytest.raises(OSError):
        bells.ring(11)
    bells.close()


def test_doorbells_that_cannot_be_opened_leave_the_server_to_be_asked(
    served: tuple[EnvServer, RemotePool], shared_pool: EnvPool, faulty: EnvSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, pool = served
    opened: list[int] = []

    def refuse(pid: int, *_: object) -> int:
        if opened:
            raise PermissionError(pid)
        opened.append(os.open("/dev/null", os.O_RDONLY))
        return opened[0]

    monkeypatch.setattr(doorbell, "_open", refuse)
    own, twin = (where.vector_env(faulty, range(4), chunk=2, seed=5) for where in (pool, shared_pool))
    for env in (own, twin):
        env.reset()
    for t in range(5):
        sent = requests(pool, monkeypatch)
        assert_equal(own.chunk_step(actions(own, 2, t)), twin.chunk_step(actions(own, 2, t)))
        assert sent == ["step"]
    with pytest.raises(OSError):  # it was closed again
        os.fstat(opened[0])
    twin.close()


def test_processes_that_die_leave_no_descriptors(served: tuple[EnvServer, RemotePool], faulty: EnvSettings) -> None:
    server, pool = served
    env = pool.vector_env(faulty, range(2))
    env.reset()
    counts = []
    count = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731
    gc.collect()
    for t in range(6):
        for _ in range(3):
            env.chunk_step(actions(env, 1))
        # Earlier tests' may go, and the server's threads let go of the last session when they get round to it.
        wait_until(lambda: count() <= min(counts, default=count()))
        counts.append(count())
        (owner,) = [one.pool for one in server.sessions.values() if one.pool]
        owner.processes[t % 2].popen.kill()
        if t % 3 == 2:
            forget_session(server)
            owner.close()
            del owner
            gc.collect()


def test_sets_that_come_and_go_leave_no_descriptors(served: tuple[EnvServer, RemotePool], faulty: EnvSettings) -> None:
    server, pool = served
    (pids,) = [one.pool.pids for one in server.sessions.values() if one.pool]
    count = lambda: [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *pids)]  # noqa: E731

    def come_and_go() -> None:
        env = pool.vector_env(faulty, range(2))
        env.reset()
        for _ in range(2):
            env.chunk_step(actions(env, 1))
        assert isinstance(env, RemoteVectorEnv) and env._bells is not None
        env.close()

    come_and_go()
    before = count()
    for _ in range(5):
        come_and_go()
    wait_until(lambda: all(now <= then for now, then in zip(count(), before, strict=True)))  # earlier tests' may go
