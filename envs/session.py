"""The sessions of an env server: what each trainer has there, and what it may ask for (`server` does the talking)."""

from __future__ import annotations

import logging
import os
import platform
import time
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from envs import libero, maniskill, wire
from envs.base import EnvError, EnvSettings, Episode
from envs.pool import EnvPool, PooledVectorEnv

logger = logging.getLogger(__name__)
CLIENT_OPTIONS = {"maniskill": maniskill.SIMULATOR_KEYS, "libero": libero.SIMULATOR_KEYS}
MAX_IMAGE = 1024  # pixels
MAX_CHUNK = 1000
MAX_FRAMES = 20_000  # of the films in one request


def _limit(default: Any, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class Limits:
    """What a server allows. Times in seconds."""

    max_sessions: int = _limit(8, "trainers at once")
    max_envs: int = _limit(1024, "envs of each session")
    processes: int = _limit(len(os.sched_getaffinity(0)), "env processes of each session")
    step_timeout_s: float = _limit(120.0, "seconds: an env process silent for longer is replaced")
    session_timeout_s: float = _limit(120.0, "seconds: a session whose trainer is silent for longer is closed")
    drain_s: float = _limit(30.0, "seconds that sessions may go on once the server has been asked to end")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value > 0 or (name == "drain_s" and value == 0)):
                raise ValueError(f"the limit {name} is {value}; it has to be greater than 0")
        if self.max_envs > wire.MAX_LIST:
            raise ValueError(f"the limit max_envs is {self.max_envs}; messages are of {wire.MAX_LIST} envs at most")


@dataclass
class Session:
    """One trainer's envs. `queue` holds what is to be done, `job` what a thread is doing."""

    identity: bytes  # where its answers go
    heard: float
    pool: EnvPool | None = None
    sets: dict[int, PooledVectorEnv] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)  # sets whose memory the client has mapped
    stepping: dict[int, tuple[int, float]] = field(default_factory=dict)  # set: (request, when it was begun)
    queue: deque[tuple[int, dict[str, Any], int]] = field(default_factory=deque)  # with the bytes of each
    job: tuple[int, int | None, Future] | None = None  # request, set, what a thread does
    seen: set[int] = field(default_factory=set)  # numbers of requests, from the newest's window
    newest: int = 0
    replies: OrderedDict[int, tuple[bytes, list[Any]]] = field(default_factory=OrderedDict)  # where to, and frames
    closing: bool = False

    def hurry(self, since: float) -> None:
        """Give up what a thread is doing where the trainer has closed the session, or was not heard since then.

        A simulator may hang for long.
        """
        is_left = self.heard < since or any(request["op"] == "close" for _, request, _ in self.queue)
        if is_left and self.pool is not None and not self.closing:
            self.pool.give_up()


