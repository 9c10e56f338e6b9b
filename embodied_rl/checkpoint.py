"""Checkpoints on disk: written whole or not at all, checked by hash before they are used.

`checkpoints/step_000123/` holds one file for each part, `state.json` and `manifest.json`, which lists every
file with its hash. What the parts mean is the business of the workers that give them. torch is imported only
to save and load, not to look at a checkpoint.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "embodied-rl"
VERSION = 1
POLICY = "policy"
RETRY = "from an older or newer embodied-rl; use the version that wrote it"


@dataclass(frozen=True)
class FileEntry:
    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says; `config` is the configuration of the run that wrote it."""

    step: int
    created: str
    config: dict[str, Any]
    files: dict[str, FileEntry]
    format: str = FORMAT
    version: int = VERSION


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. Tensors are on the CPU."""

    step: int
    parts: dict[str, Any]
    state: dict[str, Any]
    config: dict[str, Any]


def save_checkpoint(
    run_dir: Path,
    step: int,
    parts: Mapping[str, Any],
    state: Mapping[str, Any],
    config: dict[str, Any],
    keep: int,
) -> Path:
    """Writes `run_dir/checkpoints/step_<step>` atomically; keeps the newest `keep` and the one marked as best.

    Args:
        parts: file name -> content. "policy" is a dict of tensors and becomes `policy.safetensors`; any other
            part is what `torch.save` takes and `torch.load(weights_only=True)` gives back.
        state: what JSON holds exactly: nested dicts with text keys, lists, texts, numbers, true, false, None.
        config: the run's configuration, as JSON.

    A killed process leaves a temporary directory at most; the next save removes it.
    Raises TypeError for content that could not be read back.
    """
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    _remove_temporaries(folder)
    final = folder / f"step_{step:06d}"
    temporary = folder / f".{final.name}.tmp"
    temporary.mkdir()
    for name, content in parts.items():
        _write_part(temporary, name, content)
    _require_exact_json(state, "state")
    _write_json(temporary / "state.json", dict(state))
    files = {path.name: _entry(path) for path in sorted(temporary.iterdir())}
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    _write_json(temporary / "manifest.json", dataclasses.asdict(Manifest(step, created, config, files)))
    for path in (*temporary.iterdir(), temporary):
        _fsync(path)
    if final.exists():  # a directory cannot be renamed over another
        final.rename(folder / f".{final.name}.replaced.tmp")
    temporary.rename(final)
    _fsync(folder)
    _remove_temporaries(folder)
    older = [path for path in _step_folders(run_dir) if path not in (final, best_checkpoint(run_dir))]
    for path in older[max(keep, 1) - 1 :]:
        shutil.rmtree(path)
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Loads a checkpoint after checking every file. Raises ValueError that lists what is wrong with it."""
    if wrong := problems(path):
        raise ValueError(f"{path} cannot be loaded: {'; '.join(wrong)}")
    import torch
    from safetensors.torch import load_file

    manifest = read_manifest(path)
    parts: dict[str, Any] = {}
    for name in manifest.files:
        part, suffix = os.path.splitext(name)
        if suffix == ".safetensors":
            parts[part] = load_file(path / name)
        elif suffix == ".pt":
            parts[part] = torch.load(path / name, map_location="cpu", weights_only=True)
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(manifest.step, parts, state, manifest.config)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint directory. Raises ValueError if it is not one that this version reads."""
    file = path / "manifest.json"
    if not path.is_dir():
        raise ValueError("no such directory")
    if not file.is_file():
        raise ValueError("no manifest.json: not a checkpoint, or one that was never completed")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"manifest.json is damaged: {error}") from None
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise ValueError(f"not a checkpoint of {FORMAT}: manifest.json says format {found!r}")
    if data.get("version") != VERSION:
        raise ValueError(f"format version {data.get('version')}, and this version reads {VERSION}: {RETRY}")
    try:
        files = {name: FileEntry(**entry) for name, entry in data.pop("files").items()}
        return Manifest(files=files, **data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"manifest.json is damaged: {error}") from None


def problems(path: Path) -> list[str]:
    """Everything that keeps the checkpoint from being loaded; empty if it is sound. Hashes every file."""
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return [str(error)]
    wrong = [] if "state.json" in manifest.files else ["manifest.json lists no state.json"]
    for name, entry in manifest.files.items():
        file = path / name
        if Path(name).name != name:
            wrong.append(f"{name} lies outside the checkpoint")
        elif (size := _size(file)) is None:
            wrong.append(f"{name} is missing")
        elif size != entry.size:
            wrong.append(f"{name} has {size} bytes instead of {entry.size}")
        elif not _is_sound(file, entry):
            wrong.append(f"{name} is damaged: its SHA-256 is not the one in manifest.json")
    return wrong


def latest_checkpoint(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint of a run, and a warning for each newer one that was skipped."""
    warnings: list[str] = []
    for path in _step_folders(run_dir):
        wrong = problems(path)
        if not wrong:
            return path, warnings
        warnings.append(f"skipped {path}: {'; '.join(wrong)}")
    return None, warnings


def mark_best(run_dir: Path, step: int | None) -> None:
    """Lets the link `checkpoints/best` point to the checkpoint of a step; None removes it."""
    link = run_dir / "checkpoints" / "best"
    if step is None:
        link.unlink(missing_ok=True)
        return
    temporary = link.with_name(".best.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(f"step_{step:06d}")
    temporary.replace(link)


def best_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint marked as best, if there is one."""
    link = run_dir / "checkpoints" / "best"
    return link.parent / link.readlink() if link.is_symlink() and link.exists() else None


# --- files --------------------------------------------------------------------------------------------------


def _step_folders(run_dir: Path) -> list[Path]:
    """Checkpoint directories of a run, newest first, sound or not."""
    found = [path for path in (run_dir / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def _remove_temporaries(folder: Path) -> None:
    for path in folder.glob(".step_*.tmp"):
        shutil.rmtree(path)


def _write_part(folder: Path, name: str, content: Any) -> None:
    import torch
    from safetensors.torch import save_file

    if not re.fullmatch(r"\w+", name) or name in ("state", "manifest"):
        raise ValueError(f"a part cannot be called {name!r}")
    if name == POLICY:
        save_file(_independent(content), folder / f"{name}.safetensors")
        return
    file = folder / f"{name}.pt"
    torch.save(content, file)
    try:  # mmap: the structure is read, the tensors are not
        torch.load(file, weights_only=True, mmap=True)
    except Exception as error:  # pickle's errors have no common base
        raise TypeError(f"part {name!r} could not be loaded again with weights_only=True: {error}") from error


def _independent(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Contiguous CPU tensors that share no memory, as safetensors demands; tied ones are stored twice."""
    result: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result


def _require_exact_json(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; JSON would turn it into a text")
            _require_exact_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _require_exact_json(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{where} is a {type(value).__name__}, which JSON does not give back as it was")


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def _size(path: Path) -> int | None:
    """None: there is none, or not any more, as a run that goes on removes its older checkpoints."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _is_sound(path: Path, entry: FileEntry) -> bool:
    try:
        return _entry(path) == entry
    except OSError:  # a disk that fails is damage too
        return False


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
