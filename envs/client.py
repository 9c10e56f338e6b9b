"""The trainer's end of an env server: `RemotePool`, used like `pool.EnvPool`; its vector envs are in `remote`.

A server that is killed, stopped or cut off is waited for, up to a time limit; then an EnvError names it. If it comes
back without the session, the session is opened anew as after the loss of an env process: episodes that were running are
lost and counted, and with auto-reset the next ones begin.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from envs import wire
from envs.base import EnvError, EnvSettings, Episode
from envs.remote import RemoteVectorEnv
from envs.slots import VectorArgs
from envs.wire import WireError

logger = logging.getLogger(__name__)
ASK_AGAIN_S = 1.0  # without an answer, whether the server is there
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | REFUSED
ALIVE_S = 5.0  # between signs of life to the server, or less where it is impatient
MAX_LOSSES = 3  # of the session, without a finished chunk in between


class _Gone(Exception):
    """The server does not know the session any more."""


@dataclass
class Request:
    """What was asked, and its answer once that came."""

    op: str
    fields: dict[str, Any]
    number: int = 0
    reply: dict[str, Any] | None = None


class RemotePool:
    """A session on an env server. `replaced` and `lost_episodes` count as those of an `EnvPool`, reconnections too.

    Args:
        address: as the server prints it.
        kind, env_id: of all envs that will be made.
        processes: how many env processes to ask for; default: the server's own number.
        timeout_s: a server silent for longer ends the run.
        token: as the server has it, if it has one.
        why_ended: how the server ended, if it is known to have; else "".

    Raises EnvError if the server cannot be reached in time, or has other envs.
    """

    pids: Sequence[int] = ()  # they are the server's

    def __init__(
        self,
        address: str,
        kind: str,
        env_id: str,
        processes: int | None = None,
        timeout_s: float = 60.0,
        token: bytes | None = None,
        why_ended: Callable[[], str] = lambda: "",
    ) -> None:
        self.address, self.timeout_s = address, timeout_s
        self.replaced = self.lost_episodes = 0
        self.sets: dict[int, RemoteVectorEnv] = {}
        self._asked = {"kind": kind, "id": env_id, "processes": processes}
        self._token, self._key = token, secrets.token_bytes(16)
        self._why_ended = why_ended
        self._counted = (0, 0)  # replaced processes and lost episodes, as the present session last told
        self._numbers, self._set_numbers = itertools.count(1), itertools.count(1)
        self._pending: dict[int, Request] = {}
        self._losses = 0
        self._socket = self._connect()
        self._monitor = self._watch()
        self._handshakes = {"begun": 0, "done": 0}
        self._refused = False  # libzmq does not try again then
        self._silent_s = 0.0
        self._ended = threading.Event()
        try:
            self.about: dict[str, Any] = self.ask("open", **self._asked)["value"]
            alive = self._connect()
        except BaseException:
            self._disconnect()
            raise
        threading.Thread(target=self._stay_alive, args=[alive], daemon=True).start()

    @property
    def num_processes(self) -> int:
        return int(self.about["processes"])

    def vector_env(
        self,
        settings: EnvSettings,
        env_ids: Sequence[int],
        chunk: int = 1,
        seed: int = 0,
        group_size: int = 1,
        auto_reset: bool = True,
        record_actions: bool = False,
    ) -> RemoteVectorEnv:
        """A vector env on the server; see `VectorArgs` for the arguments. Raises EnvError."""
        args = VectorArgs(settings, tuple(env_ids), chunk, seed, group_size, auto_reset, record_actions)
        env = RemoteVectorEnv(self, next(self._set_numbers), args)
        self.sets[env.key] = env
        return env

    def render(self, settings: EnvSettings, episodes: Sequence[Episode]) -> list[np.ndarray]:
        """Films of recorded episodes [T+1, H, W, 3]."""
        plain = [vars(episode) for episode in episodes]
        return self.ask("render", settings=wire.plain_settings(settings), episodes=plain)["value"]

    def close(self) -> None:
        """End the session."""
        if not self._ended.is_set():
            self.send("close")
            self._disconnect()

    # ------------------------------------------------------------------------------------------ requests

    def send(self, op: str, **fields: Any) -> Request:
        """Ask for something whose answer `wait` brings."""
        request = Request(op, fields)
        self._post(request)
        return request

    def wait(self, request: Request) -> dict[str, Any]:
        """The answer to a request. Raises EnvError with what went wrong, here or on the server."""
        self._silent_s = 0.0
        while request.reply is None:
            try:
                self._listen()
            except _Gone:
                self._recover()
        reply = request.reply
        if "error" in reply:
            raise (ValueError if reply["kind"] == "ValueError" else EnvError)(f"{self.address}: {reply['error']}")
        return reply

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Ask and wait."""
        return self.wait(self.send(op, **fields))

    def chunk_was_finished(self) -> None:
        self._losses = 0

    def _post(self, request: Request, again: bool = False) -> None:
        request.number = request.number if again else next(self._numbers)
        self._say({"op": request.op, "number": request.number, **request.fields})
        self._pending[request.number] = request

    def _say(self, message: dict[str, Any]) -> None:
        frames = wire.pack({"protocol": wire.PROTOCOL, "session": self._key, **message})
        if (size := wire.largest(frames)) > wire.MAX_REQUEST:
            limit = f"env servers take {wire.MAX_REQUEST} at most: fewer envs of one server need less"
            raise EnvError(f"{self.address}: the request to {message['op']} has {size} bytes in one part; {limit}")
        with suppress(zmq.Again):  # there is no connection: what is not answered is asked again
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)

    def _listen(self) -> None:
        """Take in a message, or ask whether the server is there. Raises EnvError once it was silent for too long."""
        with suppress(zmq.Again):  # nothing came within ASK_AGAIN_S
            frames = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
            self._silent_s = 0.0
            try:
                self._take(wire.unpack(frames))
            except (WireError, KeyError, TypeError) as error:
                raise EnvError(f"{self.address} is no env server of this version: {error}") from None
            return
        self._silent_s += ASK_AGAIN_S  # not by the clock, which goes on where this process is stopped
        silent = self._silent_s
        why = self._why_not(silent)
        if silent > self.timeout_s or (why and silent > 3 * ASK_AGAIN_S):
            doing = ", ".join(request.op for request in self._pending.values())
            raise EnvError(
                f"the env server at {self.address} was silent for {silent:.0f} s ({doing}); "
                + (why or "is it running there, and not stopped? It was expected to answer within ")
                + ("" if why else f"{self.timeout_s:g} s")
            )
        self._say({"op": "ping", "awaiting": list(self._pending)})

    def _take(self, message: dict[str, Any]) -> None:
        if "gone" in message:
            if message["gone"] == self._key:
                raise _Gone
        elif "missing" in message:
            for number in message["missing"]:
                if number in self._pending:
                    self._post(self._pending[number], again=True)
        elif (request := self._pending.pop(message["reply"], None)) is not None:
            request.reply = message
            if "replaced" in message:
                counted = message["replaced"], message["lost"]
                self.replaced += counted[0] - self._counted[0]
                self.lost_episodes += counted[1] - self._counted[1]
                self._counted = counted

    def _recover(self) -> None:
        """Open a new session with the same sets, and ask again for what was not answered; chunk steps are lost."""
        waiting, self._pending = list(self._pending.values()), {}
        lost = sum(env.lose() for env in self.sets.values())
        self.lost_episodes += lost
        self.replaced += self.num_processes if hasattr(self, "about") else 0
        logger.warning("the env server at %s has lost the session; %d episodes are lost", self.address, lost)
        while True:
            self._losses += 1
            if self._losses > MAX_LOSSES:
                raise EnvError(f"the env server at {self.address} lost the session {MAX_LOSSES} times in a row")
            self._key, self._pending, self._counted = secrets.token_bytes(16), {}, (0, 0)
            try:
                opened = self._ask_new("open", **self._asked)
                self.about = opened["value"]
                for env in self.sets.values():
                    env.take_place(self._ask_new("make", **env.description()))
                break
            except _Gone:
                continue
        dropped = {request.fields["set"] for request in waiting if request.op == "drop"}
        for request in waiting:
            if request.op == "open":
                request.reply = opened
            elif request.fields.get("set", 0) in dropped:
                request.reply = {"value": None}
            elif request.reply is None:  # else it was a chunk step, which is lost
                if "shared" in request.fields:
                    request.fields["shared"] = self.sets[request.fields["set"]].is_shared
                self._post(request)

    def _ask_new(self, op: str, **fields: Any) -> dict[str, Any]:
        """`ask` in a session that is not complete yet. Raises _Gone."""
        request = self.send(op, **fields)
        while request.reply is None:
            self._listen()
        return self.wait(request)

    # ------------------------------------------------------------------------------------------ connection

    def _connect(self) -> zmq.Socket:
        socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        options = {zmq.MAXMSGSIZE: wire.MAX_FRAME, zmq.LINGER: 1000, zmq.RECONNECT_IVL_MAX: 1000}
        options |= {zmq.HEARTBEAT_IVL: 5000, zmq.HEARTBEAT_TIMEOUT: 30_000, zmq.RCVTIMEO: round(ASK_AGAIN_S * 1000)}
        options[zmq.IPV6] = int("[" in self.address)
        for option, value in options.items():
            socket.setsockopt(option, value)
        if self._token is not None:
            socket.curve_serverkey = wire.curve_keys(self._token, "server")[0]
            socket.curve_publickey, socket.curve_secretkey = wire.curve_keys(self._token, "client")
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            raise EnvError(f"{self.address} cannot be an env server: {error}") from None
        return socket

    def _watch(self) -> zmq.Socket:
        """What becomes of the connections is told here. Without a bound, and only what is asked for: where there is
        no room for an event, libzmq's thread waits, and with it every socket of this process."""
        address = f"inproc://connections-of-{self._key.hex()}"
        self._socket.monitor(address, WATCHED)
        monitor: zmq.Socket = zmq.Context.instance().socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(address)
        return monitor

    def _disconnect(self) -> None:
        self._ended.set()
        for env in self.sets.values():
            env.listen([])
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _why_not(self, silent: float) -> str:
        """Why the server does not talk to us, if that can be told. `silent`: for how many seconds."""
        if ended := self._why_ended():
            return f"it {ended}"
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._handshakes["begun"] += event == zmq.EVENT_CONNECTED
            self._handshakes["done"] += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._refused |= bool(event & REFUSED)
        few = max(3.0, silent / 2)  # of a stopped server, libzmq tries a connection for 30 s
        if not self._refused and (self._handshakes["begun"] < few or self._handshakes["done"]):
            return ""
        return "it has another token, or none" if self._token else "it refuses the connection: does it need a token?"

    def _stay_alive(self, socket: zmq.Socket) -> None:
        """Tell the server now and then that this process lives, whatever it is busy with."""
        while not self._ended.wait(min(ALIVE_S, self.about["session_timeout_s"] / 4)):
            message = {"protocol": wire.PROTOCOL, "session": self._key, "op": "alive"}
            with suppress(zmq.Again):
                socket.send_multipart(wire.pack(message), zmq.NOBLOCK)
            while socket.poll(0):
                socket.recv_multipart()
        socket.close(linger=0)