class Work:
    """What sessions ask for. Each returns what the answer holds."""

    def __init__(self, kind: str, env_id: str, limits: Limits, counts: Counter[str], session: Session) -> None:
        self.kind, self.id, self.limits, self.counts, self.session = kind, env_id, limits, counts, session

    def tried(self, job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The job's answer, or what went wrong: with the caller's request, or here."""
        try:
            return job()
        except EnvError as error:
            return {"error": str(error), "kind": "EnvError"}
        except Exception as error:  # a request may bring about any; it is its sender's, and ends no server
            logger.warning("a request failed:\n%s", traceback.format_exc())
            return {"error": str(error) if isinstance(error, ValueError) else repr(error), "kind": "ValueError"}

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.session.pool is not None:
            raise EnvError("this session is open already")
        asked = request["kind"], request["id"]
        if asked[0] != self.kind or not (f"{asked[1]}/").startswith(f"{self.id}/"):
            raise EnvError(f"the server has {self.id} ({self.kind}), and asked for is {asked[1]} ({asked[0]})")
        wished = request["processes"]
        if wished is not None and not (isinstance(wished, int) and wished > 0):
            raise ValueError(f"{wished} env processes; at least 1 are needed")
        processes = min(wished or self.limits.processes, self.limits.processes)
        self.session.pool = EnvPool(processes, self.limits.step_timeout_s)
        about: dict[str, Any] = {"protocol": wire.PROTOCOL, "processes": processes, "max_envs": self.limits.max_envs}
        about["session_timeout_s"] = self.limits.session_timeout_s
        return {"value": {**about, "versions": versions()}}

    def make(self, request: dict[str, Any]) -> dict[str, Any]:
        settings, session = self._settings(request["settings"]), self.session
        env_ids, chunk, which = [int(number) for number in request["env_ids"]], request["chunk"], request["set"]
        if not isinstance(which, int) or which in session.sets or not 1 <= chunk <= MAX_CHUNK or not env_ids:
            raise ValueError(f"a set {which} of {len(env_ids)} envs in chunks of {chunk}")
        count = len(env_ids) + sum(env.num_envs for env in session.sets.values())
        if count > self.limits.max_envs:
            raise EnvError(f"{count} envs in one session; the server takes up to {self.limits.max_envs}")
        options = {name: request[name] for name in ("seed", "group_size", "auto_reset", "record_actions")}
        env = self._pool().vector_env(settings, env_ids, chunk, **options)
        session.sets[which] = env
        env.go_on(np.asarray(request["numbers"], np.int64), np.asarray(request["lost"], bool))
        memory, name = env.memory
        place = {"pid": os.getpid(), "descriptor": memory, "name": name}
        return {"value": {"spec": wire.plain_spec(env.spec), "memory": place}}

    def begin(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        """Begin a chunk step, whose answer comes later."""
        which = request["set"]
        env = self._set(request)
        if which in self.session.stepping:
            raise ValueError(f"a chunk step of set {which} is in flight")
        if which in self.session.shared:
            env.begin_chunk(int(request["rung"]))
        else:
            env.chunk_step_async(np.asarray(request["actions"], np.float32))
        self.session.stepping[which] = number, time.monotonic()
        return {}

    def finish(self, env: PooledVectorEnv) -> dict[str, Any]:
        episodes, lost, spans = env.finish_chunk()
        value = {"episodes": [vars(episode) for episode in episodes], "lost": lost.nonzero()[0].tolist()}
        return {"value": {**value, "spans": spans, "doorbells": env.doorbells}}

    def reset(self, request: dict[str, Any]) -> dict[str, Any]:
        self._set(request).reset(*(request[name] for name in ("rows", "seeds", "init_state_ids", "numbers")))
        return {"value": None}

    def state(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"value": self._set(request).state()}

    def restore(self, request: dict[str, Any]) -> dict[str, Any]:
        self._set(request).restore(request["state"])
        return {"value": None}

    def drop(self, request: dict[str, Any]) -> dict[str, Any]:
        self._set(request).close()
        self.session.shared.discard(request["set"])
        self._forget(request["set"])
        return {"value": None}

    def render(self, request: dict[str, Any]) -> dict[str, Any]:
        episodes = [Episode(**episode) for episode in request["episodes"]]
        frames = sum(1 + (0 if episode.actions is None else len(episode.actions)) for episode in episodes)
        if frames > MAX_FRAMES:
            raise EnvError(f"films of {frames} frames; the server draws up to {MAX_FRAMES} at once")
        return {"value": self._pool().render(self._settings(request["settings"]), episodes)}

    def close(self) -> dict[str, Any]:
        if self.session.pool is not None:
            self.session.pool.close()
        for which in list(self.session.sets):
            self._forget(which)
        return {}

    OPS = {"open": open, "make": make, "reset": reset, "state": state, "restore": restore, "drop": drop}
    OPS |= {"render": render}

    def _forget(self, which: int) -> None:
        self.counts.update(executed([self.session.sets.pop(which)]))

    def _pool(self) -> EnvPool:
        if self.session.pool is None:
            raise ValueError("the session was not opened")
        return self.session.pool

    def _set(self, request: dict[str, Any]) -> PooledVectorEnv:
        env = self.session.sets.get(request["set"])
        if env is None:
            raise ValueError(f"there is no set {request['set']}")
        if request.get("shared") is True:
            self.session.shared.add(request["set"])
        return env

    def _settings(self, plain: dict[str, Any]) -> EnvSettings:
        """What a client asks for, which may be the kind's own options and no arguments of other classes."""
        settings = wire.settings_of(plain)
        if settings.kind != self.kind or not f"{settings.id}/".startswith(f"{self.id}/"):
            raise EnvError(f"the server has {self.id} ({self.kind}), not {settings.id} ({settings.kind})")
        allowed = CLIENT_OPTIONS.get(settings.kind, ("render",))
        if foreign := sorted(set(settings.simulator) - set(allowed)):
            raise EnvError(
                f"the server takes no option '{foreign[0]}' for {settings.id}; it takes {', '.join(allowed)}"
            )
        if settings.simulator.get("sim_backend") == "gpu":
            raise EnvError("a server simulates on its CPUs: sim_backend has to be cpu or auto")
        if (size := settings.simulator.get("image_size")) and not 1 <= size <= MAX_IMAGE:
            raise EnvError(f"images of {size} pixels; the server draws up to {MAX_IMAGE}")
        return settings


def executed(sets: Iterable[PooledVectorEnv]) -> dict[str, int]:
    """Chunk steps and env steps that sets have run so far, whoever began them."""
    done = [env.buffers for env in sets]
    return {"chunks": sum(int(o.chunks.max()) for o in done), "env_steps": sum(int(o.steps.sum()) for o in done)}


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what a simulator does, of those that are installed."""
    found = {"python": platform.python_version()}
    for name in ("numpy", "gymnasium", "mujoco", "robosuite", "mani_skill", "sapien", "pyzmq"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
