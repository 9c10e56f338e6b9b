"""What an episode earns: the success test, the grasps that are remembered, and the reward.

For N envs at once, on the device of what is given. Success is a state of the moment, grasps are remembered until the
episode ends, and the reward is what the potential of both has grown by:

    0.1 grasped before + 0.1 held before + 1.0 on the plate now, if grasped before

So an episode earns 1.2 at most, pushing the object onto the plate earns nothing, and falling off costs what success
had earned. Success does not end an episode; it is read at the last step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BESIDE = 0.01  # metres that the object's centre may be beyond the plate's largest half-extent
ABOVE = 0.05  # metres that the object may be above contact
FORCE = 0.03  # newtons that the contact must exceed
HELD = 5  # steps in a row


def on_plate(object_at: Tensor, plate_at: Tensor, object_half: Tensor, plate_half: Tensor, force: Tensor) -> Tensor:
    """Whether each object lies on its plate, bool [N].

    Args:
        object_at, plate_at: centres, metres [N, 3].
        object_half, plate_half: half-extents of the boxes around them in the world, metres [N, 3].
        force: of the object on the plate, newtons [N, 3].
    """
    offset = object_at - plate_at
    near = offset[:, :2].norm(dim=1) <= plate_half.amax(dim=1) + BESIDE
    height = offset[:, 2]
    low = (height > 0) & (height - plate_half[:, 2] - object_half[:, 2] <= ABOVE)
    return near & low & (force.norm(dim=1) > FORCE)


def contact_forces(query: Callable[[int, int], Tensor], objects: Tensor, plates: Tensor) -> Tensor:
    """The force of each env's own object on its own plate, newtons [N, 3].

    Args:
        query: forces [N, 3] in all envs between the object and the plate of these numbers; asked once for each pair
            that occurs.
        objects, plates: numbers of what is in play in each env, [N].
    """
    pairs, pair = torch.stack([objects, plates], dim=1).unique(dim=0, return_inverse=True)
    forces = [query(thing, plate) for thing, plate in pairs.tolist()]
    return torch.stack(forces)[pair, torch.arange(len(pair), device=pair.device)]


class Grasps:
    """Whether each env's object was ever grasped, and ever held for 5 steps in a row, in its episode.

    Attributes:
        grasped, held: bool [N].
    """

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        self.grasped = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.held = self.grasped.clone()
        self._streak = torch.zeros(num_envs, dtype=torch.int32, device=device)

    def begin(self, rows: Tensor) -> None:
        """Forget, where an episode begins."""
        self.grasped[rows], self.held[rows], self._streak[rows] = False, False, 0

    def update(self, grasping: Tensor) -> None:
        """Take in which objects are grasped after a step, bool [N]."""
        self._streak = torch.where(grasping, self._streak + 1, 0)
        self.grasped = self.grasped | grasping
        self.held = self.held | (self._streak >= HELD)


class PotentialReward:
    """The growth of each env's potential since the step before."""

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        self._before = torch.zeros(num_envs, device=device)

    def begin(self, rows: Tensor | slice) -> None:
        """Where an episode begins, nothing has been earned."""
        self._before[rows] = 0.0

    def step(self, grasped: Tensor, held: Tensor, success: Tensor) -> Tensor:
        """Rewards of a step, float [N]. `grasped` and `held` ever, `success` now: bool [N]."""
        now = 0.1 * grasped + 0.1 * held + 1.0 * (success & grasped)
        earned, self._before = now - self._before, now
        return earned
