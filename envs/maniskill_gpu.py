"""`ManiSkillBatch`: N ManiSkill envs as one batch on a GPU (`physx_cuda`), in the calling process.

Not here: the simulation itself and its seeds (`maniskill.Simulation`). With one env on `physx_cpu` the same code runs
without a GPU, which is how it is tested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from envs.base import EnvError, EnvSpec, Episode, Integers, Observation
from envs.batch import BatchStep, BatchVectorEnv
from envs.maniskill import Simulation
from envs.slots import VectorArgs

T = TypeVar("T")


class ManiSkillBatch(BatchVectorEnv):
    """All envs of `args` in one simulation; see `VectorArgs`.

    A chunk runs in a thread, so that `chunk_step_async` returns at once. Initial states are decided by each env's
    seed alone (see `Simulation`), at the price of one reset call for each episode: about as dear as a step of the
    whole batch. Episodes do not repeat bit for bit on a GPU, so `restore` begins new ones.
    """

    def __init__(self, args: VectorArgs, backend: str = "physx_cuda") -> None:
        self._backend = backend
        self._simulation: Simulation | None = None
        self._kept: Any = None
        spec = _in_simulator_thread(self._make, args)
        super().__init__(args, spec)

    def _make(self, args: VectorArgs) -> EnvSpec:
        self._simulation = simulation = Simulation(args.settings, len(args.env_ids), self._backend)
        simulation.evaluate()
        shown = simulation.observe()
        image = shown.get("image")
        return EnvSpec(
            action=simulation.action,
            state_size=shown["state"].shape[1] if "state" in shown else None,
            image_shape=None if image is None else (image.shape[1], image.shape[2], image.shape[3], image.shape[4]),
            horizon=simulation.horizon,
            instruction=simulation.instruction,
            has_success=simulation.has_success,
        )

    @property
    def simulation(self) -> Simulation:
        if self._simulation is None:
            raise RuntimeError("the simulator is offloaded or closed; call onload first")
        return self._simulation

    # ------------------------------------------------------------------------------------------ contract

    def reset(
        self,
        env_ids: Integers | None = None,
        seeds: Integers | None = None,
        init_state_ids: Integers | None = None,
    ) -> Observation:
        return _in_simulator_thread(super().reset, env_ids, seeds, init_state_ids)

    def restore(self, state: list[dict[str, Any]]) -> Observation:
        """Go on with the seeds and counts of `state`: every env begins its next episode, or stays frozen if it was."""
        self._refuse_in_flight("restore")
        for row, saved in enumerate(state):
            self.buffers.episode_number[row] = int(saved["number"])
            self.slots[row].running = self.buffers.running[row] = False
        rows = [row for row, saved in enumerate(state) if saved["running"]]
        return self.reset(rows) if rows else self.observation()

    def offload(self) -> None:
        """Free the simulator. Poses and velocities are kept; controller targets, which ManiSkill does not save, not."""
        self._refuse_in_flight("offload")
        if self._simulation is not None:
            _in_simulator_thread(self._offload)

    def onload(self) -> None:
        """Make the simulator anew and put the running episodes back where they were."""
        if self._simulation is None:
            _in_simulator_thread(self._onload)

    def close(self) -> None:
        if self._simulation is not None:
            _in_simulator_thread(self._free)

    # ------------------------------------------------------------------------------------------ in the thread

    def run_chunk(self, actions: np.ndarray) -> list[Episode]:
        try:
            return super().run_chunk(actions)
        except EnvError:
            raise
        except Exception as error:
            envs = f"envs {self.args.env_ids[0]} to {self.args.env_ids[-1]}"
            steps = f"steps {self.buffers.episode_step.min()} to {self.buffers.episode_step.max()}"
            raise EnvError(f"{self.settings.id} failed on {self._backend}, {envs}, {steps}: {error}") from error

    def _launch(self, actions: np.ndarray) -> Callable[[], list[Episode]]:
        assert self.simulation  # raises here and now if there is none
        return _simulator_thread().submit(self.run_chunk, actions.copy()).result

    def _step_envs(self, actions: np.ndarray, observed: bool) -> BatchStep:
        reward, terminated, success = self.simulation.step(actions, observed)
        return BatchStep(reward, terminated, np.zeros(self.num_envs, bool), success)

    def _reset_envs(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.simulation.reset(row, self.slots[row].seed)
        self.simulation.evaluate()

    def _observe(self, rows: Sequence[int], final: bool = False) -> None:
        out, shown = self.buffers, self.simulation.observe()
        if "state" in shown:
            (out.final_state if final else out.state)[rows] = shown["state"][rows]
        if "image" in shown:
            (out.final_image if final else out.image)[rows] = shown["image"][rows]

    def _offload(self) -> None:
        self._kept = self.simulation.dynamics().cpu()
        self._free()

    def _onload(self) -> None:
        simulation = Simulation(self.settings, self.num_envs, self._backend)
        for row, slot in enumerate(self.slots):
            simulation.reset(row, slot.seed)  # what a task draws for an episode beside poses, such as goals
        simulation.set_dynamics(self._kept)
        self._simulation, self._kept = simulation, None

    def _free(self) -> None:
        import gc

        import torch

        self.simulation.close()
        self._simulation = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@functools.lru_cache(maxsize=1)
def _simulator_thread() -> ThreadPoolExecutor:
    """One thread for all batches of a process: a reset seeds torch's global generator and puts it back."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="maniskill")


def _in_simulator_thread(function: Callable[..., T], *args: Any) -> T:
    return _simulator_thread().submit(function, *args).result()
