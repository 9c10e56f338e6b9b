"""`EnvServer` hosts the envs of one simulator for trainers in other processes, virtualenvs or machines.

    python -m envs.server KIND ID --bind ADDRESS        (`embodied-rl serve-env` starts it)

One thread takes messages, begins chunk steps and answers finished ones, and never waits. What takes its time (making
envs, resets, replacing a process) runs in a thread, one thing at a time for each session. A session is a trainer's
env pool: nothing of it is shared with other sessions, so that what goes wrong in one does not touch the others. It
needs numpy, pyzmq, msgpack, gymnasium and the simulator. `client` is the other end, `wire` what they say.
"""

from __future__ import annotations

import argparse
import hmac
import logging
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.z85
from zmq.utils.monitor import recv_monitor_message

from envs import wire
from envs.address import private_folder, require_free, require_module, require_safe
from envs.metrics import serve_metrics
from envs.pool import PooledVectorEnv
from envs.session import Limits, Session, Work, executed
from envs.wire import WireError

logger = logging.getLogger(__name__)
KEPT_REPLIES = 64  # of each session, for a client whose connection broke before it had them
MAX_QUEUED = 256  # requests of a session that wait for others
MAX_QUEUED_BYTES = 2**28  # of them all
WINDOW = 1024  # how far apart the numbers of requests in flight may be
POLL_S = 1
JOB_S = 5  # that an ending server waits for what a thread is doing
OUTCOME = ("reward", "terminated", "truncated", "valid", "state", "image", "task", "episode_number", "running")
FINAL = ("final_state", "final_image", "final_task")


