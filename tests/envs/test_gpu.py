"""What only a GPU can show: a batch on `physx_cuda`. Skipped elsewhere; run by scripts/gpu_check.sh."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from envs.base import EnvSettings
from envs.maniskill_gpu import ManiSkillBatch
from envs.slots import VectorArgs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def batch() -> ManiSkillBatch:
    pytest.importorskip("mani_skill", exc_type=ImportError)
    settings = EnvSettings("maniskill", "PushCube-v1", horizon=8)
    return ManiSkillBatch(VectorArgs(settings, range(16), chunk=3, seed=1))


def test_every_env_of_a_batch_begins_from_a_state_of_its_own_and_repeats_it(batch: ManiSkillBatch) -> None:
    first = batch.reset(seeds=range(16))["state"]
    assert len(np.unique(first.round(5), axis=0)) == 16
    some = batch.reset(env_ids=[3, 7], seeds=[3, 7])["state"]
    np.testing.assert_allclose(some[[3, 7]], first[[3, 7]], atol=1e-4)


def test_episodes_of_a_batch_end_at_the_horizon_inside_a_chunk(batch: ManiSkillBatch) -> None:
    batch.reset()
    results = [batch.chunk_step(np.zeros((16, 3, batch.spec.action.size), np.float32)) for _ in range(3)]
    assert results[-1].truncated[:, 1].all() and not results[-1].valid[:, 2].any()
    assert [len(result.episodes) for result in results] == [0, 0, 16]
    assert {episode.length for episode in results[-1].episodes} == {8}
