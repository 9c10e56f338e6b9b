"""Coarser meshes for small pictures: drawn by a CPU, a robot's vertices cost more time than all pixels.

Simulation is not touched: collisions have shapes of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def simplify(scene: Any, cell: float) -> int:
    """Replace untextured meshes of a `ManiSkillScene` by coarser ones.

    Args:
        scene: of one or several sub-scenes with renderers.
        cell: edge of the cubes, in metres, whose vertices become one.

    Returns:
        Number of triangles that are left of those meshes.
    """
    import sapien.render

    left = 0
    for entity in [entity for part in scene.sub_scenes for entity in part.entities]:
        body = entity.find_component_by_type(sapien.render.RenderBodyComponent)
        if body is None or not all(map(_is_plain_mesh, body.render_shapes)):
            continue
        coarse = sapien.render.RenderBodyComponent()
        coarse.visibility = body.visibility
        for shape in body.render_shapes:
            for part in shape.parts:
                vertices, triangles, normals = _cluster(
                    np.asarray(part.vertices) * np.asarray(shape.scale),
                    np.asarray(part.triangles),
                    np.asarray(part.get_vertex_normal()),
                    cell,
                )
                left += len(triangles)
                if len(triangles):
                    uvs = np.zeros((len(vertices), 2), np.float32)
                    mesh = sapien.render.RenderShapeTriangleMesh(vertices, triangles, normals, uvs, part.material)
                    mesh.local_pose = shape.local_pose
                    coarse.attach(mesh)
        entity.remove_component(body)
        entity.add_component(coarse)
    return left


def _is_plain_mesh(shape: Any) -> bool:
    import sapien.render

    return isinstance(shape, sapien.render.RenderShapeTriangleMesh) and all(
        part.material.base_color_texture is None for part in shape.parts
    )


def _cluster(
    vertices: np.ndarray, triangles: np.ndarray, normals: np.ndarray, cell: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vertex clustering (Rossignac and Borrel, 1993): the vertices of a cell become their mean, and triangles
    that shrink to a line or a point vanish."""
    cells, cluster = np.unique(np.round(vertices / cell).astype(np.int64), axis=0, return_inverse=True)
    cluster = cluster.ravel()
    count = len(cells)
    mean = lambda x: np.stack([np.bincount(cluster, column, count) for column in x.T], axis=1)  # noqa: E731
    joined = cluster[triangles]
    kept = joined[(joined[:, 0] != joined[:, 1]) & (joined[:, 1] != joined[:, 2]) & (joined[:, 2] != joined[:, 0])]
    _, first = np.unique(np.sort(kept, axis=1), axis=0, return_index=True)
    summed = mean(normals)
    length = np.linalg.norm(summed, axis=1, keepdims=True)
    centres = mean(vertices) / np.bincount(cluster, minlength=count)[:, None]
    return (
        centres.astype(np.float32),
        kept[np.sort(first)].astype(np.uint32),
        (summed / np.where(length > 0, length, 1.0)).astype(np.float32),
    )
