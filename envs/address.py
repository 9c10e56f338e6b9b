"""Where an env server may listen: addresses that are safe and free, and what is to be found there."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from envs.handle import finds


def require_safe(bind: str, token: bytes | None) -> None:
    """Raises ValueError for an address that others than this machine's programs could use without a token."""
    scheme, _, rest = bind.partition("://")
    host, _, port = rest.rpartition(":")
    is_port = port == "*" or (port.isdecimal() and int(port) < 2**16)  # libzmq takes a greater one for another
    if scheme not in ("ipc", "tcp") or (scheme == "tcp" and not (host and is_port)):
        raise ValueError(f"{bind} is no address; expected ipc://PATH or tcp://HOST:PORT")
    if bind.startswith("ipc://@"):
        raise ValueError(f"{bind} is no path, and every user of this machine could connect to it; expected ipc://PATH")
    if scheme == "tcp" and token is None and host.strip("[]") not in ("127.0.0.1", "localhost", "::1"):
        raise ValueError(f"{bind} would let everybody in who can reach it; give --token-file, or bind to 127.0.0.1")


def require_free(bind: str) -> None:
    """Raises ValueError for the path of a server that runs, or of a file, either of which libzmq would remove."""
    path = Path(bind.removeprefix("ipc://"))
    if not bind.startswith("ipc://") or not path.exists():
        return
    if not path.is_socket():
        raise ValueError(f"{path} is there already, and is no socket")
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):  # a server that was killed leaves it behind
        probe.connect(str(path))
        raise ValueError(f"a server listens at {path} already")


def require_module(kind: str) -> None:
    """Raises ValueError for a class in a module that is not to be found here; env processes import it."""
    module, colon, _ = kind.partition(":")
    if colon and not (module and finds(module)):
        raise ValueError(f"no module {module} in {sys.prefix} or {os.getcwd()}; install it, or start where it lies")


def private_folder() -> str:
    """A new folder for a socket, where its path does not exceed the 107 bytes that it may have."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="env-server-", dir=usual if len(os.fsencode(usual)) < 80 else "/tmp")
