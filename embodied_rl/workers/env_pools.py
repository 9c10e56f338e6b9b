"""Where an env worker's envs are simulated: in a pool of its own, on a GPU, or on servers; several for a mix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from embodied_rl.build import env_settings
from embodied_rl.config import Config, EnvConfig
from embodied_rl.mixture import env_parts, rows_of_parts
from envs.base import Episode, VectorEnv
from envs.client import RemotePool
from envs.launch import ServerProcess
from envs.maniskill import uses_gpu
from envs.maniskill_gpu import ManiSkillBatch
from envs.mixed import mix
from envs.pool import EnvPool
from envs.slots import VectorArgs
from envs.wire import read_token


class EnvPools:
    """One pool or server session for each part of the run's envs.

    Args:
        rows: of one pipeline group, which each part has a share of.
        devices: how many the worker has.
    """

    def __init__(self, config: Config, rows: int, device_kind: str, devices: int) -> None:
        self.envs = [part.env for part in env_parts(config.env)]
        self.shares = rows_of_parts(config, rows)
        self.part_of_row = np.repeat(np.arange(len(self.envs)), self.shares)
        remote = [bool(env.server or env.python) for env in self.envs]
        self._on_gpu = [
            not away and uses_gpu(env_settings(env), device_kind) for env, away in zip(self.envs, remote, strict=True)
        ]
        self.on_gpu = any(self._on_gpu)
        self._servers: list[ServerProcess] = []
        self._earlier = (0, 0)
        self.pools: list[RemotePool | EnvPool] = []
        try:
            for env, away, gpu in zip(self.envs, remote, self._on_gpu, strict=True):
                processes = 0 if gpu else env.processes or devices
                self.pools.append(self._connect(env) if away else EnvPool(processes, env.step_timeout_s))
        except BaseException:
            self.close()
            raise

    def vector_env(self, env_ids: Sequence[int], **options: Any) -> VectorEnv:
        """The envs of one pipeline group; options as `EnvPool.vector_env` takes them."""
        made, first = [], 0
        for env, pool, gpu, share in zip(self.envs, self.pools, self._on_gpu, self.shares, strict=True):
            args: dict[str, Any] = {"settings": env_settings(env), "env_ids": tuple(env_ids[first : first + share])}
            args |= options
            made.append(ManiSkillBatch(VectorArgs(**args)) if gpu else pool.vector_env(**args))
            first += share
        return mix(made)

    def render(self, episodes: Sequence[Episode]) -> list[np.ndarray]:
        """Films of recorded episodes. Raises EnvError where nothing can be rendered."""
        films: dict[int, np.ndarray] = {}
        parts = [int(self.part_of_row[episode.env_id % len(self.part_of_row)]) for episode in episodes]
        for part, (env, pool) in enumerate(zip(self.envs, self.pools, strict=True)):
            own = [i for i, owner in enumerate(parts) if owner == part]
            if own:
                settings = env_settings(env, render=True)
                films |= zip(own, pool.render(settings, [episodes[i] for i in own]), strict=True)
        return [films[i] for i in range(len(episodes))]

    @property
    def num_processes(self) -> int:
        return sum(pool.num_processes for pool in self.pools)

    @property
    def pids(self) -> list[int]:
        return [pid for pool in self.pools for pid in pool.pids]

    @property
    def server_versions(self) -> dict[str, dict[str, str]]:
        """Of Python and the simulator's packages, by the address of each env server."""
        return {pool.address: pool.about["versions"] for pool in self.pools if isinstance(pool, RemotePool)}

    @property
    def counted(self) -> tuple[int, int]:
        """Processes that were replaced and episodes that were lost, in the whole run."""
        found = [self._earlier, *((pool.replaced, pool.lost_episodes) for pool in self.pools)]
        return sum(replaced for replaced, _ in found), sum(lost for _, lost in found)

    @counted.setter
    def counted(self, earlier: tuple[int, int]) -> None:
        self._earlier = earlier

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        for server in self._servers:
            server.close()

    def _connect(self, env: EnvConfig) -> RemotePool:
        if env.server:
            token = read_token(env.server_token_file) if env.server_token_file else None
            return RemotePool(env.server[0], env.kind, env.id, env.processes, env.server_timeout_s, token)
        processes = [f"--processes={env.processes}"] if env.processes else []
        envs = 2 * env.num_envs  # those of an evaluation too
        options = ["--bind=ipc://*", f"--step-timeout={env.step_timeout_s}", f"--max-envs={envs}", *processes]
        assert env.python is not None
        server = ServerProcess([env.kind, env.id, *options], env.python)
        self._servers.append(server)
        asked = env.kind, env.id, env.processes, env.server_timeout_s
        return RemotePool(server.address, *asked, why_ended=server.why_ended)
