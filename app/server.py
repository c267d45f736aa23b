"""An HTTP server in its own thread, which binds the port before the app is loaded. Independent of pages."""

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
    """Binds a port on construction; `serve` starts to handle requests.

    Attributes:
        port: Port that it listens on.
    """

    def __init__(self, host: str, port: int) -> None:
        """Binds the port; 0 chooses a free one.

        Raises:
            OSError: The port is in use, or the address is not available.
        """
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._host, self._socket = host, socket.create_server((host, port), family=family)
        self.port: int = self._socket.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """URL for a browser on this machine."""
        host = "localhost" if self._host in ANY else f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def serve(self, app: Any) -> None:
        """Starts to serve an ASGI app.

        Raises:
            RuntimeError: The app did not start; its error has been printed.
        """
        # Client address and host come from the connection and our own checks, not from forwarding headers.
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
        """Stops the server after a short grace period for requests in progress."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(END_SECONDS)
        self._socket.close()
