"""A put-on-plate scene of boxes: what a published class tells an env of, without its assets and its robot.

Even episode ids drop the object onto the plate, odd ones beside it.
"""

import numpy as np
import sapien
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils.building import actors
from mani_skill.utils.registration import register_env
from mani_skill.utils.structs.pose import Pose

from envs.put_on_plate.scoring import Grasps, contact_forces, on_plate

ENV_ID = "PutOnPlateInScene25Main-v3"
OBJECT, PLATE = [0.02, 0.02, 0.02], [0.1, 0.1, 0.01]


@register_env(ENV_ID, max_episode_steps=80, asset_download_ids=["bridge_v2_real2sim"])
class StandIn(BaseEnv):
    SUPPORTED_OBS_MODES = ["rgb+segmentation"]
    SUPPORTED_REWARD_MODES = ["none"]
    model_db_carrot = {"carrot_1": {"name": "carrot"}, "pear_1": {"name": "pear"}}
    model_db_plate = {"plate_1": {"name": "plate"}, "dish_1": {"name": "dish"}}

    def __init__(self, **options: object) -> None:
        self.grasping = False  # what tests let the gripper do
        super().__init__(robot_uids="panda", **options)

    @property
    def _default_sensor_configs(self) -> CameraConfig:
        return CameraConfig("3rd_view_camera", sapien.Pose([0.3, 0, 0.5], [0, 0.4, 0, 0.9]), 64, 48, 1.5)

    def _load_scene(self, options: dict) -> None:
        self.thing, self.plate = (
            actors.build_box(self.scene, half, [1, 0.5, 0, 1], name, initial_pose=sapien.Pose([at, 1, 1]))
            for name, half, at in (("thing", OBJECT, 1), ("plate", PLATE, 2))
        )
        ground = self.scene.create_actor_builder()
        ground.add_box_collision(half_size=[1, 1, 0.05])
        ground.initial_pose = sapien.Pose([0, 0, -0.05])
        ground.build_static("table")
        self.grasps = Grasps(self.num_envs, self.device)

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict) -> None:
        episode = options.get("episode_id", torch.zeros(self.num_envs, dtype=torch.int64))
        self.obj_set = options.get("obj_set")
        self.select_carrot_ids, self.select_plate_ids = episode // 4 % 2, episode // 2 % 2
        y = 0.3 * (episode % 2)
        x, zero = torch.full_like(y, 0.3), torch.zeros_like(y)
        self.plate.set_pose(Pose.create_from_pq(torch.stack([x, zero, zero + PLATE[2]], dim=1)))
        self.thing.set_pose(Pose.create_from_pq(torch.stack([x, y, zero + 0.08], dim=1)))
        self.grasps.begin(env_idx)

    def evaluate(self) -> dict[str, torch.Tensor]:
        self.grasps.update(torch.full((self.num_envs,), self.grasping))
        force = contact_forces(
            lambda thing, plate: self.scene.get_pairwise_contact_forces(self.thing, self.plate),
            self.select_carrot_ids,
            self.select_plate_ids,
        )
        sizes = (torch.tensor(np.array([half]), dtype=torch.float32) for half in (OBJECT, PLATE))
        success = on_plate(self.thing.pose.p, self.plate.pose.p, *sizes, force)
        return {"is_src_obj_grasped": self.grasps.grasped, "consecutive_grasp": self.grasps.held, "success": success}
