"""Checks of the directory that a run writes to, and of what is to be resumed there, for runs of every kind."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from embodied_rl.checkpoint import latest_checkpoint, read_manifest
from embodied_rl.config import Section
from embodied_rl.faults import Fault, show
from embodied_rl.runs import kept, resume_command, runs_in
from embodied_rl.schema import all_keys, flat

# What a resumed run may change: how long, how watched and where it runs, not what is learned from what.
MAY_CHANGE = ("train.", "evaluation.", "tracking.", "cluster.", "run_root", "name", "placement")
NETWORK = ("policy.", "model.")


def run_faults(
    config: Section,
    run_dir: Path,
    resume: bool,
    defaulted: Collection[str] = (),
    may_change: tuple[str, ...] = (),
    more: Callable[[dict[str, Any], Path, str], list[Fault]] | None = None,
) -> list[Fault]:
    """What keeps a run from beginning in a directory, or from going on there.

    Args:
        defaulted: keys that were not understood.
        may_change: keys of this kind of run that a resumed one may change, beside MAY_CHANGE.
        more: further checks of a resumed run, given the old values by key, the checkpoint and a hint.
    """
    if fault := unwritable(run_dir, "run directory", "choose another run_root=..."):
        return [fault]
    if not resume:
        return []
    checkpoint, skipped = latest_checkpoint(run_dir)
    if checkpoint is None:
        return _nothing_to_resume(run_dir, skipped)
    defaults = {name: key.default for name, key in all_keys(type(config)).items()}
    try:
        old = defaults | flat(read_manifest(checkpoint).config, type(config))
    except ValueError as error:  # whoever uses the run has removed it meanwhile
        return [Fault("--resume", str(checkpoint), str(error), "is the run still going on?")]
    except AttributeError:
        return [Fault("--resume", str(checkpoint), "the configuration in its manifest.json is damaged", "")]
    new = flat(config.model_dump(mode="json"), type(config))
    hint = f"to go on as it was: {resume_command(config, run_dir)}"
    faults = more(old, checkpoint, hint) if more else []
    for key in dict.fromkeys((*new, *old)):
        if key.startswith((*MAY_CHANGE, *may_change)) or key in defaulted:
            continue
        if kept(key, old.get(key), may_change) == kept(key, new.get(key), may_change):
            continue
        what = "network" if key.startswith(NETWORK) else "env" if key.startswith("env.") else "run"
        problem = f"a resumed run keeps its {what}; it was {show(old.get(key))} in {checkpoint.name}"
        faults.append(Fault(key, show(new.get(key)), problem, hint))
    return faults


def _nothing_to_resume(run_dir: Path, skipped: list[str]) -> list[Fault]:
    others = [str(path) for path in runs_in(run_dir.parent) if path != run_dir][:5]
    candidates = f"runs with checkpoints: {', '.join(others)}" if others else "to start anew, leave --resume out"
    if skipped:
        wrong = "; ".join(warning.removeprefix("skipped ") for warning in skipped)
        return [Fault("--resume", None, f"no usable checkpoint: {wrong}", candidates)]
    if (run_dir / "config.yaml").is_file():  # it died before its first checkpoint: it starts again
        return []
    what = "holds no run" if run_dir.is_dir() else "does not exist"
    return [Fault("--resume", None, f"nothing to resume: {run_dir} {what}", candidates)]


def unwritable(directory: Path, key: str, hint: str) -> Fault | None:
    """Creates a file in the directory and leaves nothing behind: permissions would not tell for root.

    Args:
        key: what the fault is called by.
        hint: what helps.
    """
    created: list[Path] = []
    try:
        for folder in (*reversed(directory.parents), directory):
            if not folder.exists():
                folder.mkdir()
                created.append(folder)
        with tempfile.NamedTemporaryFile(dir=directory):
            return None
    except OSError as error:
        blocking = next((path for path in (directory, *directory.parents) if path.is_file()), None)
        problem = f"{blocking} is a file, not a directory" if blocking else error.strerror or str(error)
        return Fault(key, str(directory), f"cannot be written: {problem}", hint)
    finally:
        for folder in reversed(created):
            folder.rmdir()
