"""A W&B run that never delays or ends the training.

Importing wandb and opening a run takes a second offline, several online, and up to `INIT_TIMEOUT_S` without a
network. So one background thread opens the run and then does what was asked meanwhile, in order. What fails
there is reported once, and the training goes on; a run that cannot go online continues offline.
"""

from __future__ import annotations

import configparser
import netrc
import os
import queue
import secrets
import shlex
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 60.0
ID_FILE = "wandb_id"

Mode = Literal["online", "offline", "disabled"]
_MODES: dict[str, Mode] = {
    "online": "online", "run": "online", "shared": "online",
    "offline": "offline", "dryrun": "offline", "disabled": "disabled",
}  # fmt: skip


def resolve_mode(requested: str, run_dir: Path) -> Mode:
    """The mode to use. "auto" follows WANDB_MODE, else is online. Without a known API key: offline.

    Says so in one line on stderr, with the command that uploads the run.

    Raises:
        ValueError: the requested mode, or the one in WANDB_MODE, is not one that W&B has.
    """
    chosen, source = requested, "the W&B mode"
    if requested == "auto":
        chosen, source = os.environ.get("WANDB_MODE") or "auto", "the environment variable WANDB_MODE"
    if chosen != "auto" and chosen not in _MODES:
        raise ValueError(f"{source} is {chosen!r}; expected auto, {', '.join(_MODES)}")
    mode = _MODES.get(chosen, "online")
    if mode == "online" and not api_key_known():
        notify(f"no API key found, so this run is recorded offline; to upload it: {sync_command(run_dir)}")
        return "offline"
    return mode


def api_key_known() -> bool:
    """Whether W&B would find credentials (environment, netrc, its settings file), without importing it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = configparser.ConfigParser(default_section="default", interpolation=None)
    directory = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    try:
        settings.read(directory / "settings")
    except configparser.Error:
        settings = configparser.ConfigParser(default_section="default")
    if settings.defaults().get("api_key"):
        return True
    url = os.environ.get("WANDB_BASE_URL") or settings.defaults().get("base_url") or "https://api.wandb.ai"
    paths = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in paths:
        try:
            entry = netrc.netrc(str(Path(path).expanduser())).authenticators(urlsplit(url).netloc)
        except (OSError, netrc.NetrcParseError):
            continue
        if entry and entry[2]:
            return True
    return False


def sync_command(run_dir: Path) -> str:
    return f"wandb sync {shlex.quote(str(run_dir / 'wandb'))}/offline-run-*"


def notify(message: str) -> None:
    print(f"W&B: {message}", file=sys.stderr)


class WandbRun:
    """One W&B run, fed by a background thread. Its id is in `run_dir/wandb_id`: a resume continues it."""

    def __init__(
        self, run_dir: Path, config: dict[str, Any], project: str, name: str, mode: Mode, *, resume: bool
    ) -> None:
        self.location = str(run_dir / "wandb")
        self._run_dir = run_dir
        self._arguments: dict[str, Any] = {
            "project": project,
            "name": name,
            "id": _run_id(run_dir, resume),
            "config": config,
        }
        self._mode = mode
        self._calls: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._exit_code = 0
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def call(self, action: Callable[[Any], None]) -> None:
        """Do `action(run)` once the run is open, after the actions before it. Does not wait."""
        self._calls.put(action)

    def close(self, exit_code: int = 0) -> None:
        """Finish the run, waiting for it to upload for a bounded time."""
        if self._exit_code == 0:
            self._exit_code = exit_code
        self._calls.put(None)
        self._thread.join(INIT_TIMEOUT_S + FINISH_TIMEOUT_S + 15)
        if self._thread.is_alive():
            self._warn(f"still uploading after {INIT_TIMEOUT_S + FINISH_TIMEOUT_S:.0f} s, not waiting any longer")

    def _work(self) -> None:
        run = self._open()
        while (action := self._calls.get()) is not None:
            if run is not None:
                self._attempt(lambda action=action: action(run))  # type: ignore[misc]
        if run is not None:
            self._attempt(lambda: run.finish(exit_code=self._exit_code))

    def _open(self) -> Any:
        """The open run, offline where online fails, or None where both do."""
        if self._mode == "online":
            try:
                run = self._init("online")
            except Exception as error:  # any failure of W&B: the training must go on
                self._warn(f"cannot go online ({_first_line(error)}), continuing offline")
                self._attempt(_teardown)  # W&B's service still holds the run id
            else:
                self.location = run.url or self.location
                notify(f"this run is at {self.location}")
                return run
        return self._attempt(lambda: self._init("offline"))

    def _init(self, mode: Mode) -> Any:
        import wandb

        wandb.setup(wandb.Settings(silent=True, quiet=True))  # init alone still prints where its key came from
        settings = wandb.Settings(
            silent=True,
            quiet=True,
            console="off",
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        )
        return wandb.init(
            **self._arguments,
            mode=mode,
            dir=str(self._run_dir),
            resume="allow",
            allow_val_change=True,
            settings=settings,
        )

    def _attempt(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # any failure of W&B: the training must go on
            self._warn(f"{_first_line(error)}; the run goes on, metrics.jsonl is complete")
            return None

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            notify(f"{message}; to upload what it has recorded: {sync_command(self._run_dir)}")


def _run_id(run_dir: Path, resume: bool) -> str:
    path = run_dir / ID_FILE
    if resume and path.exists() and (known := path.read_text(encoding="utf-8").strip()):
        return known
    new = secrets.token_hex(5)
    path.write_text(new + "\n", encoding="utf-8")
    return new


def _teardown() -> None:
    import wandb

    wandb.teardown()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
