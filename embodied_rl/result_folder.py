"""Where the result of an evaluation goes: a folder of its own each time, so that none is written over another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from embodied_rl.faults import Fault
from embodied_rl.run_faults import unwritable
from embodied_rl.runs import is_taken, next_free


def result_folder(out: Path | None, default: Path, faults: Sequence[Fault] = ()) -> tuple[Path, list[Fault]]:
    """A new folder, and all faults. It is made here, before anything is measured that could not be kept, unless there
    are faults.

    Args:
        out: where the user wants the result, new or empty; None: `default`, with a number where that exists.
        faults: those that are known already.
    """
    folder = out or (next_free(default) if default.is_dir() else default)
    hint = "choose another directory, new or empty: --out DIR"
    if is_taken(folder):
        fault: Fault | None = Fault("--out", str(folder), "is not empty", hint)
    else:
        fault = unwritable(folder, "--out", hint)
    if found := [*faults, *([fault] if fault else [])]:
        return folder, found
    try:
        folder.mkdir(parents=True, exist_ok=out is not None)
    except FileExistsError:  # another evaluation has just taken it
        return result_folder(out, default)
    return folder, []


@contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Take the folder away again after a block that has left nothing in it."""
    try:
        yield
    finally:
        with suppress(OSError):  # it holds something
            folder.rmdir()
