"""Health and metrics of an env server over HTTP, for who watches over it."""

from __future__ import annotations

import logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envs.server import EnvServer

logger = logging.getLogger(__name__)


def serve_metrics(server: EnvServer, port: int) -> int:
    """Answer `/healthz` and `/metrics` (Prometheus) on this machine's loopback, in a thread; returns the port.

    Raises ValueError for a port that cannot be had.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            metrics = server.metrics()
            text = {
                "/healthz": "draining\n" if metrics["draining"] else "ok\n",
                "/metrics": "".join(f"env_server_{name} {value:.15g}\n" for name, value in metrics.items()),
            }.get(self.path)
            self.send_response(404 if text is None else 503 if text == "draining\n" else 200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug(format, *args)

    try:
        http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--metrics-port {port}: {error}") from None
    Thread(target=http.serve_forever, daemon=True).start()
    return http.server_address[1]