class EnvServer:
    """Serves envs of one kind and id until `stop`.

    Args:
        bind: "ipc://PATH", with "*" for one in a new folder that no other user can enter, or "tcp://HOST:PORT", with
            "*" for any free port.
        token: what clients have to know; needed where others than this machine can connect.

    Raises ValueError for an address that would be open to everybody, or is another server's or a file, and for a class
    of your own whose module is not here.
    """

    def __init__(
        self, kind: str, env_id: str, bind: str, token: bytes | None = None, limits: Limits | None = None
    ) -> None:
        require_safe(bind, token)
        require_free(bind)
        require_module(kind)
        self.kind, self.id, self.limits = kind, env_id, limits or Limits()
        self.sessions: dict[bytes, Session] = {}
        self.counts: Counter[str] = Counter()
        self._context = zmq.Context()
        self._place: tuple[Path, int] | None = None  # the socket's file, and its inode
        self._folder = private_folder() if bind == "ipc://*" else None
        try:
            self._bind(f"ipc://{self._folder}/socket" if self._folder else bind, token)
        except BaseException:
            self.close(linger=0)  # the garbage collector would wait for its sockets
            raise
        self._threads = ThreadPoolExecutor(self.limits.max_sessions, "session")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._ends_at: float | None = None

    def _bind(self, bind: str, token: bytes | None) -> None:
        self._router = self._context.socket(zmq.ROUTER)
        options = {zmq.MAXMSGSIZE: wire.MAX_REQUEST, zmq.LINGER: 1000, zmq.SNDHWM: 1000, zmq.RCVHWM: 1000}
        options |= {zmq.HEARTBEAT_IVL: 5000, zmq.HEARTBEAT_TIMEOUT: 30_000, zmq.IPV6: int("[" in bind)}
        for option, value in options.items():
            self._router.setsockopt(option, value)
        self._gate = self._guard(token)
        failures = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._monitor = self._router.get_monitor_socket(failures | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._router.bind(bind)
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if self.address.startswith("ipc://"):
            path = Path(self.address.removeprefix("ipc://")).absolute()
            path.chmod(0o600)
            self._place = path, path.stat().st_ino

    def _guard(self, token: bytes | None) -> zmq.Socket | None:
        """Ask for CURVE keys made from the token; what decides on them answers libzmq's questions (ZAP, RFC 27)."""
        if token is None:
            return None
        _, self._router.curve_secretkey = wire.curve_keys(token, "server")
        self._router.curve_server = True
        self._router.zap_domain = b"envs"
        self._client_key = wire.curve_keys(token, "client")[0]
        gate = self._context.socket(zmq.REP)
        gate.bind("inproc://zeromq.zap.01")
        return gate

    # ------------------------------------------------------------------------------------------ the loop

    def run(self, parent: int | None = None) -> None:
        """Serve until `stop` and what it allows. `parent`: a descriptor whose closing ends the server at once."""
        looked = time.monotonic()
        try:
            while self._ends_at is None or (self.sessions and time.monotonic() < self._ends_at):
                ready = dict(zmq.zmq_poll([(thing, zmq.POLLIN) for thing in self._watched(parent)], POLL_S * 1000))
                before, looked = looked, time.monotonic()
                if (away := looked - before) > 2 * POLL_S:  # this process was stopped, and not its trainers silent
                    for session in self.sessions.values():
                        session.heard += away
                if parent in ready:
                    return
                if self._wake in ready:
                    with suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                if self._gate in ready:
                    self._decide()
                if self._monitor in ready:
                    recv_monitor_message(self._monitor)
                    self.counts["handshakes_failed"] += 1
                if self._router in ready:
                    self._receive()
                for key, session in list(self.sessions.items()):
                    self._advance(key, session, looked)
        finally:
            try:
                for session in self.sessions.values():
                    if session.job is not None:  # which may be closing the pool itself
                        wait([session.job[2]], JOB_S)
                    if session.pool is not None:
                        session.pool.close()
            finally:
                self._router.disable_monitor()
                self.close()

    def close(self, linger: int = 1000) -> None:
        """Leave the address; `run` does so as it ends. `linger`: milliseconds for what is still to be sent."""
        with suppress(OSError):
            if self._place is not None and self._place[0].stat().st_ino == self._place[1]:  # else it is another's
                self._place[0].unlink()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._context.destroy(linger)

    def stop(self, at_once: bool = False) -> None:
        """Take no new sessions and end when those there are have ended, or their time is over. From any thread."""
        self._ends_at = time.monotonic() + (0 if at_once else self.limits.drain_s)
        os.eventfd_write(self._wake, 1)

    def _watched(self, parent: int | None) -> list[Any]:
        """What something may be read from: sockets, wake-up, the env process that each chunk step waits for next."""
        things: list[Any] = [self._router, self._monitor, self._wake]
        things += [thing for thing in (self._gate, parent) if thing is not None]
        for session in self.sessions.values():
            for which in session.stepping if session.job is None else ():
                if (process := session.sets[which].awaited()) is not None:
                    things += process.descriptors
        return things

    def _decide(self) -> None:
        """Whether a client that has proved to own a key may connect."""
        assert self._gate is not None
        _, request, _, _, _, mechanism, *credentials = self._gate.recv_multipart()
        key = zmq.utils.z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        known = hmac.compare_digest(key, self._client_key)
        self.counts["admitted" if known else "not_admitted"] += 1
        status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        self._gate.send_multipart([b"1.0", request, *status, b"", b""])

    # ------------------------------------------------------------------------------------------ messages

    def _receive(self) -> None:
        """Take in a message; what is none of the protocol is counted and forgotten."""
        identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
        self.counts["messages"] += 1
        try:
            self._take(identity, wire.unpack(frames), sum(map(len, frames)))
        except (WireError, KeyError, TypeError, ValueError) as error:
            self.counts["malformed"] += 1
            logger.debug("a malformed message: %r", error)

    def _take(self, identity: bytes, message: dict[str, Any], size: int) -> None:
        key, op = message["session"], message["op"]
        if not isinstance(key, bytes) or len(key) != 16 or not isinstance(op, str):
            raise WireError("no session or no request")
        if not isinstance(message["protocol"], int) or not isinstance(message.get("set", 0), int):
            raise WireError("no protocol's number, or none of a set")
        if message["protocol"] != wire.PROTOCOL:
            self.counts["refused"] += 1
            self._refuse(identity, message, f"the server speaks protocol {wire.PROTOCOL}, not {message['protocol']}")
            return
        known = self.sessions.get(key)
        if known is None:
            if op != "open":
                self._router.send_multipart([identity, *wire.pack({"gone": key})])
                return
            if why := self._full():
                self.counts["refused"] += 1
                self._refuse(identity, message, why)
                return
        session = known or Session(identity, time.monotonic())
        session.heard = time.monotonic()
        if op == "alive":
            return
        if op == "ping":
            if not isinstance(message["awaiting"], list) or len(message["awaiting"]) > WINDOW:
                raise WireError("no list of what is awaited")
            session.identity = identity
            self._pong(session, message["awaiting"])
            return
        number = message["number"]
        if not isinstance(number, int) or number > session.newest + WINDOW or op not in (*Work.OPS, "step", "close"):
            raise WireError(f"request {op}")
        if number in session.seen or number < session.newest - WINDOW:
            self.counts["replayed"] += 1
            return
        queued = sum(waiting for _, _, waiting in session.queue) + size
        if len(session.queue) >= MAX_QUEUED or queued > MAX_QUEUED_BYTES:  # who pings is told that it never came
            self.counts["refused"] += 1
            return
        if known is None:
            self.sessions[key] = session
            self.counts["sessions"] += 1
        session.seen.add(number)
        session.seen.difference_update(range(session.newest - WINDOW, number - WINDOW))
        session.newest = max(session.newest, number)
        session.identity = identity
        session.queue.append((number, message, size))

    def _full(self) -> str:
        if self._ends_at is not None:
            return "the server is about to end and takes no new sessions"
        if (count := sum(not session.closing for session in self.sessions.values())) >= self.limits.max_sessions:
            return f"the server has {count} sessions already, which is all it takes"
        return ""

    def _refuse(self, identity: bytes, message: dict[str, Any], why: str) -> None:
        reply = {"reply": message["number"], "error": why, "kind": "EnvError"}
        self._router.send_multipart([identity, *wire.pack(reply)])

    def _pong(self, session: Session, awaiting: list[int]) -> None:
        """Tell what never came, and give again what went to a connection that is no more."""
        missing = [number for number in awaiting if number not in session.seen]
        self._router.send_multipart([session.identity, *wire.pack({"missing": missing})])
        for number in awaiting:
            if number in session.replies and session.replies[number][0] != session.identity:
                self._give(session, number, session.replies[number][1])

    def _answer(self, session: Session, number: int, reply: dict[str, Any], env: PooledVectorEnv | None) -> None:
        """`env`: whose state of things goes along, unless the client sees it in shared memory."""
        pool = session.pool
        counted = {} if pool is None else {"replaced": pool.replaced, "lost": pool.lost_episodes}
        if env is not None:
            ended = (env.buffers.terminated | env.buffers.truncated).any()
            names = (*OUTCOME, *(FINAL if ended else ()))
            reply = {**reply, "arrays": {name: getattr(env.buffers, name) for name in names}}
        try:
            frames = wire.pack({"reply": number, **reply, **counted, "now": time.monotonic()})
            if (size := wire.largest(frames)) > wire.MAX_FRAME:
                raise ValueError(f"the answer has {size} bytes in one part; a trainer takes {wire.MAX_FRAME} at most")
        except (TypeError, ValueError, OverflowError) as error:  # what an env says of itself may be anything
            frames = wire.pack({"reply": number, "error": str(error), "kind": "EnvError", **counted})
        self._give(session, number, frames)
        while len(session.replies) > KEPT_REPLIES:
            session.replies.popitem(last=False)

    def _give(self, session: Session, number: int, frames: list[Any]) -> None:
        session.replies[number] = session.identity, frames
        self._router.send_multipart([session.identity, *frames], copy=False)

    # ------------------------------------------------------------------------------------------ work

    def _advance(self, key: bytes, session: Session, now: float) -> None:
        """Whatever can be done for a session without waiting. `now`: when this turn of the loop began."""
        if session.job is not None:
            number, which, future = session.job
            if not future.done():
                session.hurry(now - self.limits.session_timeout_s)
                return
            session.job = None
            env = session.sets.get(-1 if which is None else which)
            self._answer(session, number, future.result(), None if which in session.shared else env)
            if session.closing or session.pool is None:  # it has ended, or could not be opened
                del self.sessions[key]
                return
        if now - session.heard > self.limits.session_timeout_s:
            self.counts["expired"] += 1
            logger.warning("a session ends: its trainer was silent for %g s", self.limits.session_timeout_s)
            session.queue.clear()
            session.queue.append((0, {"op": "close"}, 0))
        work = self._work(session)
        while session.queue and session.job is None:
            number, request, _ = session.queue.popleft()
            if request["op"] == "drop" and (step := session.stepping.pop(request.get("set", 0), None)):
                self._answer(session, step[0], {"error": "its envs were dropped", "kind": "EnvError"}, None)
            if request["op"] == "close":
                session.closing = True
                self._start(session, number, None, work.close)
            elif request["op"] == "step":
                reply = work.tried(partial(work.begin, number, request))
                if "error" in reply:
                    self._answer(session, number, reply, None)
            else:
                which = request.get("set") if request["op"] in ("reset", "restore", "make") else None
                self._start(session, number, which, partial(work.OPS[request["op"]], work, request))
        if session.stepping and session.job is None and session.pool is not None:
            session.pool.take_in()
            self._finish_chunks(session, session.pool.timeout_s, work)

    def _finish_chunks(self, session: Session, timeout_s: float, work: Work) -> None:
        """Answer the chunk steps that are done; those that failed or take too long are finished by a thread."""
        for which, (number, begun) in list(session.stepping.items()):
            env = session.sets[which]
            is_running, has_failed = env.awaited() is not None, env.has_failed()
            if is_running and not has_failed and time.monotonic() - begun < timeout_s:
                continue
            del session.stepping[which]
            if is_running or has_failed:
                self._start(session, number, which, partial(work.finish, env))
                return
            reply = work.tried(partial(work.finish, env))
            self._answer(session, number, reply, None if which in session.shared else env)

    def _work(self, session: Session) -> Work:
        return Work(self.kind, self.id, self.limits, self.counts, session)

    def _start(self, session: Session, number: int, which: int | None, job: Callable[[], dict[str, Any]]) -> None:
        future = self._threads.submit(self._work(session).tried, job)
        future.add_done_callback(lambda _: os.eventfd_write(self._wake, 1))
        session.job = number, which, future

    def metrics(self) -> dict[str, float]:
        """Counters since the start and the present state, by name."""
        sessions = list(self.sessions.values())
        pools = [session.pool for session in sessions if session.pool is not None]
        sets = [env for session in sessions for env in list(session.sets.values())]
        counts = Counter(dict(self.counts)) + Counter(executed(sets))  # of a copy: the loop counts on
        names = ("messages", "malformed", "replayed", "refused", "admitted", "not_admitted", "handshakes_failed")
        return {
            **{f"{name}_total": counts[name] for name in (*names, "sessions", "expired", "chunks", "env_steps")},
            "sessions": len(sessions),
            "envs": sum(env.num_envs for env in sets),
            "processes": sum(pool.num_processes for pool in pools),
            "replaced_processes": sum(pool.replaced for pool in pools),
            "lost_episodes": sum(pool.lost_episodes for pool in pools),
            "draining": float(self._ends_at is not None),
        }


def main() -> None:
    """The command line; `embodied-rl serve-env` has the same options."""
    parser = argparse.ArgumentParser(prog="python -m envs.server", description="Serve the envs of one simulator.")
    parser.add_argument("kind", help="maniskill, libero, gymnasium, or module:Class")
    parser.add_argument("id")
    parser.add_argument("--bind", default="tcp://127.0.0.1:*", help="ipc://PATH or tcp://HOST:PORT")
    parser.add_argument("--token-file", help="needed unless only this machine can connect")
    parser.add_argument("--metrics-port", type=int, help="/healthz and /metrics on 127.0.0.1")
    parser.add_argument("--parent", type=int, help="a descriptor whose closing ends the server")
    for limit in fields(Limits):
        name, kind = limit.name.removesuffix("_s").replace("_", "-"), type(limit.default)
        about = f"{limit.metadata['about']} ({limit.default})"
        parser.add_argument(f"--{name}", dest=limit.name, type=kind, default=limit.default, help=about)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s env server %(levelname)s %(message)s")
    try:
        token = wire.read_token(args.token_file) if args.token_file else None
        limits = Limits(**{limit.name: getattr(args, limit.name) for limit in fields(Limits)})
        server = EnvServer(args.kind, args.id, args.bind, token, limits)
    except (OSError, ValueError, zmq.ZMQError) as error:
        sys.exit(f"env server: {error}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop(at_once=server._ends_at is not None))
    try:
        if args.metrics_port is not None:
            print(f"metrics on http://127.0.0.1:{serve_metrics(server, args.metrics_port)}/metrics", flush=True)
        print(f"serving {args.id} ({args.kind}) on {server.address}", flush=True)
    except (OSError, ValueError) as error:  # whoever started it is gone, or the port is taken
        server.close()
        sys.exit(f"env server: {error}")
    server.run(args.parent)
    os._exit(0)  # a simulator that is being made in a thread would keep the process


if __name__ == "__main__":
    main()
