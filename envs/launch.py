"""Starts env servers as child processes, under this or another interpreter.

The other interpreter needs numpy, pyzmq, msgpack, gymnasium and the simulator; this package comes along by its path
alone, whatever else is installed beside it.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence

from envs import child
from envs.base import EnvError
from envs.handle import describe_end

START_TIMEOUT_S = 60.0


class ServerProcess:
    """An env server that ends when this process does. `address` is where it listens.

    Args:
        arguments: of `python -m envs.server`.
        python: the interpreter; default: this one.

    Raises EnvError with what it said if it does not start.
    """

    def __init__(self, arguments: Sequence[str], python: str = sys.executable) -> None:
        theirs, self._alive = os.pipe()  # it ends when nobody holds our end any more
        try:
            self.popen = subprocess.Popen(
                child.command(python, "envs.server", [*arguments, "--parent", str(theirs)]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                bufsize=0,  # so that a line that was not read is one that can be waited for
                pass_fds=[theirs],
                env={**os.environ, "PYTHONPATH": os.getcwd()},  # your own simulator may lie there
                start_new_session=True,  # Ctrl-C is this process's; what it means for the server is decided here
            )
        except OSError as error:
            os.close(self._alive)
            raise EnvError(f"the env server cannot be started: {error}") from None
        finally:
            os.close(theirs)
        self.said: list[str] = []
        try:
            self.address = self._await_address()
        except BaseException:
            self.close()
            raise

    def close(self, timeout_s: float = 10.0) -> int:
        """Ask it to end, which it does once its sessions have; returns its exit code."""
        self.popen.terminate()
        try:
            code = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            code = self.popen.wait()
        os.close(self._alive)
        return code

    def why_ended(self) -> str:
        """How it ended, if it did, such as "was killed by SIGKILL"; else nothing."""
        code = self.popen.poll()
        return "" if code is None else describe_end(code)

    def _await_address(self) -> str:
        assert self.popen.stdout is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while select.select([self.popen.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = self.popen.stdout.readline().decode()
            if not line:
                break
            self.said.append(line.rstrip())
            if line.startswith("serving "):
                return line.split()[-1]
        self.popen.kill()
        raise EnvError(f"the env server did not start (exit code {self.popen.wait()}); what it said is above")
