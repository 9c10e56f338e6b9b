"""Coarser meshes: what is drawn stays nearly the same, and what is simulated exactly."""

from __future__ import annotations

import numpy as np
import pytest

from envs.base import EnvSettings
from envs.episodes import EpisodicVectorEnv, VectorArgs
from envs.mesh_detail import _cluster

try:
    from embodied_rl.vulkan import vulkan_problem
except ImportError:
    vulkan_problem = lambda: "unknown"  # noqa: E731


def test_the_vertices_of_a_cell_become_their_mean_and_flat_triangles_vanish() -> None:
    vertices = np.array([[0.0, 0.0, 0.0], [0.002, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    triangles = np.array([[0, 1, 2], [0, 2, 3], [1, 2, 3]])
    normals = np.tile([0.0, 0.0, 1.0], (4, 1))
    coarse, left, turned = _cluster(vertices, triangles, normals, 0.01)
    expected = [[0.0, 1.0, 0.0], [0.001, 0.0, 0.0], [1.0, 0.0, 0.0]]
    np.testing.assert_allclose(sorted(coarse.tolist()), expected, atol=1e-6)
    assert len(left) == 1 and len(set(left[0])) == 3  # the first was a line then, the last two became one
    np.testing.assert_allclose(turned, np.tile([0.0, 0.0, 1.0], (3, 1)), atol=1e-6)


@pytest.mark.skipif(vulkan_problem() is not None, reason="no Vulkan device")
def test_coarser_meshes_change_pictures_little_and_physics_not_at_all() -> None:
    found = {}
    for detail in (None, 0.01):
        simulator = {"control_mode": "pd_ee_delta_pos", "image_size": 64, "mesh_detail": detail}
        settings = EnvSettings("maniskill", "PushCube-v1", 4, observation=("image", "state"), simulator=simulator)
        env = EpisodicVectorEnv(VectorArgs(settings, [0]))
        images, states = [env.reset(seeds=[3])["image"]], []
        for step in range(6):  # over a reset
            result = env.chunk_step(np.full((1, 1, env.spec.action.size), 0.3 * (-1) ** step, np.float32))
            images.append(result.observation["image"])
            states.append(result.observation["state"])
        found[detail] = np.stack(images).astype(int), np.stack(states)
        env.close()
    apart = np.abs(found[None][0] - found[0.01][0])
    np.testing.assert_array_equal(found[None][1], found[0.01][1])
    assert 0 < apart.mean() < 3 and (apart.max(-1) > 32).mean() < 0.02
