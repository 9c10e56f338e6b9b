"""Where measurements of earlier runs are kept: one file for each user, with a profile for each machine and recipe.

The file is `profiles.yaml` in `$EMBODIED_RL_CACHE`, or else in `~/.cache/embodied-rl`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embodied_rl.config import Section
from scheduler.placement import local_device_count
from scheduler.profile import Profile, ProfileError

logger = logging.getLogger(__name__)

# What the cost of a stage depends on. How envs are cut and where workers are is what a plan decides.
COSTLY = ("env", "policy", "algorithm", "deterministic", "inference_block", "model", "sampling")


def profiles_file() -> Path:
    """The file of all profiles."""
    folder = os.environ.get("EMBODIED_RL_CACHE") or Path.home() / ".cache" / "embodied-rl"
    return Path(folder) / "profiles.yaml"


def machine_name() -> str:
    """What profiles are kept apart by: the host and its devices."""
    count, kind = local_device_count()
    return f"{platform.node()} with {count} {kind}"


def recipe_key(config: Section) -> str:
    """The same for configurations whose stages cost the same."""
    content = config.model_dump(mode="json")
    costly = {key: content[key] for key in COSTLY if key in content}
    if "rollout" in content:
        costly["steps"] = content["rollout"]["steps"]
    digest = hashlib.sha256(json.dumps(costly, sort_keys=True).encode()).hexdigest()[:12]
    subject = content["env"]["id"] if "env" in content else content["model"]["path"]
    return f"{subject} {content['algorithm']['name']} {digest}"


def load_profile(config: Section, file: Path | None = None, machine: str | None = None) -> Profile:
    """What is known of a recipe on a machine (default: this one). Raises ProfileError if that is nothing."""
    file, machine = file or profiles_file(), machine or machine_name()
    if not file.exists():
        raise ProfileError(f"there is no file {file}")
    return Profile.load(file, machine, recipe_key(config))


def known_profile(config: Section) -> Profile:
    """What is known of a recipe on this machine, which may be nothing."""
    try:
        return load_profile(config)
    except ProfileError:
        return Profile(machine_name(), recipe_key(config))


def save_profile(profile: Profile, run_dir: Path) -> None:
    """Keep a profile for later runs, and beside this run. What cannot be kept is said in the log, and no failure."""
    profile.save(run_dir / "profile.yaml")
    file = profiles_file()
    try:
        with _locked(file):
            try:
                profile.save(file)
            except ProfileError as damage:
                file.replace(file.with_suffix(".damaged"))
                profile.save(file)
                logger.warning("%s; it was moved to %s", damage, file.with_suffix(".damaged"))
    except OSError as error:
        logger.warning("the measurements of this run are not kept for later ones: %s", error)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process at a time rewrites the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
