"""Experts for ManiSkill's cube tasks with the Panda arm, from the observation "state".

Positions are in metres in the world frame: x away from the robot, z up, the table at 0.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from envs.base import EnvError, EnvSettings
from envs.experts import Expert

CONTROL_MODES = ("pd_ee_delta_pose", "pd_ee_delta_pos")
DEFAULT_CONTROL_FREQ = 20
MOVE = 0.1  # metres that an action of 1 asks for
TURN = -0.1  # radians that an action of 1 asks for: ManiSkill scales rotations by their lower bound
TURN_GAIN = 0.7
DRIVE_RATE = 18.0  # 1/s; how fast the arm approaches what is asked for, measured
BASE = (-0.615, 0.0)  # x, y of the robot
REACH = 0.79  # metres from there; the controller does not move at all where it finds no joint positions

HALF = 0.02  # half the edge of a cube
HOVER = 0.1  # height above a cube at which the hand comes from afar
SLOPE = 4.0  # of the funnel through which it goes down
TOLERANCE = 0.008  # of the place, at the bottom of the funnel
CORNER = 0.03  # from the centre of a cube to an edge that a twisted hand would hit


@dataclass(frozen=True)
class Hand:
    """`position` [3] of the point between the finger tips; `rotation` [3, 3], whose columns are the hand's axes: it
    opens along y and points along z; `width` of the opening."""

    position: np.ndarray
    rotation: np.ndarray
    width: float

    @property
    def fingers(self) -> np.ndarray:
        """The horizontal direction [2] along which it opens."""
        return self.rotation[:2, 1]

    def holds(self, cube: np.ndarray) -> bool:
        """Whether the fingers have closed upon a cube."""
        return self.width < 3.5 * HALF and math.dist(self.position, cube) < HALF


@dataclass(frozen=True)
class Aim:
    """Where the hand shall be: `position` [3], and `fingers` [2], the direction along which it opens, either way."""

    position: np.ndarray
    fingers: np.ndarray
    closed: bool


class TableTopExpert(Expert):
    """Drives the hand, pointing down, towards an aim; subclasses say where that is.

    Args:
        settings: with control_mode pd_ee_delta_pose (7 action dimensions) or pd_ee_delta_pos (4, without rotation).

    Raises:
        EnvError: another control mode.
    """

    def __init__(self, settings: EnvSettings) -> None:
        mode = settings.simulator.get("control_mode")
        if mode not in CONTROL_MODES:
            raise EnvError(f"the expert for {settings.id} drives {' or '.join(CONTROL_MODES)}, not {mode}")
        self._turns = mode == "pd_ee_delta_pose"
        self.gripper = 6 if self._turns else 3
        rate = settings.simulator.get("control_freq") or DEFAULT_CONTROL_FREQ
        self._gain = 1 / (1 - math.exp(-DRIVE_RATE / rate))  # a step covers a part of what is asked for

    def act(self, state: np.ndarray) -> np.ndarray:
        joints, task = state[:9], state[18:]  # the joints' velocities are between
        tcp = self.tcp_pose(task)
        hand = Hand(tcp[:3], _rotation(tcp[3:]), width=float(joints[7:].sum()))
        aim = self.aim(hand, task)
        asked = hand.position + np.clip((aim.position - hand.position) * self._gain, -MOVE, MOVE)
        asked[:2] = BASE + (asked[:2] - BASE) * min(1.0, REACH / math.dist(asked[:2], BASE))
        parts = [(asked - hand.position) / MOVE]
        if self._turns:
            parts.append(_turn(hand.rotation, aim.fingers) * TURN_GAIN / TURN)
        parts.append(np.array([-1.0 if aim.closed else 1.0]))
        return np.clip(np.concatenate(parts), -1, 1).astype(np.float32)

    def tcp_pose(self, task: np.ndarray) -> np.ndarray:
        """Position and quaternion (wxyz) [7] of the point between the finger tips."""
        return task[:7]

    @abstractmethod
    def aim(self, hand: Hand, task: np.ndarray) -> Aim:
        """Where to go now, from the part of the state that the task adds to the robot's joints."""

    def _grasp(self, hand: Hand, cube: np.ndarray, fingers: np.ndarray) -> Aim:
        """Down to the cube, as the hand gets into place, and close there."""
        twist = abs(hand.fingers[0] * fingers[1] - hand.fingers[1] * fingers[0]) if self._turns else 0.0
        position = _from_above(hand.position, cube, HOVER, off=CORNER * twist)
        return Aim(position, fingers, closed=math.dist(hand.position, cube) < 0.7 * HALF)


