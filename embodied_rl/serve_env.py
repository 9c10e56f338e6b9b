"""`embodied-rl serve-env`: an env server under this interpreter or another."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from embodied_rl.faults import Fault
from embodied_rl.recipe import load_recipe
from envs.base import EnvError
from envs.catalog import gymnasium_envs, maniskill_envs
from envs.launch import ServerProcess
from envs.libero_suites import SUITES, parse_id

RECIPES = Path(__file__).parent / "recipes"


def served_env(word: str, venv: Path | None) -> tuple[str, str, list[Fault]]:
    """Kind and id of what the user named, and what is wrong with it."""
    faults = []
    if venv is not None and not _python(venv).exists():
        faults.append(Fault("--venv", str(venv), f"has no {_python(venv).relative_to(venv)}", f"python -m venv {venv}"))
    if Path(word).is_file() or Path(word, "config.yaml").is_file() or (RECIPES / f"{word}.yaml").exists():
        config, found = load_recipe(word, [])
        if config.env.mix:
            ids = ", ".join(dict.fromkeys(share.id or config.env.id for share in config.env.mix))
            found = [*found, Fault("recipe", word, "a mix of envs, and a server has one kind", f"name one: {ids}")]
        return config.env.kind, config.env.id, [*faults, *found]
    if word.partition("/")[0] in SUITES:
        return "libero", word, [*faults, *([] if venv else _libero_faults(word))]
    if word in gymnasium_envs():
        return "gymnasium", word, faults
    if ":" in word:
        return word, word.rpartition(":")[2], faults
    if word in maniskill_envs() or venv is not None:  # what another environment has is not known here
        return "maniskill", word, faults
    hint = "an id such as PushCube-v1, libero_spatial or CartPole-v1, a recipe, or module:Class"
    return "", word, [*faults, Fault("env", word, "no such env or recipe", hint)]


def serve(arguments: list[str], venv: Path | None) -> int:
    """Serve until interrupted, or until the server ends; returns its exit code."""
    try:
        server = ServerProcess(arguments, str(_python(venv)) if venv else sys.executable)
    except EnvError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130

    patience = iter(["waiting for the sessions; again to end now"])

    def interrupt(*_: object) -> None:
        print(next(patience, "ending"), file=sys.stderr)
        server.popen.send_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, lambda *_: server.popen.terminate())
    signal.signal(signal.SIGINT, interrupt)
    for line in server.said:
        print(line, flush=True)
    server.popen.wait()
    return server.close()


def _libero_faults(word: str) -> list[Fault]:
    try:
        parse_id(word)
    except EnvError as error:
        problem, _, hint = str(error).partition("; ")
        return [Fault("env", word, problem, hint)]
    return []


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"
