"""Which directory a run writes to: new runs never touch an old one, resumed ones find theirs."""

from __future__ import annotations

import re
from pathlib import Path

from embodied_rl.config import Config
from embodied_rl.faults import Fault


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
        if not resume and _is_taken(path):
            hint = f"add --resume to continue it, or choose another name: {_free(path).name} is free"
            return path, [Fault("name", config.name, f"{path} already exists", hint)]
        return path, []
    path = root / recipe_name
    if not resume:
        return (_free(path) if _is_taken(path) else path), []
    family = _family(path)
    return (family[-1] if family else path), []


def runs_in(root: Path) -> list[Path]:
    """Directories under `root` that hold a run with checkpoints, most recent first."""
    found = [path.parent for path in root.glob("*/checkpoints") if any(path.glob("step_*"))]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _family(path: Path) -> list[Path]:
    """Existing directories called like `path` with any suffix, in the order of the suffixes."""
    others = [other for other in path.parent.glob("*") if other.is_dir() and _suffix(path, other)]
    return sorted(others, key=lambda other: _suffix(path, other))


def _suffix(path: Path, other: Path) -> int:
    """1 for `path` itself, 2 for the next of its family, 0 for a stranger."""
    match = re.fullmatch(re.escape(path.name) + r"(?:-([1-9]\d*))?", other.name)
    return int(match[1] or 1) if match else 0


def _free(path: Path) -> Path:
    """The next suffix, above all that exist: the highest is always the newest run."""
    return path.with_name(f"{path.name}-{_suffix(path, _family(path)[-1]) + 1}")


def _is_taken(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())
