"""Processes that die, hang or fail: what is lost, what goes on, and what the user is told."""

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.base import ChunkResult, EnvError, EnvSettings, VectorEnv, episode_seed
from envs.pool import MAX_REPLACEMENTS, EnvPool, PooledVectorEnv

TOY = EnvSettings("toy:Toy", "Toy")


def actions_for(env: VectorEnv, chunk: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, (env.num_envs, chunk, 2)).astype(np.float32)


def assert_rows_equal(one: ChunkResult, other: ChunkResult, rows: slice) -> None:
    for name in ("reward", "terminated", "truncated", "valid", "ended", "lost"):
        np.testing.assert_array_equal(getattr(one, name)[rows], getattr(other, name)[rows], err_msg=name)
    np.testing.assert_array_equal(one.observation["state"][rows], other.observation["state"][rows])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it goes between opening and reading
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_kill_in_mid_chunk_with_two_sets_in_flight_loses_only_that_process(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path
) -> None:
    pool, whole = make_pool(), make_pool()
    sets = [pool.vector_env(faulty, range(4 * s, 4 * s + 4), chunk=2, seed=1) for s in range(2)]
    twins = [whole.vector_env(TOY, range(4 * s, 4 * s + 4), chunk=2, seed=1) for s in range(2)]
    for env in (*sets, *twins):
        env.reset()
    (tmp_path / "step").write_text(f"once kill {episode_seed(1, 1, 0)}")  # env 1: first set, first process
    for env in (*sets, *twins):
        env.chunk_step_async(actions_for(env, 2))
    results, expected = [env.chunk_step_wait() for env in sets], [env.chunk_step_wait() for env in twins]
    for stage, (result, right) in enumerate(zip(results, expected, strict=True)):
        assert result.lost.tolist() == [True, True, False, False]
        assert not result.valid[:2].any() and not result.ended[:2].any() and not result.reward[:2].any()
        assert_rows_equal(result, right, slice(2, 4))
        ids = [4 * stage, 4 * stage + 1]
        twins[stage].reset([0, 1], [episode_seed(1, env_id, 1) for env_id in ids])
        np.testing.assert_array_equal(result.observation["state"], twins[stage].observation()["state"])
    assert (pool.replaced, pool.lost_episodes) == (1, 4)
    for t in range(10):  # both go on as if nothing had happened, in the next episodes
        for env, twin in zip(sets, twins, strict=True):
            actions = actions_for(env, 2, seed=t)
            assert_rows_equal(env.chunk_step(actions), twin.chunk_step(actions), slice(0, 4))
    assert (pool.replaced, pool.lost_episodes) == (1, 4)