class PushCubeExpert(TableTopExpert):
    """Goes down on the near side of the cube and pushes it to the goal, away from the robot."""

    direction = 1

    def aim(self, hand: Hand, task: np.ndarray) -> Aim:
        goal, cube = task[7:10], task[10:13]
        ahead = np.array([self.direction, 0.0, 0.0])
        to_cube = cube - hand.position
        is_behind = to_cube @ ahead > HALF and abs(to_cube[1]) < HALF and hand.position[2] < 2 * HALF
        if is_behind:
            position = np.array([goal[0], cube[1], HALF]) - ahead * 1.5 * HALF
        else:
            position = _from_above(hand.position, cube - ahead * 2.5 * HALF, HOVER)
        return Aim(position, fingers=np.array([0.0, 1.0]), closed=True)


class PullCubeExpert(PushCubeExpert):
    """Goes down on the far side of the cube and pulls it to the goal, towards the robot."""

    direction = -1


class PickCubeExpert(TableTopExpert):
    """Grasps the cube from above and takes it to the goal."""

    def tcp_pose(self, task: np.ndarray) -> np.ndarray:
        return task[1:8]  # after the flag that the cube is grasped

    def aim(self, hand: Hand, task: np.ndarray) -> Aim:
        goal, cube, quaternion = task[8:11], task[11:14], task[14:18]
        if hand.holds(cube):
            return Aim(hand.position + goal - cube, hand.fingers, closed=True)
        return self._grasp(hand, cube, _nearest_face(quaternion, hand.fingers))


class StackCubeExpert(TableTopExpert):
    """Grasps cube A from above, sets it on cube B and lets go."""

    def aim(self, hand: Hand, task: np.ndarray) -> Aim:
        a, quaternion, b = task[7:10], task[10:14], task[14:17]
        top = b + np.array([0.0, 0.0, 2 * HALF])
        if math.dist(a, top) < HALF / 2 and abs(a[2] - top[2]) < HALF / 5:
            return Aim(hand.position, hand.fingers, closed=False)
        if hand.holds(a):
            return Aim(hand.position + _from_above(a, top, 2 * HALF) - a, hand.fingers, closed=True)
        across = np.array([a[1] - b[1], b[0] - a[0]])  # fingers that open across the line between the cubes hit none
        return self._grasp(hand, a, _nearest_face(quaternion, across))


def _from_above(position: np.ndarray, target: np.ndarray, clearance: float, off: float = 0.0) -> np.ndarray:
    """The place to go to next, so that the target is reached through a funnel above it; straight up if too low.

    `off`: what is wrong besides the place, in metres; keeps it up too.
    """
    lateral = math.dist(position[:2], target[:2])
    height = target[2] + min(max(SLOPE * (lateral + off - TOLERANCE), 0.0), clearance)
    place = position if position[2] < height - HALF else target
    return np.array([place[0], place[1], height])


def _nearest_face(quaternion: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """The horizontal normal [2] of a standing cube's faces that is nearest to `direction` or to its opposite."""
    normals = _rotation(quaternion)[:2, :2].T
    return normals[np.argmax(np.abs(normals @ direction))]


def _turn(rotation: np.ndarray, fingers: np.ndarray) -> np.ndarray:
    """The rotation vector [3], about the world's axes, that makes the hand point down and open along `fingers`."""
    y = np.array([*fingers, 0.0]) * (1 if fingers @ rotation[:2, 1] > 0 else -1)
    z = np.array([0.0, 0.0, -1.0])
    wanted = np.stack([np.cross(y, z), y, z], axis=1)
    return np.cross(rotation, wanted, axis=0).sum(axis=1) / 2  # as long as the sine of the angle


def _rotation(quaternion: np.ndarray) -> np.ndarray:
    w, x, y, z = quaternion
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )
