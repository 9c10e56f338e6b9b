"""`embodied-rl serve-policy`: a trained policy behind a websocket that speaks as openpi's (see `policy_client`)."""

from __future__ import annotations

import asyncio
import hmac
import http
import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from embodied_rl.build import build_policy
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.config import Config
from embodied_rl.policy_client import pack, unpack
from envs.base import EnvSpec
from envs.wire import spec_of
from policies import Policy

logger = logging.getLogger(__name__)
MAX_MESSAGE = 2**26  # bytes
OPENPI = {"observation/state": "state", "observation/image": "image", "prompt": "instruction"}
WRIST = "observation/wrist_image"


class ServedPolicy:
    """A checkpoint's policy, acting by its most likely actions. Raises ValueError for one that names no env.

    `spec`: what it sees and does.
    """

    def __init__(self, checkpoint: Path) -> None:
        loaded = load_checkpoint(checkpoint)
        if "env" not in loaded.state:
            raise ValueError(f"{checkpoint} does not say what its env offers: it is of an older version")
        self.config, self.spec = Config(**loaded.config), spec_of(loaded.state["env"])
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.policy: Policy = build_policy(self.config, self.spec)
        self.policy.load_learned_state(loaded.parts["policy"])
        self.policy.to(self.device).eval()

    @property
    def metadata(self) -> dict[str, Any]:
        """What clients are told at first."""
        spec = self.spec
        return {
            "policy": self.config.policy.kind,
            "chunk": self.config.policy.chunk,
            "action_low": list(spec.action.low),
            "action_high": list(spec.action.high),
            "num_choices": spec.action.num_choices,
            "state_size": spec.state_size,
            "image_shape": list(spec.image_shape or ()),
            "instructions": list(spec.instructions),
        }

    @torch.no_grad()
    def infer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Actions for one observation, or for several. Raises ValueError for what is none."""
        observation, is_single = read_observation(request, self.spec)
        tensors = {
            key: torch.from_numpy(np.array(value)).to(self.device) if isinstance(value, np.ndarray) else value
            for key, value in observation.items()
        }
        action = self.policy.act(self.policy.prepare(tensors), True, None).action.float().cpu().numpy()
        return {"actions": action[0] if is_single else action}


def read_observation(request: dict[str, Any], spec: EnvSpec) -> tuple[dict[str, Any], bool]:
    """What a client has sent as the policy takes it, and whether it was of one env. Raises ValueError."""
    given = {OPENPI.get(key, key): value for key, value in request.items()}
    wrist = given.pop(WRIST, None)
    if wrist is not None and "image" in given:
        given["image"] = np.stack([given["image"], wrist], axis=-4)
    elif "image" in given and "observation/image" in request:
        given["image"] = given["image"][..., None, :, :, :]
    expected: dict[str, tuple[tuple[int, ...], type]] = {}
    if spec.state_size is not None:
        expected["state"] = (spec.state_size,), np.float32
    if spec.image_shape is not None:
        expected["image"] = spec.image_shape, np.uint8
    observation: dict[str, Any] = {}
    for key, (shape, dtype) in expected.items():
        if given.get(key) is None:
            raise ValueError(f"{key} is missing; this policy sees {', '.join(expected)}")
        array = np.asarray(given[key])
        if array.shape[-len(shape) :] != shape or array.ndim not in (len(shape), len(shape) + 1):
            raise ValueError(f"{key} has shape {array.shape}; expected {shape}, or with one more dimension in front")
        if dtype is np.uint8 and array.dtype != np.uint8:
            raise ValueError(f"{key} is {array.dtype}; expected uint8, from 0 to 255")
        with np.errstate(over="ignore"):  # told below
            observation[key] = array.astype(dtype, copy=False).reshape(-1, *shape)
        if not np.isfinite(observation[key]).all():
            raise ValueError(f"{key} holds values that are not finite")
    is_single = all(np.ndim(given[key]) == len(shape) for key, (shape, _) in expected.items())
    count = len(next(iter(observation.values())))
    said = given.get("instruction", spec.instruction)
    if not isinstance(said, str) and not (isinstance(said, list) and all(isinstance(one, str) for one in said)):
        raise ValueError(f"instruction is {said!r:.100}; expected words, or a list of them")
    observation["instruction"] = [said] * count if isinstance(said, str) else said
    if {len(value) for value in observation.values()} != {count}:
        raise ValueError("the parts of the observation are of different numbers of envs")
    if count == 0:
        raise ValueError("an observation of no env")
    return observation, is_single


async def run_policy_server(
    policy: ServedPolicy, host: str, port: int, token: bytes | None, started: Callable[[int], None]
) -> None:
    """Serve until cancelled; `started` is told the port. `host` may have the brackets of IPv6."""
    turn = asyncio.Lock()

    async def talk(socket: ServerConnection) -> None:
        await socket.send(pack(policy.metadata))
        while True:
            try:
                data = await socket.recv()
                start = time.monotonic()
                async with turn:
                    answer = await asyncio.to_thread(_answer, policy, data)
                if isinstance(answer, dict):
                    answer["server_timing"] = {"infer_ms": 1000 * (time.monotonic() - start)}
                await socket.send(pack(answer) if isinstance(answer, dict) else answer)
            except ConnectionClosed:
                return

    def admit(socket: ServerConnection, request: Request) -> Response | None:
        if request.path == "/healthz":
            return socket.respond(http.HTTPStatus.OK, "OK\n")
        given = "\n".join(request.headers.get_all("Authorization")).encode()  # of several, none is believed
        if token is not None and not hmac.compare_digest(given, b"Api-Key " + token):
            return socket.respond(http.HTTPStatus.UNAUTHORIZED, "an API key is needed\n")
        return None

    async with serve(
        talk, host.strip("[]"), port, compression=None, max_size=MAX_MESSAGE, process_request=admit
    ) as server:
        started(next(iter(server.sockets)).getsockname()[1])
        await server.serve_forever()


def _answer(policy: ServedPolicy, data: Any) -> dict[str, Any] | str:
    """Actions, or in words what is wrong with the request: openpi's clients raise it."""
    try:
        request = unpack(data)
        if not isinstance(request, dict):
            raise ValueError("an observation is a map")
        return policy.infer(request)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        return f"not an observation of this policy: {error}"
    except (RuntimeError, MemoryError) as error:  # torch's, such as for want of memory: the next one may do
        logger.warning("an inference failed:\n%s", traceback.format_exc())
        return f"the policy failed: {error!r}"