def test_set_that_was_not_in_flight_learns_of_its_loss_at_its_next_chunk(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool()
    first, second = pool.vector_env(TOY, range(2)), pool.vector_env(TOY, range(2, 4))
    first.reset()
    second.reset()
    os.kill(pool.pids[1], signal.SIGKILL)
    assert first.chunk_step(actions_for(first, 1)).lost.tolist() == [False, True]
    fresh = second.observation()["state"]
    result = second.chunk_step(actions_for(second, 1))
    assert result.lost.tolist() == [False, True]
    assert result.valid[:, 0].tolist() == [True, False]
    np.testing.assert_array_equal(result.observation["state"][1], fresh[1])  # the action was meant for another episode
    assert second.chunk_step(actions_for(second, 1)).valid.all()
    assert pool.lost_episodes == 2


@pytest.mark.parametrize("moment", ["hang", "stop"])
def test_process_that_is_silent_beyond_the_limit_is_replaced(
    make_pool: Callable[..., EnvPool],
    faulty: EnvSettings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    moment: str,
) -> None:
    pool = make_pool()
    env = pool.vector_env(faulty, range(2))
    env.reset()
    (tmp_path / "step").write_text(f"once {moment} {episode_seed(0, 0, 0)}")
    env.chunk_step_async(actions_for(env, 1))
    assert wait_until(lambda: pool.take_in() or bool(pool.processes[1].peek(env.key)))
    usual, pool.timeout_s = pool.timeout_s, 1.0  # not before the other has answered, which may take as long
    with caplog.at_level(logging.WARNING):
        result = env.chunk_step_wait()
    pool.timeout_s = usual
    assert result.lost.tolist() == [True, False] and result.valid[:, 0].tolist() == [False, True]
    assert "did not answer for 1 s and was killed" in caplog.text
    assert env.chunk_step(actions_for(env, 1)).valid.all()


def test_exception_in_a_step_is_shown_and_costs_one_process(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    env = pool.vector_env(faulty, range(4), seed=2)
    env.reset()
    env.chunk_step(actions_for(env, 1))
    seed, failing = episode_seed(2, 3, 0), pool.pids[1]
    (tmp_path / "step").write_text(f"once raise {seed}")
    with caplog.at_level(logging.WARNING):
        result = env.chunk_step(actions_for(env, 1))
    assert result.lost.tolist() == [False, False, True, True]
    assert f"env 3 (Toy, seed {seed}, step 1)" in caplog.text and "env 2 (" not in caplog.text
    assert "ZeroDivisionError: as asked" in caplog.text
    assert pool.lost_episodes == 2 and not is_alive(failing)


@pytest.mark.parametrize("moment", ["reset", "state", "restore"])
def test_command_during_which_a_process_dies_is_repeated(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path, moment: str
) -> None:
    pool, env_ids = make_pool(), range(4)
    env, twin = pool.vector_env(faulty, env_ids), make_pool().vector_env(TOY, env_ids)
    for each in (env, twin):
        each.reset()
        each.chunk_step(actions_for(each, 1))
    saved = env.state()
    if moment == "reset":
        (tmp_path / "reset").write_text(f"once kill {5}")
        observations = [each.reset([0, 1], [5, 6]) for each in (env, twin)]
        assert pool.replaced == 1
    elif moment == "restore":
        (tmp_path / "step").write_text("once kill")
        env.chunk_step_async(actions_for(env, 1))
        env.chunk_step_wait()
        (tmp_path / "step").write_text("once kill")
        observations = [env.restore(saved), twin.observation()]
        assert pool.replaced == 2
    else:
        os.kill(pool.pids[0], signal.SIGKILL)
        state = env.state()
        assert pool.replaced == 1
        assert [slot["number"] for slot in state] == [2, 2, 1, 1]
        assert [len(slot["actions"]) for slot in state] == [0, 0, 1, 1]
        return
    np.testing.assert_array_equal(observations[0]["state"], observations[1]["state"])
    results = [each.chunk_step(actions_for(each, 1, seed=1)) for each in (env, twin)]
    assert_rows_equal(*results, slice(0, 4))


@pytest.mark.parametrize("auto_reset", [True, False])
def test_a_repeated_reset_uses_up_no_seed_and_loses_nothing(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path, auto_reset: bool
) -> None:
    """Envs of a GRPO group have to begin the same episodes."""
    env = make_pool().vector_env(faulty, range(4), group_size=4, auto_reset=auto_reset)
    twin = make_pool().vector_env(TOY, range(4), group_size=4, auto_reset=auto_reset)
    for _ in range(2):
        (tmp_path / "reset").write_text("once kill")
        states = env.reset()["state"]
        assert (states == states[0]).all()
        np.testing.assert_array_equal(states, twin.reset()["state"])
        assert_rows_equal(*(each.chunk_step(actions_for(each, 1)) for each in (env, twin)), slice(0, 4))
    assert (env.pool.replaced, env.pool.lost_episodes) == (2, 0)
    assert [slot["number"] for slot in env.state()] == [slot["number"] for slot in twin.state()]


def test_partial_reset_forgives_only_the_envs_it_resets(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(processes=1)
    env, other = pool.vector_env(TOY, range(2), auto_reset=False), pool.vector_env(TOY, [9])
    env.reset()
    other.reset()
    os.kill(pool.pids[0], signal.SIGKILL)
    other.chunk_step(actions_for(other, 1))
    env.reset([0], [3])
    result = env.chunk_step(actions_for(env, 1))
    assert result.lost.tolist() == [False, True] and result.valid[:, 0].tolist() == [True, False]


def test_without_auto_reset_a_lost_env_stays_frozen_and_keeps_its_place_in_its_stream(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path
) -> None:
    """Envs of a GRPO group have to begin the same episodes, so a loss must not use up a seed."""
    env = make_pool().vector_env(faulty, range(4), group_size=4, auto_reset=False)
    still = np.zeros((4, 1, 2), np.float32)
    env.reset()
    env.chunk_step(still)
    (tmp_path / "step").write_text("once kill")
    lost = env.chunk_step(still).lost
    assert sorted(lost.tolist()) == [False, False, True, True]
    later = env.chunk_step(still)
    assert later.valid[:, 0].tolist() == (~lost).tolist() and not later.lost.any()
    assert env.pool.lost_episodes == 2
    frozen = env.pool.processes[int(lost[2])].popen
    frozen.kill()  # there is nothing more to lose in it
    assert not env.chunk_step(still).lost.any() and env.pool.lost_episodes == 2
    saved = env.state()
    assert [slot["running"] for slot in saved] == (~lost).tolist()
    env.restore(saved)
    assert env.chunk_step(still).valid[:, 0].tolist() == (~lost).tolist()
    states = env.reset()["state"]
    assert (states == states[0]).all()


def test_finished_but_frozen_envs_are_not_counted_as_lost(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(processes=1)
    env = pool.vector_env(replace(TOY, horizon=1), range(2), auto_reset=False)
    env.reset()
    assert env.chunk_step(actions_for(env, 1)).ended.all()
    os.kill(pool.pids[0], signal.SIGKILL)
    result = env.chunk_step(actions_for(env, 1))
    assert not result.lost.any() and not result.valid.any()
    assert (pool.replaced, pool.lost_episodes) == (1, 0)


@pytest.mark.parametrize("auto_reset", [True, False])
def test_episode_that_ended_in_a_lost_chunk_is_lost_once(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path, auto_reset: bool
) -> None:
    pool = make_pool(processes=1)
    env = pool.vector_env(replace(faulty, horizon=1), range(2), auto_reset=auto_reset)
    env.reset()
    (tmp_path / "step").write_text(f"once kill {episode_seed(0, 1, 0)}")  # env 0's has ended by then
    assert env.chunk_step(actions_for(env, 1)).lost.all()
    assert pool.lost_episodes == 2


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_process_that_keeps_failing_ends_the_run_with_env_task_seed_and_step(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path, fault: str
) -> None:
    pool = make_pool()
    env = pool.vector_env(faulty, range(2), seed=4)
    env.reset()
    env.chunk_step(actions_for(env, 1))
    (tmp_path / "step").write_text(fault)
    said = "ZeroDivisionError: as asked" if fault == "raise" else "was killed by SIGKILL; it said:\nfault on demand"
    first = rf"env 0 \(Toy, seed {episode_seed(4, 0, 0)}, step 1\)"
    with pytest.raises(EnvError, match=r"env 0 \(Toy, seed \d+, step 0\)") as raised:
        for _ in range(20):
            env.chunk_step(actions_for(env, 1))
    assert said in str(raised.value) and f"replaced {MAX_REPLACEMENTS} times in a row" in str(raised.value)
    assert first not in str(raised.value)  # it is in the log; this is about the last of its episodes


def test_set_that_always_fails_is_noticed_although_another_goes_on(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path
) -> None:
    pool = make_pool()
    good, bad = pool.vector_env(TOY, range(2)), pool.vector_env(faulty, range(2))
    good.reset()
    bad.reset()
    (tmp_path / "step").write_text("raise")
    finished = 0
    with pytest.raises(EnvError, match="as asked"):
        for _ in range(10):
            good.chunk_step_async(actions_for(good, 1))
            bad.chunk_step_async(actions_for(bad, 1))
            finished += int(good.chunk_step_wait().valid.sum())
            bad.chunk_step_wait()
            finished += int(good.chunk_step(actions_for(good, 1)).valid.sum())
    assert finished > MAX_REPLACEMENTS


def test_process_writes_nothing_of_another_sets_chunk_once_that_is_lost(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose = PooledVectorEnv.lose
    monkeypatch.setattr(PooledVectorEnv, "lose", lambda *args: (lose(*args), time.sleep(0.05))[0])
    pool = make_pool(processes=1)
    failing = pool.vector_env(faulty, [0])
    long = pool.vector_env(replace(TOY, horizon=10**6, ignore_terminations=True), [1], chunk=20_000, auto_reset=False)
    for env in (failing, long):
        env.reset()
    (tmp_path / "step").write_text("once raise")
    for env in (failing, long):
        env.chunk_step_async(np.zeros((1, env.args.chunk, 2), np.float32))
    assert failing.chunk_step_wait().lost.all()
    result = long.chunk_step_wait()
    assert result.lost.all() and not result.valid.any() and not long.buffers.running.any()


def test_death_while_making_envs_is_retried_then_told_with_what_the_process_said(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path
) -> None:
    pool = make_pool()
    (tmp_path / "make").write_text("once kill")
    env = pool.vector_env(faulty, range(2))
    env.reset()
    assert env.chunk_step(actions_for(env, 1)).valid.all()
    (tmp_path / "make").write_text("kill")
    with pytest.raises(EnvError, match="killed by SIGKILL; it said:\nfault on demand"):
        pool.vector_env(faulty, range(2, 4))


def test_error_while_making_envs_leaves_the_pool_usable(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path
) -> None:
    pool = make_pool()
    first = pool.vector_env(TOY, range(2))
    first.reset()
    (tmp_path / "make").write_text("raise")
    with pytest.raises(EnvError, match="as asked"):
        pool.vector_env(faulty, range(2, 4))
    (tmp_path / "make").unlink()
    second = pool.vector_env(faulty, range(2, 4))
    second.reset()
    assert first.chunk_step(actions_for(first, 1)).valid.all() and second.chunk_step(actions_for(second, 1)).valid.all()
    assert pool.replaced == 0


def test_error_in_a_reset_is_raised_and_leaves_no_stale_answers(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path
) -> None:
    env = make_pool().vector_env(faulty, range(4))
    env.reset()
    (tmp_path / "reset").write_text("raise 77")
    with pytest.raises(EnvError, match=r"env 1 \(Toy, seed 77, step 0\) failed:\n(?s:.*)as asked"):
        env.reset([0, 1, 3], [5, 77, 6])
    (tmp_path / "reset").unlink()
    env.reset()
    result = env.chunk_step(actions_for(env, 1))
    assert result.valid.all() and len(result.spans) == 2


def test_process_stopped_while_it_is_sent_more_than_the_pipe_holds_is_replaced(
    make_pool: Callable[..., EnvPool],
) -> None:
    pool = make_pool(processes=1, timeout_s=1.0)
    pool.timeout_s = 120.0  # for answers, and for the process that takes its place
    env = pool.vector_env(replace(TOY, horizon=10**6), range(2))
    env.reset()
    saved = env.state()
    saved[0]["actions"] = np.zeros((300_000, 2), np.float32)
    os.kill(pool.pids[0], signal.SIGSTOP)
    env.restore(saved)
    assert pool.replaced == 1
    assert env.chunk_step(actions_for(env, 1)).valid.all()


def test_close_leaves_no_process_and_no_descriptor(make_pool: Callable[..., EnvPool]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    pool = make_pool()
    env = pool.vector_env(TOY, range(2))
    env.reset()
    env.chunk_step_async(actions_for(env, 1))
    pids = pool.pids
    pool.close()
    pool.close()
    assert not any(is_alive(pid) for pid in pids)
    del env  # and with it the shared memory
    assert set(os.listdir("/proc/self/fd")) <= before


def test_many_replacements_leak_no_descriptors(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(processes=1)
    env = pool.vector_env(TOY, range(2))
    env.reset()
    env.chunk_step(actions_for(env, 1))
    gc.collect()  # what earlier tests left open
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        os.kill(pool.pids[0], signal.SIGKILL)
        assert env.chunk_step(actions_for(env, 1)).lost.all()
        assert env.chunk_step(actions_for(env, 1)).valid.all()
    assert len(os.listdir("/proc/self/fd")) <= before  # earlier tests' may go
    assert pool.replaced == 10


def test_closed_set_is_not_made_again_when_a_process_is_replaced(
    make_pool: Callable[..., EnvPool], faulty: EnvSettings, tmp_path: Path
) -> None:
    pool = make_pool(processes=1)
    env, closed = pool.vector_env(TOY, range(2)), pool.vector_env(faulty, range(2))
    env.reset()
    closed.reset()
    closed.close()
    (tmp_path / "make").write_text("raise")
    os.kill(pool.pids[0], signal.SIGKILL)
    assert env.chunk_step(actions_for(env, 1)).lost.all()
    assert pool.lost_episodes == 2


@pytest.mark.parametrize("moment", ["idle", "in mid-chunk"])
def test_processes_end_when_their_parent_is_killed(tmp_path: Path, moment: str) -> None:
    program = f"""
import os, sys, time
import numpy as np
from envs.base import EnvSettings
from envs.pool import EnvPool
pool = EnvPool(2)
env = pool.vector_env(EnvSettings("toy:Toy", "Toy", horizon=10**6), range(2), chunk=20_000)
env.reset()
if {moment!r} != "idle":
    env.chunk_step_async(np.zeros((2, 20_000, 2), np.float32))
print(*pool.pids, flush=True)
time.sleep(100)
"""
    path = os.pathsep.join(sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_more_processes_than_envs_is_fine(make_pool: Callable[..., EnvPool]) -> None:
    env = make_pool(processes=3).vector_env(TOY, range(2))
    env.reset()
    assert env.chunk_step(actions_for(env, 1)).valid.all()


def test_an_env_of_one_s_own_may_lie_in_the_working_directory(
    make_pool: Callable[..., EnvPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_toy.py").write_text("from toy import Toy as Own")
    monkeypatch.chdir(tmp_path)
    assert make_pool(1).vector_env(EnvSettings("own_toy:Own", "Own"), [0]).reset()["state"].shape[0] == 1
