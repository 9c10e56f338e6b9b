"""Pictures of MuJoCo scenes: one OpenGL context for the whole process, and what a picture is made of.

robosuite makes a context for each env and then draws into whichever was made last. Here scenes of any number of envs
are drawn in one context, from positions that were noted down before, so that no step needs to draw.
"""

from __future__ import annotations

import ctypes.util
import functools
import os
from typing import Any

import numpy as np

from envs.base import EnvError

LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
DRAWN = (
    *("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir"),
    *("xpos", "xmat", "xipos", "ximat"),
)
MAX_GEOMS = 1000  # as robosuite, which draws no more
NO_RENDERER = (
    "images need OpenGL, and this machine has neither libEGL nor libOSMesa; install libegl1 (with a GPU: its driver's "
    "graphics libraries) or libosmesa6, see embodied-rl doctor"
)


def choose() -> str | None:
    """The OpenGL platform to draw with: what MUJOCO_GL names, else "egl" (a GPU, or Mesa on the CPU), else "osmesa".

    None if there is none.
    """
    named = os.environ.get("MUJOCO_GL", "").lower()
    available = [platform for platform, library in LIBRARIES.items() if ctypes.util.find_library(library)]
    return named if named in available else next(iter(available), None)


def describe() -> str:
    """What draws in this process, such as "egl: llvmpipe (LLVM 19)". Raises EnvError where nothing can."""
    _context().make_current()
    from OpenGL import GL

    return f"{choose()}: {GL.glGetString(GL.GL_RENDERER).decode()}"


class Snapshot:
    """Where everything visible is at one moment."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._site_rgba = np.empty(0)

    def take(self, model: Any, data: Any) -> None:
        """Note down the positions in `mujoco.MjData`, and which sites show (a burning stove does)."""
        self._arrays = {name: getattr(data, name).copy() for name in DRAWN}
        self._site_rgba = model.site_rgba.copy()

    def put(self, model: Any, data: Any) -> None:
        """Bring the positions back, into data that nothing else uses, and the sites."""
        for name, array in self._arrays.items():
            getattr(data, name)[:] = array
        model.site_rgba[:] = self._site_rgba


class Renderer:
    """Draws scenes of one model. Raises EnvError where there is no OpenGL.

    Args:
        model: `mujoco.MjModel`.
    """

    def __init__(self, model: Any) -> None:
        import mujoco

        _context().make_current()
        self._model, self._data = model, mujoco.MjData(model)
        self._scene = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        self._options = mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # collision shapes
        self._perturbation = mujoco.MjvPerturb()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._drawing = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)

    def draw(self, snapshot: Snapshot, camera: str, size: int) -> np.ndarray:
        """What a camera of the model sees, uint8 [size, size, 3], the bottom row first."""
        import mujoco

        _context().make_current()  # the package's own renderers leave theirs behind
        self._grow(size)
        sites = self._model.site_rgba.copy()
        snapshot.put(self._model, self._data)
        self._camera.fixedcamid = self._model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(
            self._model, self._data, self._options, self._perturbation, self._camera, everything, self._scene
        )
        self._model.site_rgba[:] = sites
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._drawing)
        picture, viewport = np.empty((size, size, 3), np.uint8), mujoco.MjrRect(0, 0, size, size)
        mujoco.mjr_render(viewport, self._scene, self._drawing)
        mujoco.mjr_readPixels(picture, None, viewport, self._drawing)
        return picture

    def _grow(self, size: int) -> None:
        """Make the buffer large enough."""
        import mujoco

        if size > min(self._drawing.offWidth, self._drawing.offHeight):
            self._model.vis.global_.offwidth = max(size, self._model.vis.global_.offwidth)
            self._model.vis.global_.offheight = max(size, self._model.vis.global_.offheight)
            self._drawing.free()
            self._drawing = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_150)

    def close(self) -> None:
        _context().make_current()  # what is freed has numbers, and so has what other contexts hold
        self._drawing.free()


@functools.cache
def _context() -> Any:
    """The process's OpenGL context."""
    platform = choose()
    if platform is None:
        raise EnvError(NO_RENDERER)
    try:
        if platform == "egl":
            from mujoco.egl import GLContext
        else:
            from mujoco.osmesa import GLContext
        context = GLContext(640, 480)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise EnvError(
            f"images need OpenGL, and {platform} gives no context ({error}); see embodied-rl doctor"
        ) from None
    return context
