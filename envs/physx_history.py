"""Makes resets of CPU physics free of history, so that a seed and actions decide an episode bit for bit.

PhysX keeps contact and sleep data from one step to the next, and a reset that only sets poses leaves it in place: the
same seed and actions then give another episode after each other one, by tens of centimetres once objects touch.
Rebuilding the env (reconfigure) would cure it for 0.2 s; a new, empty physics scene for the old objects costs a
few milliseconds at most.
"""

from __future__ import annotations

from typing import Any


def forget(scene: Any) -> None:
    """Move everything in a `ManiSkillScene` with one CPU sub-scene into a new physics scene; poses stay as they are."""
    import sapien
    from sapien import physx

    old, old_physics = scene.sub_scenes[0], scene.px
    physx.set_scene_config(old_physics.config)
    physics = physx.PhysxCpuSystem()
    physics.timestep = old_physics.timestep
    systems = [physics, *([old.render_system] if scene.can_render() else [])]
    new = sapien.Scene(systems)
    entities = list(old.entities)
    for entity in entities:  # all are taken out before one goes in: the links of a robot cannot be in two scenes
        old.remove_entity(entity)
    for entity in entities:
        new.add_entity(entity)
    for body in physics.rigid_dynamic_components:
        if not body.kinematic:  # its sleep counters, which go with it, start afresh
            body.put_to_sleep()
            body.wake_up()
    scene.sub_scenes[0], scene.px = new, physics
