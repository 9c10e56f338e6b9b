"""Which directory a run writes to, and what is taken from it later: new runs never touch an old one, resumed ones find
theirs."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from embodied_rl.checkpoint import best_checkpoint, latest_checkpoint, problems, read_manifest
from embodied_rl.config import Config
from embodied_rl.faults import Fault
from embodied_rl.recipe import EMBODIED

logger = logging.getLogger(__name__)
WHERE = ("env.server", "env.server_token_file", "env.server_timeout_s", "env.python")  # envs are simulated
MIX = "env.mix"


def choose_run_dir(config: Config, recipe_name: str, resume: bool | str) -> tuple[Path, list[Fault]]:
    """The run directory, not created here.

    A run without a name is called after its recipe: `foo`, or `foo-2`, `foo-3`... if there are others.
    Resuming takes the newest of these. With a name, that directory is meant and no other.

    Args:
        resume: True to resume, or the run directory to resume.
    """
    if isinstance(resume, str):
        return Path(resume), []
    root = Path(config.run_root)
    if config.name is not None:
        path = root / config.name
        if not resume and is_taken(path):
            hint = f"add --resume to continue it, or choose another name: {next_free(path).name} is free"
            return path, [Fault("name", config.name, f"{path} already exists", hint)]
        return path, []
    path = root / recipe_name
    if not resume:
        return (next_free(path) if is_taken(path) else path), []
    family = numbered(path)
    return (family[-1] if family else path), []


def resume_command(config: Any, run_dir: Path) -> str:
    """What goes on with this run, and no other, as it was: its directory holds its configuration."""
    does = "sft" if hasattr(config, "sft") and config.sft.data else "train"
    place = str(run_dir) if len(run_dir.parts) > 1 else f"./{run_dir}"  # else a recipe may have its name
    return shlex.join(["embodied-rl", does, place, "--resume"])


def numbered(path: Path) -> list[Path]:
    """Existing directories called like `path` with any suffix, in the order of the suffixes."""
    others = [other for other in path.parent.glob("*") if other.is_dir() and _suffix(path, other)]
    return sorted(others, key=lambda other: _suffix(path, other))


def next_free(path: Path) -> Path:
    """The next suffix, above all that exist: the highest is always the newest run."""
    return path.with_name(f"{path.name}-{_suffix(path, numbered(path)[-1]) + 1}")


def is_taken(path: Path) -> bool:
    """Whether it is a directory that holds something."""
    return path.is_dir() and any(path.iterdir())


def runs_in(root: Path) -> list[Path]:
    """Directories under `root` that hold a run with checkpoints, most recent first."""
    found = [path.parent for path in root.glob("*/checkpoints") if any(path.glob("step_*"))]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def checkpoint_at(path: Path) -> tuple[Path, Config, list[Fault]]:
    """The checkpoint at `path`, or the best of the run there, or its newest sound one, and the configuration that it
    was written with; or what is wrong."""
    found, faults = path, []
    if (path / "checkpoints").is_dir():
        best = best_checkpoint(path)
        usable, skipped = (best, []) if best is not None and not problems(best) else latest_checkpoint(path)
        for warning in skipped:
            logger.warning(warning)
        found, faults = usable or path, [] if usable else [_without_checkpoint(path)]
    elif not path.is_dir():
        faults = [not_a_run(path, "is a file, not a directory" if path.exists() else "no such directory")]
    elif (path / "config.yaml").is_file() or not is_taken(path):
        faults = [_without_checkpoint(path)]
    elif (path / "config.json").is_file() and not (path / "manifest.json").exists():
        whose = path.parent if (path.parent / "checkpoints").is_dir() else "the run that wrote it"
        hint = f"give {whose}; OpenVLA is evaluated as it is here by `embodied-rl eval {path} --suite libero_spatial`"
        faults = [Fault("checkpoint", str(path), "is a model for use elsewhere, which knows no env", hint)]
    else:
        faults = [Fault("checkpoint", str(path), problem) for problem in problems(path)]
    if faults:
        return found, Config(), faults
    try:
        return found, Config.model_validate(read_manifest(found).config), []
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, detail["loc"])) for detail in error.errors())
        problem = f"its configuration is not one of this version: {keys}"
        return found, Config(), [Fault("checkpoint", str(found), problem, "use the version that wrote it")]


def moved(config: Config, overrides: Sequence[str]) -> tuple[Config, list[Fault]]:
    """A checkpoint's configuration with its envs where overrides of `WHERE` say; or what is wrong with these."""
    hint = f"what may be given: {', '.join(WHERE)}, and these in {MIX}"
    foreign = [word for word in overrides if word.partition("=")[0] not in (*WHERE, MIX)]
    if not overrides or foreign:
        return config, [Fault("command line", word, "an evaluation is of what was trained", hint) for word in foreign]
    found, faults = EMBODIED.read(config.model_dump(mode="json"), overrides)
    before, after = (kept(MIX, one.model_dump(mode="json")["env"]["mix"], WHERE) for one in (config, found))
    own = [share.server for share in found.env.mix if share.server]
    if before != after and not faults:
        faults = [Fault(MIX, None, "an evaluation is of what was trained", hint)]
    elif own and config.env.server != found.env.server:
        problem = f"shares of {MIX} have servers of their own, which would stay"
        faults = [*faults, Fault("env.server", list(found.env.server), problem, f"give {MIX} with all of its shares")]
    return found, faults


def kept(key: str, value: Any, may_change: tuple[str, ...]) -> Any:
    """What of a key's value stays: of a list of shares, which have keys of the section that it is in, those that do."""
    if not isinstance(value, list):
        return value
    section = key.rpartition(".")[0]
    stays = lambda share: {name: share[name] for name in share if not f"{section}.{name}".startswith(may_change)}  # noqa: E731
    return [stays(share) if isinstance(share, dict) else share for share in value]


def _without_checkpoint(path: Path) -> Fault:
    if any((path / "checkpoints").glob("step_*")):
        return Fault("run", str(path), "no usable checkpoint")
    hint = "a run saves one every train.checkpoint_every iterations, and at its end"
    return Fault("run", str(path), "has no checkpoint yet", hint)


def not_a_run(path: Path, problem: str) -> Fault:
    """`path` was taken for a run."""
    known = [str(run) for run in runs_in(path.parent)][:5]
    return Fault("run", str(path), problem, f"runs: {', '.join(known)}" if known else "")


def _suffix(path: Path, other: Path) -> int:
    """1 for `path` itself, 2 for the next of its family, 0 for a stranger."""
    match = re.fullmatch(re.escape(path.name) + r"(?:-([1-9]\d*))?", other.name)
    return int(match[1] or 1) if match else 0
