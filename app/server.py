"""An HTTP server in a thread of its own: the port is ours before anything is loaded behind it; knows no page."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import uvicorn

START_SECONDS = 60.0
END_SECONDS = 5.0
ANY = ("0.0.0.0", "::")


class Server:
    """Listens at once; `serve` has it answer.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, host: str, port: int) -> None:
        """Takes the port; 0 takes a free one.

        Raises:
            OSError: The port is taken, or there is no such address here.
        """
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._host, self._socket = host, socket.socket(family, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(where)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Where a browser on this machine finds it."""
        host = "localhost" if self._host in ANY else f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def serve(self, app: Any) -> None:
        """Answers with an ASGI app from now on.

        Raises:
            RuntimeError: The app did not start; it has said why.
        """
        # Who asks and under which name is what the connection and our own checks say, not what headers claim.
        config = uvicorn.Config(app, log_level="warning", proxy_headers=False, server_header=False, lifespan="on")
        server = self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, args=([self._socket],), name="server", daemon=True)
        self._thread.start()
        late = time.monotonic() + START_SECONDS
        while not server.started:
            if not self._thread.is_alive() or time.monotonic() > late:
                self.close()
                raise RuntimeError("the server did not start")
            time.sleep(0.01)

    def close(self) -> None:
        """Ends it; what is being answered gets a moment."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(END_SECONDS)
        self._socket.close()
