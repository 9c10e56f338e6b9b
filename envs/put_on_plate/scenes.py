"""The scenes by env id, what an episode id chooses in each, and where object and plate begin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

ObjSet = Literal["train", "test", "all"]
Group = Literal["training", "vision", "semantic", "execution"]

PREFIX = "PutOnPlateInScene25"
HORIZON = 80
CONTROL_MODE = "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"

CENTRE = np.array([-0.16, 0.0])
HALF_EDGE = 0.075
LEAST_DISTANCE = 0.07
YAWS = tuple(quarter * math.pi / 4 for quarter in range(4))
OTHER_YAWS = tuple(-odd * math.pi / 8 for odd in (1, 3, 5, 7))


def grid() -> np.ndarray:
    """The 6 x 6 places of training on the table, metres [36, 2]."""
    return _places([(x, y) for x in range(6) for y in range(6)])


def ring() -> np.ndarray:
    """The places around that grid, which training never uses, metres [28, 2]."""
    return _places([(x, y) for x in range(-1, 7) for y in range(-1, 7) if not (0 <= x < 6 and 0 <= y < 6)])


def placements(places: np.ndarray) -> np.ndarray:
    """Where object and plate begin: all ordered pairs of places that are far enough apart, [P, 2, 2]."""
    apart = np.linalg.norm(places[:, None] - places[None], axis=-1) > LEAST_DISTANCE
    first, second = np.nonzero(apart)
    return np.stack([places[first], places[second]], axis=1)


def _places(cells: list[tuple[int, int]]) -> np.ndarray:
    return CENTRE + HALF_EDGE * (np.array(cells) / 5 * 2 - 1)


@dataclass(frozen=True)
class Choice:
    """One digit of an episode id: things 0 to `train` - 1 in training, the `test` after them in tests.

    Without test things, every set has those of training.
    """

    train: int
    test: int = 0

    def of(self, obj_set: ObjSet) -> range:
        if obj_set not in get_args(ObjSet):
            raise ValueError(f"obj_set is '{obj_set}', expected one of {', '.join(get_args(ObjSet))}")
        if obj_set == "train" or not self.test:
            return range(self.train)
        return range(self.train if obj_set == "test" else 0, self.train + self.test)


PAIRS, OTHER_PAIRS = len(placements(grid())), len(placements(ring()))
OBJECTS, NEW_OBJECTS = Choice(16), Choice(16, 9)
TABLES, NEW_TABLES = Choice(16), Choice(16, 5)


@dataclass(frozen=True)
class Scene:
    """One env of the family.

    Attributes:
        tests: what its test set has that training had not.
        choices: digits of an episode id by name, the first counting most. Empty where the published class numbers
            episodes by things of its own (distractors, arm poses).
    """

    id: str
    group: Group
    tests: str
    choices: dict[str, Choice] = field(default_factory=dict)

    def counts(self, obj_set: ObjSet) -> tuple[int, ...]:
        """How many things each digit chooses among. Raises ValueError for a scene with a numbering of its own."""
        if not self.choices:
            raise ValueError(f"the episodes of {self.id} are numbered by its class alone")
        return tuple(len(choice.of(obj_set)) for choice in self.choices.values())

    def num_episodes(self, obj_set: ObjSet) -> int:
        return math.prod(self.counts(obj_set))

    def decode(self, episode_id: np.ndarray | int, obj_set: ObjSet) -> dict[str, np.ndarray]:
        """What each episode consists of, by name: numbers of things, in the shape of `episode_id`.

        Ids from `num_episodes` on begin again at the first.
        """
        counts = self.counts(obj_set)
        digits = np.unravel_index(np.asarray(episode_id) % math.prod(counts), counts)
        firsts = (choice.of(obj_set).start for choice in self.choices.values())
        return {name: digit + first for name, digit, first in zip(self.choices, digits, firsts, strict=True)}

    def encode(self, things: dict[str, np.ndarray | int], obj_set: ObjSet) -> np.ndarray:
        """The inverse of `decode`. Raises ValueError for a thing that is not in the set."""
        counts = self.counts(obj_set)
        digits = tuple(np.asarray(things[name]) - choice.of(obj_set).start for name, choice in self.choices.items())
        return np.asarray(np.ravel_multi_index(digits, counts))


def instruction(thing: str, plate: str) -> str:
    """What the policy is told in every scene but Instruct-v1, whose test set has phrases of its own."""
    return f"put {thing} on {plate}"


def _scene(name: str, group: Group, tests: str, **changed: Choice) -> Scene:
    """A scene whose episodes differ from training's in the choices given; an `extra` one follows the object."""
    extra = {key: choice for key, choice in changed.items() if key in ("texture", "phrase")}
    usual = {"plate": Choice(1), "table": TABLES, "placement": Choice(PAIRS), "yaw": Choice(len(YAWS))}
    choices: dict[str, Choice] = {"object": OBJECTS, **extra, **usual, **changed}
    return Scene(PREFIX + name, group, tests, choices)


_TEXTURES = Choice(1, 16)
SCENES = {
    scene.id: scene
    for scene in (
        _scene("Main-v3", "training", "objects and tables", object=NEW_OBJECTS, table=NEW_TABLES),
        _scene("MainCarrot-v3", "training", "objects, on one table", object=NEW_OBJECTS, table=Choice(1)),
        _scene("MainImage-v3", "training", "tables, with one object", object=Choice(1), table=NEW_TABLES),
        _scene("Single-v1", "training", "nothing: one object, one table", object=Choice(1), table=Choice(1)),
        _scene("VisionImage-v1", "vision", "tables", table=NEW_TABLES),
        _scene("VisionTexture03-v1", "vision", "textures over robot, object and plate, 0.3", texture=_TEXTURES),
        _scene("VisionTexture05-v1", "vision", "textures over robot, object and plate, 0.5", texture=_TEXTURES),
        _scene("VisionWhole03-v1", "vision", "textures over the whole image, 0.3", texture=_TEXTURES),
        _scene("VisionWhole05-v1", "vision", "textures over the whole image, 0.5", texture=_TEXTURES),
        _scene("Carrot-v1", "semantic", "objects", object=NEW_OBJECTS),
        _scene("Plate-v1", "semantic", "receptacles", plate=Choice(1, 16)),
        _scene("Instruct-v1", "semantic", "phrases", phrase=Choice(1, 16)),
        Scene(f"{PREFIX}MultiCarrot-v1", "semantic", "objects, with a second one beside"),
        Scene(f"{PREFIX}MultiPlate-v1", "semantic", "receptacles, with a second one beside"),
        _scene(
            "Position-v1",
            "execution",
            "places and yaws",
            placement=Choice(PAIRS, OTHER_PAIRS),
            yaw=Choice(len(YAWS), len(OTHER_YAWS)),
        ),
        Scene(f"{PREFIX}EEPose-v1", "execution", "first poses of the arm"),
        # RL4VLA registers the first, its list of evaluations and RLinf have the second.
        Scene(f"{PREFIX}PositionChangeTo-v1", "execution", "a move of the object at step 5"),
        Scene(f"{PREFIX}PositionChange-v1", "execution", "a move of the object at step 5"),
    )
}
