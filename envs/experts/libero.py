"""A scripted expert for LIBERO's pick-and-place tasks, from the simulator's state.

Grasp across the narrow side of what is narrow enough, else by the rim (bowls); lift, carry above the goal, lower, let
go; up to three tries. Lengths are in metres, directions in the world frame, z up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from envs import libero_suites
from envs.base import EnvError, EnvSettings
from envs.experts import Expert

ADVICE = 7
PREDICATES = ("on", "in")
GAIN, TURN_GAIN = 10.0, 4.0  # an action of 1 is 0.05 m and 0.5 rad
OPEN, CLOSED = -1.0, 1.0
SPAN = 0.075  # what fits between the fingers
GRASP_DEPTH = 0.045  # of the finger tips below the top, where a thing is taken across
FLOOR = 0.004  # of the finger tips above the bottom of what they take
RIM_INSIDE, RIM_DEPTH = 0.014, 0.028  # of the finger tips, in a bowl's rim and below its top
RIM_LAYER = 0.012  # how thick the rim is taken to be
CLEARANCE = 0.06  # above what is in the way
LIFTED = 0.03  # higher than it stood: it is held
TRIES = 3
# Where around the rim to grasp a bowl: +y, unless something stands there.
RIM_SIDES = {"in the top drawer": 2, "next to the cookie box": 3}
SIDES = np.array([[0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [-1.0, 0.0]])

Actions = Iterator[np.ndarray]


def is_scripted(suite: str, task: int) -> bool:
    """Whether a task's goal is one thing on or in another, which is what the expert tries."""
    text = libero_suites.bddl_file(suite, task).read_text()
    goals = re.findall(r"\((\w+)[^()]*\)", text.partition("(:goal")[2])
    return len(goals) == 1 and goals[0].lower() in PREDICATES


class LiberoExpert(Expert):
    """Reads what `LiberoDriver` advises from the end of the `state` of an env with `simulator["expert"]`."""

    gripper, advice = 6, ADVICE

    def __init__(self, settings: EnvSettings) -> None:
        suite, tasks = libero_suites.parse_id(settings.id)
        if beyond := [task for task in tasks if not is_scripted(suite, task)]:
            scripted = ",".join(str(task) for task in tasks if task not in beyond)
            hint = f"; nearest valid: {suite}/{scripted}" if scripted else ""
            raise EnvError(f"the expert only picks and places, and {suite} {beyond} is something else{hint}")

    def act(self, state: np.ndarray) -> np.ndarray:
        return state[-ADVICE:]


class LiberoDriver:
    """Solves the current episode of `env`, the package's env. Raises EnvError for a goal that is not pick-and-place."""

    def __init__(self, env: Any) -> None:
        goal = env.env.parsed_problem["goal_state"]
        held = goal[0][1] if goal else ""
        if len(goal) != 1 or goal[0][0] not in PREDICATES or held not in env.env.objects_dict:
            raise EnvError(f"there is no scripted expert for {env.language_instruction!r}: it is not pick-and-place")
        side = next((side for words, side in RIM_SIDES.items() if words in _file_words(env)), 0)
        scene = _Scene(env, held, goal[0][2], inside=goal[0][0] == "in")
        self._actions = _pick_and_place(scene, side)

    def act(self) -> np.ndarray:
        """The action to take now, float32 [7] in [-1, 1]; to be called once a step."""
        return next(self._actions).astype(np.float32)


class _Scene:
    """What the expert sees: the hand, the thing to be moved and where it shall be."""

    def __init__(self, env: Any, held: str, goal: str, inside: bool) -> None:
        self._model, self._data = env.sim.model._model, env.sim.data._data
        bodies = env.env.obj_body_id
        self._held = bodies[held]
        self._inside = inside
        self._goal_site = None if goal in bodies else self._model.site(goal).id
        self._goal = bodies[goal if goal in bodies else env.env.object_states_dict[goal].parent_name]
        self._shapes = {body: self._shapes_of(body) for body in (self._held, self._goal)}

    @property
    def hand(self) -> np.ndarray:
        return self._data.site("gripper0_grip_site").xpos.copy()

    @property
    def approach(self) -> np.ndarray:
        """The direction in which the hand points."""
        return self._data.site("gripper0_grip_site").xmat.reshape(3, 3)[:, 2].copy()

    @property
    def fingers(self) -> np.ndarray:
        """The horizontal direction [2] along which the hand opens."""
        bodies = [self._data.body(f"gripper0_{side}finger").xpos[:2] for side in ("right", "left")]
        return (bodies[0] - bodies[1]) / np.linalg.norm(bodies[0] - bodies[1])

    @property
    def thing(self) -> np.ndarray:
        """Points of the surface of the thing to be moved, [P, 3]."""
        return self._points(self._held)

    @property
    def offset(self) -> np.ndarray:
        """From the hand to the thing's origin, which is what a goal is about."""
        return self._data.xpos[self._held] - self.hand

    @property
    def release(self) -> float:
        """Height at which the thing's lowest point is let go."""
        if self._inside:
            return self.goal_top - 0.02
        return self.goal_top + 0.002

    @property
    def goal_top(self) -> float:
        if self._goal_site is not None and not self._inside:
            return float(self._data.site_xpos[self._goal_site][2])
        return float(self._points(self._goal)[:, 2].max())

    @property
    def goal_centre(self) -> np.ndarray:
        """Where to put the thing, [2]: the middle of a container, the origin of a body, the middle of a region."""
        if self._inside:
            return _middle(self._points(self._goal))
        if self._goal_site is not None:
            return self._data.site_xpos[self._goal_site][:2].copy()
        return self._data.xpos[self._goal][:2].copy()

    def _shapes_of(self, body: int) -> list[tuple[int, np.ndarray]]:
        """The collision shapes of a body and what hangs on it: number, and points in the shape's own frame."""
        model, found = self._model, []
        for shape in range(model.ngeom):
            parent = model.geom_bodyid[shape]
            while parent not in (0, body):
                parent = model.body_parentid[parent]
            if parent == body and (model.geom_contype[shape] or model.geom_conaffinity[shape]):
                found.append((shape, _surface(model, shape)))
        return found

    def _points(self, body: int) -> np.ndarray:
        data = self._data
        return np.concatenate(
            [
                points @ data.geom_xmat[shape].reshape(3, 3).T + data.geom_xpos[shape]
                for shape, points in self._shapes[body]
            ]
        )


def _pick_and_place(scene: _Scene, side: int) -> Actions:
    """The actions of an episode; it stands still in the end."""
    for attempt in range(TRIES):
        bottom = scene.thing[:, 2].min()
        yield from _grasp(scene, side + attempt, turned=attempt == 1)
        if scene.thing[:, 2].min() >= bottom + LIFTED:
            yield from _place(scene)
        else:
            yield from _still(4)
    while True:
        yield from _still(1)


def _grasp(scene: _Scene, side: int, turned: bool) -> Actions:
    """Take the thing and lift it above the goal and itself."""
    points = scene.thing
    top, bottom = points[:, 2].max(), points[:, 2].min()
    width, axis, place = _narrow_side(points[:, :2])
    if width < SPAN:
        across = np.array([-axis[1], axis[0]])
        if turned and np.ptp(points[:, :2] @ across) < SPAN:
            axis = across
        height = max(top - min(GRASP_DEPTH, (top - bottom) / 2), bottom + FLOOR)
    else:
        axis = SIDES[side % len(SIDES)]
        rim = points[points[:, 2] > top - RIM_LAYER][:, :2]
        place = _middle(rim)
        place = place + axis * (((rim - place) @ axis).max() - RIM_INSIDE)
        height = top - RIM_DEPTH
    above = max(top + CLEARANCE, scene.hand[2] - 0.02)
    yield from _go(scene, lambda: np.array([*place, above]), axis, OPEN, tolerance=0.012, steps=60)
    target = np.array([*place, height])
    yield from _go(scene, lambda: target, axis, OPEN, tolerance=0.006, steps=40, speed=0.6, turn_tolerance=0.05)
    for _ in range(10):
        yield _towards(scene, target, axis, CLOSED)
    start = scene.hand
    carried = max(scene.goal_top, top) + CLEARANCE + start[2] - bottom
    yield from _go(scene, lambda: np.array([*start[:2], carried]), axis, CLOSED, tolerance=0.015, steps=40)


def _place(scene: _Scene) -> Actions:
    """Carry what is held above the goal, lower it and let go."""
    axis, height = scene.fingers, scene.hand[2]
    over = lambda z: np.array([*(scene.goal_centre - scene.offset[:2]), z])  # noqa: E731
    yield from _go(scene, lambda: over(height), axis, CLOSED, tolerance=0.015, steps=80)
    below = scene.hand[2] - scene.thing[:, 2].min()
    lowered = scene.release + below
    yield from _go(scene, lambda: over(lowered), axis, CLOSED, tolerance=0.012, steps=30, speed=0.6)
    yield from _still(14)
    start = scene.hand
    away = np.array([*start[:2], start[2] + 0.1])
    yield from _go(scene, lambda: away, axis, OPEN, tolerance=0.02, steps=20)
    yield from _still(5)


def _go(
    scene: _Scene,
    target: Callable[[], np.ndarray],
    axis: np.ndarray,
    gripper: float,
    tolerance: float,
    steps: int,
    speed: float = 1.0,
    turn_tolerance: float = 0.1,
) -> Actions:
    """Move the hand, pointing down and opening along `axis` [2], until it is there or time is up."""
    for _ in range(steps):
        yield _towards(scene, target(), axis, gripper, speed)
        if np.linalg.norm(target() - scene.hand) < tolerance and abs(_twist(scene, axis)) < turn_tolerance:
            return


def _towards(scene: _Scene, target: np.ndarray, axis: np.ndarray, gripper: float, speed: float = 1.0) -> np.ndarray:
    move = np.clip((target - scene.hand) * GAIN, -speed, speed)
    turn = np.cross(scene.approach, [0.0, 0.0, -1.0]) + [0.0, 0.0, _twist(scene, axis)]
    return np.concatenate([move, np.clip(turn * TURN_GAIN, -1, 1), [gripper]])


def _twist(scene: _Scene, axis: np.ndarray) -> float:
    """The angle from the fingers to an axis, which has no sense."""
    fingers = scene.fingers
    angle = np.arctan2(fingers[0] * axis[1] - fingers[1] * axis[0], fingers @ axis)
    return float((angle + np.pi / 2) % np.pi - np.pi / 2)


def _still(steps: int) -> Actions:
    for _ in range(steps):
        yield np.array([0.0] * 6 + [OPEN])


def _narrow_side(points: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Width, direction [2] and middle [2] of points [P, 2] where they are narrowest between parallels."""
    best: tuple[float, np.ndarray, np.ndarray] | None = None
    for angle in np.linspace(0, np.pi / 2, 46)[:-1]:
        axes = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        along = points @ axes.T
        middle = (along.max(0) + along.min(0)) / 2 @ axes
        for axis, width in zip(axes, np.ptp(along, axis=0), strict=True):
            if best is None or width < best[0] - 1e-4:
                best = float(width), axis, middle
    assert best is not None
    return best


def _middle(points: np.ndarray) -> np.ndarray:
    """The middle [2] of the box around points."""
    return (points[:, :2].max(0) + points[:, :2].min(0)) / 2


def _surface(model: Any, shape: int) -> np.ndarray:
    """Points [P, 3] whose hull is a collision shape, in its own frame."""
    import mujoco

    kind, size = model.geom_type[shape], model.geom_size[shape]
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        mesh = model.geom_dataid[shape]
        first = model.mesh_vertadr[mesh]
        return model.mesh_vert[first : first + model.mesh_vertnum[mesh]]
    if kind == mujoco.mjtGeom.mjGEOM_CYLINDER:
        angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
        circle = size[0] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        return np.concatenate([np.column_stack([circle, np.full(24, z)]) for z in (-size[1], size[1])])
    half = {
        mujoco.mjtGeom.mjGEOM_SPHERE: size[[0, 0, 0]],
        mujoco.mjtGeom.mjGEOM_CAPSULE: size[[0, 0, 1]] + [0, 0, size[0]],
    }
    corners = np.array(np.meshgrid(*[[-1, 1]] * 3)).reshape(3, -1).T
    return corners * half.get(kind, size)


def _file_words(env: Any) -> str:
    return str(env.env.bddl_file_name).replace("_", " ")
